"""What tracing sees of a model: one graph for all batches, the same one on every rank, whose pieces
equal the model as it is written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _unregister_process_group

from compile.config import CompilationConfig, DynamicShapes
from compile.counters import counter
from compile.environment import DISABLE_COMPILE_CACHE
from compile.pieces.decorator import compile_as_is
from compile.pieces.diagnose import recompile_hazards
from compile.scope import CompileScope, compile_scope
from model.kernels import elementwise
from model.layers import linear, rotary
from model.layers.decoder import CausalLM
from model.parallel import Shard
from model.weights import load_model

VOCAB = 509
ATTENTION = torch.ops.lockstep.unified_attention_with_output
LATENT_ATTENTION = torch.ops.lockstep.mla_attention
EXPERTS = torch.ops.lockstep.routed_experts

LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "kv_lora_rank": 20,
    "moe_intermediate_size": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"family": "Llama"},
    "llama-biases": {"family": "Llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {"family": "Llama", "tie_word_embeddings": True},
    "mistral": {"family": "Mistral", "sliding_window": 3},
    "qwen2": {"family": "Qwen2"},
    "qwen3": {"family": "Qwen3", "head_dim": 8},
    "mixtral": {"family": "Mixtral", "num_local_experts": 3},
    "qwen3-moe": {
        "family": "Qwen3Moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 12,
        "decoder_sparse_step": 2,
    },
    "deepseek-v2": {
        "family": "DeepseekV2",
        "num_experts_per_tok": 2,
        "n_routed_experts": 6,
        "q_lora_rank": None,
        **LATENTS,
    },
    "deepseek-v3": {
        "family": "DeepseekV3",
        "num_experts_per_tok": 2,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "q_lora_rank": 28,
        "first_k_dense_replace": 1,
        **LATENTS,
    },
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


pytestmark = pytest.mark.usefixtures("torch_functions")


@pytest.fixture(autouse=True)
def _no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DISABLE_COMPILE_CACHE, "1")


def built(
    path: Path, dtype: torch.dtype = torch.float32, shard: Shard | None = None, **config: Any
) -> CausalLM:
    """Load a model whose pieces run as they were traced."""
    with compile_scope(CompileScope(CompilationConfig(compiler="eager", **config))):
        model, _ = load_model(path, shard=shard or Shard(), dtype=dtype, device="cpu")
    return model


def graph_of(model: Any) -> torch.fx.GraphModule:
    graph: torch.fx.GraphModule = model.model.compiled_forward.compiler.graph
    return graph


def run(paged: Any, model: CausalLM, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Prefill two prompts, decode, and mix both with padding."""
    runner = paged(model, dtype=dtype)
    ids = torch.arange(60) * 11 % VOCAB
    steps = [
        runner.step({"a": ids[:7], "b": ids[7:20]}),
        runner.step({"a": ids[20:21], "b": ids[21:22]}, num_padding_decodes=2),
        runner.step({"a": ids[22:23]}),
        runner.step({"b": ids[23:24], "c": ids[24:40]}, num_padding_tokens=3),
    ]
    return [logits for step in steps for logits in step.values()]


def assert_equal(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.feature("A04", "K03", "K04", "K07", "E09", "E10", "S04")
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in FAMILIES),
        ("llama", torch.bfloat16),
        ("qwen3-moe", torch.bfloat16),
        ("deepseek-v3", torch.bfloat16),
    ],
)
def test_one_graph_serves_every_batch_and_equals_the_model(
    name: str, dtype: torch.dtype, make_checkpoint: Any, paged: Any
) -> None:
    path, _ = make_checkpoint(**FAMILIES[name])
    plain, _ = load_model(path, dtype=dtype, device="cpu")
    model = built(path, dtype, level=3)
    with counter.expect(num_graphs_seen=1, num_piecewise_graphs_seen=5):
        found = run(paged, model, dtype)
    assert_equal(found, run(paged, plain, dtype))
    nodes = list(graph_of(model).graph.nodes)
    assert_attention_is_opaque(nodes, list(model.attention_layers()))
    assert_only_tokens_are_symbolic(nodes)
    assert_no_head(nodes)


@pytest.mark.feature("J01")
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
@pytest.mark.parametrize("mode", list(DynamicShapes))
def test_every_mode_of_dynamic_shapes_traces_a_family(
    paged: Any, make_checkpoint: Any, load: Any, mode: DynamicShapes, family: str
) -> None:
    path, _ = make_checkpoint(family=family)
    model: Any = built(path, level=2, dynamic_shapes=mode)
    with counter.expect(num_graphs_seen=1, num_piecewise_graphs_seen=1):
        found = run(paged, model)
    assert_equal(found, run(paged, load(path)[0]))
    assert model.model.compiled_forward.plan.guards == ()


@pytest.mark.feature("A02")
@pytest.mark.parametrize("family", ["Llama", "Mixtral"])
def test_level_1_traces_a_whole_family_as_one_graph(
    paged: Any, make_checkpoint: Any, load: Any, family: str
) -> None:
    path, _ = make_checkpoint(family=family)
    model: Any = built(path, level=1)
    traced = compile_as_is(model.model)
    model.forward = lambda ids, positions: traced(ids, positions)
    with counter.expect(num_graphs_seen=1, num_backend_compilations=0):
        found = run(paged, model)
    assert_equal(found, run(paged, load(path)[0]))


def test_weights_that_are_not_packed_are_traced_as_products(
    make_checkpoint: Any, load: Any, paged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "can_pack", lambda *_: False)
    path, _ = make_checkpoint(**FAMILIES["llama-tied"])
    model = built(path, level=3)
    assert_equal(run(paged, model), run(paged, load(path)[0]))
    nodes = list(graph_of(model).graph.nodes)
    assert len([node for node in nodes if node.target is torch._C._nn.linear]) == 2 * 4
    assert_only_tokens_are_symbolic(nodes)


def assert_attention_is_opaque(nodes: list[torch.fx.Node], layers: list[str]) -> None:
    """One op for each layer; it gets tensors, one of them to write into, and the layer's name."""
    calls = [node for node in nodes if node.target in (ATTENTION, LATENT_ATTENTION)]
    assert [call.args[-1] for call in calls] == layers
    for call in calls:
        assert len(call.args) == (7 if call.target is ATTENTION else 6)
        assert all(is_tensor(arg) for arg in call.args[:-1])
        assert call.kwargs == {} and not call.users
        # Allocated by the traced graph, so that whoever captures it owns the memory.
        output = call.args[-2]
        assert isinstance(output, torch.fx.Node)
        assert output.target in (torch.empty_like, "new_empty")


def assert_only_tokens_are_symbolic(nodes: list[torch.fx.Node]) -> None:
    """All tensors have the one symbolic size first or not at all, and no node computes a size."""
    symbols = set()
    for node in nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            symbols |= {size.node.expr for size in value.shape[:1] if is_symbolic(size)}
            assert not any(is_symbolic(size) for size in value.shape[1:]), node
        elif node.op not in ("placeholder", "output") and node.users:
            # A tuple of tensors; a number or a truth would be a branch on the host.
            assert isinstance(value, tuple) and all(isinstance(v, torch.Tensor) for v in value)
    assert len(symbols) == 1


def assert_no_head(nodes: list[torch.fx.Node]) -> None:
    assert not [node for node in nodes if "lm_head" in str(node.target)]
    computed = [node.meta.get("example_value") for node in nodes if node.op != "placeholder"]
    shapes = [str(tuple(value.shape)) for value in computed if isinstance(value, torch.Tensor)]
    assert not [shape for shape in shapes if str(VOCAB) in shape]


def is_tensor(node: object) -> bool:
    return isinstance(node, torch.fx.Node) and isinstance(
        node.meta.get("example_value"), torch.Tensor
    )


def is_symbolic(size: object) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


@pytest.mark.feature("K05")
def test_experts_are_one_node_however_many_there_are(make_checkpoint: Any, paged: Any) -> None:
    """Nothing in the graph counts experts, and nothing of routing is in it."""
    targets: list[list[str]] = []
    for num_experts, top_k in ((2, 1), (33, 7)):
        path, _ = make_checkpoint(
            family="Qwen3Moe",
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            moe_intermediate_size=12,
        )
        model = built(path, level=3)
        run(paged, model)
        nodes = list(graph_of(model).graph.nodes)
        targets.append([str(node.target) for node in nodes if node.op != "placeholder"])
        calls = [node for node in nodes if node.target is EXPERTS]
        assert len(calls) == 2
        for call in calls:
            assert all(is_tensor(arg) for arg in call.args[:4])
            assert call.args[4:] == (top_k, False, "", "", None, 1, 1, 1.0)
    assert targets[0] == targets[1]
    assert not [name for name in targets[0] if "topk" in name or "softmax" in name]


@pytest.mark.parametrize("name", ["llama", "dynamic"])
def test_no_layer_is_written_so_that_sizes_make_graphs(name: str, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**FAMILIES[name])
    model, _ = load_model(path, dtype=torch.float32, device="cpu")
    kinds = {type(module) for module in model.model.modules()} - {nn.ModuleList}
    traced = [kind.forward for kind in kinds] + [elementwise.rms_norm, elementwise.silu_and_mul]
    traced += [rotary.RotaryEmbedding._grown, linear.Linear.product]
    assert [hazard for function in traced for hazard in recompile_hazards(function)] == []


@pytest.mark.feature("K06")
def test_a_model_whose_layers_share_a_name_is_refused(make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**FAMILIES["llama"])
    model, _ = load_model(path, dtype=torch.float32, device="cpu")
    first, second = model.attention_layers().values()
    second.layer_name = first.layer_name
    found = f"^layer_name: wanted a name for each.*found '{first.layer_name}' twice$"
    with pytest.raises(ValueError, match=found):
        model.attention_layers()


@pytest.mark.parametrize("name", ["llama", "llama-tied", "qwen3", "qwen3-moe", "deepseek-v3"])
def test_every_rank_traces_the_same_graph(name: str, make_checkpoint: Any) -> None:
    path, _ = make_checkpoint(**FAMILIES[name])
    # Tracing needs a group and never calls it.
    texts, groups = [], [dist.ProcessGroup(dist.HashStore(), rank, 2) for rank in range(2)]
    for rank, group in enumerate(groups):
        _unregister_process_group("tp")  # a rank's process has its own table
        model: Any = built(path, shard=Shard(rank, 2, group), level=2)
        with torch.inference_mode():
            model.model.prepare(torch.arange(7), torch.arange(7))
        graph = graph_of(model)
        assert_only_tokens_are_symbolic(list(graph.graph.nodes))
        texts.append(graph.print_readable(print_output=False))
    assert texts[0] == texts[1]
    num_sparse = texts[0].count("torch.ops.lockstep.routed_experts(")
    assert num_sparse == (1 if name in ("qwen3-moe", "deepseek-v3") else 0)
    assert texts[0].count("torch.ops.lockstep.all_reduce(") == 1 + 2 * 2
    # Which experts a rank holds depends on its place in the group, too.
    assert texts[0].count("'tp'") == 1 + 2 * 2 + num_sparse
