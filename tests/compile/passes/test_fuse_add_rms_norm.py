"""Additions and norms become one op wherever both can be seen, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from compile.config import CompilationConfig
from compile.context import ForwardContext, forward_context
from compile.counters import counter
from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm, fused_add_rms_norm
from compile.passes.graph_pass import operation
from compile.passes.manager import PassManager
from compile.resolve import StepLimits, resolve
from model.config import ModelConfig
from model.kernels import dispatch, elementwise
from model.kv_cache import KVCacheSpec
from model.layers.attention import AttentionMetadata
from model.layers.decoder import CausalLM
from model.parallel import Placement, Shard

T, E, L, VOCAB = 5, 16, 2, 32
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"]
)


def num_fused(graph: torch.fx.Graph) -> int:
    return len(graph.find_nodes(op="call_function", target=fused_add_rms_norm.default))


def arguments(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((T, E), (T, E), (E,))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return elementwise.rms_norm(x, weight, 1e-5)


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    """Two fused norms in a row, the second sum unused by anything behind it."""
    residual = residual + x
    normed = norm(residual, weight)
    return elementwise.rms_norm(normed * 2 + residual, weight, 0.25), residual


@DTYPES
def test_both_norms_of_a_block_are_fused(graph_of: Any, dtype: torch.dtype) -> None:
    args = arguments(dtype)
    module = graph_of(block, *args)
    before = len(module.graph.nodes)
    assert FuseAddRMSNorm()(module.graph) == 2
    module.graph.lint()
    module.recompile()
    assert num_fused(module.graph) == 2
    # What was matched is gone; three nodes came for each.
    assert len(module.graph.nodes) < before
    calls = module.graph.find_nodes(op="call_function", target=fused_add_rms_norm.default)
    assert [call.args[3] for call in calls] == [1e-5, 0.25]
    inputs = [named(args, node) for node in module.graph.find_nodes(op="placeholder")]
    for found, wanted in zip(module(*inputs), block(*args), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


def named(args: tuple[torch.Tensor, ...], node: torch.fx.Node) -> torch.Tensor:
    """Return the argument that a placeholder stands for."""
    names = {"x": 0, "residual": 1, "weight": 2}
    name = node.name.removeprefix("l_").split("_")[0]
    return args[names[name]]


def test_the_norm_of_a_gpu_is_fused_as_well(graph_of: Any) -> None:
    def opaque(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        residual = residual + x
        return dispatch.rms_norm(residual, weight, 1e-5), residual

    module = graph_of(opaque, *arguments(torch.float32))
    assert FuseAddRMSNorm()(module.graph) == 1
    assert num_fused(module.graph) == 1


def subtracts_the_mean(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    centred = summed - summed.mean(-1, keepdim=True)
    return weight * (centred * torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5))


def norms_columns(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    return weight * (summed * torch.rsqrt(summed.square().mean(0, keepdim=True) + 1e-5))


def writes_between(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
    summed = x + residual
    x.add_(1)
    return norm(summed, weight), summed


UNLIKE: dict[str, Callable[..., Any]] = {
    "no sum": lambda x, residual, weight: norm(x, weight) + residual,
    "a sum of two shapes": lambda x, residual, weight: norm(x + residual[:1], weight),
    "a sum with a number": lambda x, residual, weight: norm(x + 1.0, weight) + residual,
    "a wider weight": lambda x, residual, weight: norm((x + residual).bfloat16(), weight),
    "a wider sum": lambda x, residual, weight: norm(x + residual.double(), weight),
    "a weight of rows": lambda x, residual, weight: norm(x + residual, x * weight),
    "another mean": norms_columns,
    "another norm": subtracts_the_mean,
    "a weight made later": lambda x, residual, weight: (lambda s: norm(s, weight * s[0]))(
        x + residual
    ),
    "a write between": writes_between,
}


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_a_norm_of_a_sum_is_left_alone(graph_of: Any, name: str) -> None:
    module = graph_of(UNLIKE[name], *arguments(torch.float32))
    text = module.print_readable(print_output=False)
    assert FuseAddRMSNorm()(module.graph) == 0
    module.recompile()
    assert module.print_readable(print_output=False) == text


def test_a_norm_whose_parts_are_used_elsewhere_keeps_them() -> None:
    def leaks(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
        summed = x + residual
        scale = torch.rsqrt(summed.square().mean(-1, keepdim=True) + 1e-5)
        return weight * (summed * scale), scale

    args = arguments(torch.float32)
    module = make_fx(leaks, tracing_mode="fake")(*args)
    assert FuseAddRMSNorm()(module.graph) == 1
    module.graph.lint()
    module.recompile()
    for found, wanted in zip(module(*args), leaks(*args), strict=True):
        torch.testing.assert_close(found, wanted)


# --- a whole model ------------------------------------------------------------------------------


def tiny_llama(dtype: torch.dtype, shard: Shard | None = None) -> CausalLM:
    """Return a random model whose weights are as they are read."""
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": E,
        "intermediate_size": 2 * E,
        "num_hidden_layers": L,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    config = ModelConfig.from_dict(fields, "config.json")
    model = CausalLM(config, Placement(dtype, torch.device("cpu"), shard or Shard()))
    generator = torch.Generator().manual_seed(0)
    for piece in model.weight_slices():
        target = piece.target()
        target.copy_(torch.randn(target.shape, generator=generator) * 0.3)
        piece.layer.loaded(piece.parameter)
    return model.eval()


def forward(model: CausalLM, backbone: Callable[..., Any], num_tokens: int) -> torch.Tensor:
    """Compute the hidden states of one prompt over an empty cache."""
    layers = model.attention_layers()
    first = next(iter(layers.values()))
    dtype = model.model.norm.weight.dtype
    spec = KVCacheSpec(len(layers), first.num_kv_heads, first.head_dim, 4, dtype)
    pool = spec.allocate(16, torch.device("cpu"))
    metadata = AttentionMetadata(
        num_decodes=0,
        cu_seqlens_q=torch.tensor([0, num_tokens]).int(),
        seq_lens=torch.tensor([num_tokens]).int(),
        block_table=torch.arange(1, 17).int().unsqueeze(0),
        slot_mapping=torch.arange(4, 4 + num_tokens),
    )
    ids, positions = torch.arange(num_tokens) % VOCAB, torch.arange(num_tokens)
    for tensor in (ids, positions):
        torch._dynamo.mark_dynamic(tensor, 0)
    context = ForwardContext(layers, metadata, spec.views(pool, list(layers)))
    with torch.inference_mode(), forward_context(context):
        hidden: torch.Tensor = backbone(ids, positions)
    return hidden


@pytest.fixture(autouse=True)
def _forget_traces() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def as_traced(manager: PassManager) -> dict[str, Any]:
    """Compile nothing: run Dynamo's graph after the passes."""

    def backend(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        manager.apply(module)
        return module.forward

    return {"backend": backend}


def as_aten(manager: PassManager) -> dict[str, Any]:
    """Compile nothing: run the graph of ATen ops after the passes."""

    def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        manager.apply(module)
        return module.forward

    return {"backend": aot_autograd(fw_compiler=compiler)}


@pytest.mark.parametrize("how", [as_traced, as_aten])
@DTYPES
def test_a_model_of_l_layers_has_2l_fused_norms(how: Any, dtype: torch.dtype) -> None:
    model, manager = tiny_llama(dtype), PassManager.from_names(["fuse_add_rms_norm"])
    compiled = torch.compile(model.model, fullgraph=True, **how(manager))
    with counter.expect(num_pass_matches=2 * L):
        results = [forward(model, compiled, n) for n in (7, 2, 33)]
    assert manager.match_counts == {"fuse_add_rms_norm": 2 * L}
    for n, found in zip((7, 2, 33), results, strict=True):
        wanted = forward(model, model.model, n)
        torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])


class Group:
    """Stands where tracing needs a group and never calls it."""


@pytest.mark.parametrize("is_aten", [False, True], ids=["torch", "aten"])
def test_sums_over_ranks_do_not_hide_a_norm(is_aten: bool) -> None:
    model = tiny_llama(torch.float32, Shard(0, 2, Group()))
    manager = PassManager.from_names(["fuse_add_rms_norm"])

    def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        manager.apply(module)
        return lambda *_: (torch.zeros(7, E),)

    backend = aot_autograd(fw_compiler=compiler) if is_aten else compiler
    forward(model, torch.compile(model.model, fullgraph=True, backend=backend), 7)
    assert manager.match_counts == {"fuse_add_rms_norm": 2 * L}


@pytest.mark.parametrize("is_aten", [False, True], ids=["torch", "aten"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_on_a_gpu_no_sum_of_the_residual_is_a_launch_of_its_own(
    num_ranks: int, is_aten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The norm behind attention takes its sum already; the one behind the MLP does by the pass."""
    monkeypatch.setattr(dispatch, "uses_ops", lambda _: True)
    shard = Shard() if num_ranks == 1 else Shard(0, num_ranks, Group())
    model = tiny_llama(torch.float32, shard)
    # The passes that a configuration for a GPU has by itself.
    names = resolve(CompilationConfig(level=3), StepLimits(4, 16), device="cuda").passes
    manager, kinds = PassManager.from_names(names or ()), Counter[str]()

    def compiler(module: torch.fx.GraphModule, _inputs: Any) -> Callable[..., Any]:
        manager.apply(module)
        kinds.update(operation(node).kind for node in module.graph.nodes)
        return lambda *_: (torch.zeros(7, E),)

    backend = aot_autograd(fw_compiler=compiler) if is_aten else compiler
    forward(model, torch.compile(model.model, fullgraph=True, backend=backend), 7)
    assert manager.match_counts == {"fuse_add_rms_norm": L}
    assert kinds["lockstep::rms_norm"] == 1
    assert kinds["lockstep::fused_add_rms_norm"] == 2 * L


@pytest.fixture(scope="module")
def inductor_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all compilations here: what Inductor asks the compiler once is asked once."""
    return tmp_path_factory.mktemp("inductor")


@DTYPES
def test_inductor_runs_the_pass_in_its_own_graph(
    dtype: torch.dtype, inductor_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(inductor_dir))
    model, manager = tiny_llama(dtype), PassManager.from_names(["fuse_add_rms_norm"])
    options = manager.inductor_config()
    compiled = torch.compile(model.model, fullgraph=True, options=options)
    with counter.expect(num_pass_matches=2 * L):
        found = forward(model, compiled, 7)
    assert manager.match_counts == {"fuse_add_rms_norm": 2 * L}
    wanted = forward(model, model.model, 7)
    torch.testing.assert_close(found, wanted, rtol=0, atol=TOLERANCE[dtype])
