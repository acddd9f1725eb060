"""What a GPU traces is what Inductor compiles here: norms, gate and rope as opaque ops, and the
passes that a configuration for a GPU has by itself. The compiled forward equals the written one.

On a CPU torch functions are traced and Inductor fuses them, so no other test lowers these ops.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizer import KINDS, write

from compile.config import CompilationConfig
from compile.counters import counter
from compile.graphs.pools import GraphPools, new_graph_pool
from compile.resolve import DEFAULT_PASSES, StepLimits, resolve
from compile.scope import CompileScope, compile_scope
from model.kernels import dispatch
from model.parallel import Shard
from model.quantization import WeightFormat

LAYERS, VOCAB = 2, 509
TOLERANCE = 1e-4
MOE: dict[str, Any] = {"num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": 3},
    "Qwen2": {},
    # Norms of queries and keys are of three dimensions.
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4, **MOE},
    "Qwen3Moe": {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 12, **MOE},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "kv_lora_rank": 20,
        "q_lora_rank": 28,
        "moe_intermediate_size": 12,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        **MOE,
    },
}
SLOW = {"DeepseekV3"}
"""Half a minute in Inductor."""
SMALL = {"num_hidden_layers": LAYERS, "hidden_size": 32, "intermediate_size": 48}


@pytest.fixture(autouse=True)
def _traced_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "uses_ops", lambda _: True)
    torch._dynamo.reset()


def scope(path: Path, shard: Shard, held: WeightFormat, *, use_inductor: bool) -> CompileScope:
    """Return the scope of a rank whose configuration is a GPU's, but for its graphs."""
    limits = StepLimits(max_num_seqs=4, max_num_batched_tokens=32)
    given = CompilationConfig(level=2, use_inductor=use_inductor)
    config = resolve(given, limits, device="cuda")
    assert config.passes == DEFAULT_PASSES and config.use_inductor == use_inductor
    pools = GraphPools(partial(new_graph_pool, torch.device("cpu")))
    factors = {"model": str(path), "group": shard.group_name, "quantization": held}
    return CompileScope(config, tp_rank=shard.rank, key_factors=factors, pools=pools)


def logits(paged: Any, model: Any) -> list[torch.Tensor]:
    """Return the logits of two prompts and of a decode step; none on ranks that do not sample."""
    runner, ids = paged(model), torch.arange(40) * 11 % VOCAB
    steps = [
        runner.step({"a": ids[:7], "b": ids[7:20]}),
        runner.step({"a": ids[20:21], "b": ids[21:22]}),
    ]
    return [each for step in steps for each in step.values()]


def compare(
    load: Any,
    paged: Any,
    path: Path,
    shard: Shard,
    *,
    use_inductor: bool = True,
    held: WeightFormat = "none",
) -> float:
    """Return how far the compiled forward of a rank is from the one that is written."""
    wanted = logits(paged, load(path, shard, held)[0])
    with compile_scope(scope(path, shard, held, use_inductor=use_inductor)):
        compiled, _ = load(path, shard, held)
    found = logits(paged, compiled)
    assert compiled.model.is_compiled
    pairs = zip(found, wanted, strict=True)
    return max([float((a - b).abs().max()) for a, b in pairs], default=0.0)


@pytest.mark.feature("O06")
@pytest.mark.parametrize(
    "family",
    [pytest.param(each, marks=[pytest.mark.slow] * (each in SLOW)) for each in FAMILIES],
)
def test_inductor_compiles_what_a_gpu_traces(
    family: str, make_checkpoint: Any, load: Any, paged: Any
) -> None:
    path, _ = make_checkpoint(family=family, **SMALL, **FAMILIES[family])
    # Attention takes the first sum of a layer; the norm behind each MLP is fused by the pass.
    with counter.expect(num_pass_matches=LAYERS, num_backend_compilations=1):
        assert compare(load, paged, path, Shard()) < TOLERANCE


@pytest.mark.feature("O06")
@pytest.mark.parametrize(
    ("family", "use_inductor"),
    [("Llama", True), ("Llama", False), ("Mixtral", False), ("DeepseekV3", False)],
)
def test_two_gpus_sum_and_norm_in_one_op(
    family: str, use_inductor: bool, make_checkpoint: Any, load: Any, paged: Any, run_ranks: Any
) -> None:
    """Of each rank and layer two: behind attention and behind the MLP or experts. The second norm
    was one of a sum before."""
    path, _ = make_checkpoint(family=family, **SMALL, **FAMILIES[family])
    with counter.expect(num_pass_matches=2 * (2 + 1) * LAYERS):
        errors = run_ranks(
            2, lambda shard: compare(load, paged, path, shard, use_inductor=use_inductor)
        )
    assert max(errors) < TOLERANCE


@pytest.mark.parametrize(
    "use_inductor", [pytest.param(True, marks=pytest.mark.slow), False], ids=["inductor", "traced"]
)
@pytest.mark.parametrize(
    "held",
    [
        pytest.param("fp8", marks=pytest.mark.feature("O03")),
        pytest.param("nvfp4", marks=pytest.mark.feature("O04")),
    ],
)
def test_two_gpus_sum_norm_and_quantize_in_one_op(
    held: WeightFormat,
    use_inductor: bool,
    make_checkpoint: Any,
    load: Any,
    paged: Any,
    run_ranks: Any,
    tmp_path: Path,
) -> None:
    """Each norm of a sum but the last, whose reader, the head, is no FP8 or FP4 product."""
    path, _ = make_checkpoint(**SMALL | {"intermediate_size": 64})
    if held == "nvfp4":
        path, _ = write(path, KINDS[held], tmp_path)
    num_quantized = 2 * LAYERS - 1
    with counter.expect(num_pass_matches=2 * ((2 + 1) * LAYERS + num_quantized)):
        errors = run_ranks(
            2,
            lambda shard: compare(load, paged, path, shard, use_inductor=use_inductor, held=held),
        )
    # Fused or not, the same functions compute.
    assert max(errors) < TOLERANCE
