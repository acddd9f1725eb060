"""Triton kernels equal their torch references in Triton's interpreter, and compile without a GPU.

The interpreter is chosen by an environment variable before Triton is imported, so the checks run in
a process of their own.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quantizer import KINDS, write

SCRIPT = Path(__file__).with_name("interpreted.py")
ROOT = SCRIPT.parents[3]


NUM_SHAPES = {
    "decode": 5,
    "decode_e4m3": 4,
    "decode_splits": 1,
    "e4m3": 1,
    "prefill": 5,
    "prefill_e4m3": 2,
    "prefill_padding": 2,
    "rope": 5,
    "rope_e4m3": 2,
    "latent_write": 3,
    "latent_decode": 3,
    "latent_prefill": 4,
    "norm": 5,
    "all_reduce": 4,
    "silu": 5,
    "experts": 4,
    "integers": 6,
    "integer_experts": 2,
    "rounding": 6,
    "rounding_in_groups": 6,
    "rounding_in_blocks": 6,
    "fp8_linear": 8,
    "nvfp4_linear": 5,
    "fp8_experts": 4,
    "fp8_grouped_experts": 4,
    "nvfp4_experts": 2,
    "filters": 4,
    "route": 6,
    "route_in_groups": 8,
    "route_of_no_numbers": 3,
    "sort": 4,
    "adapters": 5,
    "model": 1,
    "integer_model": 1,
    "short_model": 1,
}
"""By group of checks: how many random shapes, times the factor of `--fuzz`."""


SLOW = {"integer_model", "short_model"}
"""Whose kernels are checked one by one; `model` shows that models call them."""


@pytest.fixture(scope="module")
def interpreted(
    request: pytest.FixtureRequest,
    make_checkpoint: Any,
    pytestconfig: pytest.Config,
    tmp_path_factory: pytest.TempPathFactory,
) -> subprocess.CompletedProcess[str]:
    """What one process printed that checked all groups which this run has tests of."""
    shape = {"hidden_size": 60, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12}
    path, _ = make_checkpoint(**shape)
    latents = {"kv_lora_rank": 20, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14}
    experts = {"n_routed_experts": 6, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3}
    others = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 18}
    latent_path, _ = make_checkpoint(family="DeepseekV3", **latents, **experts, **others)
    sparse = {"hidden_size": 32, "head_dim": 16, "num_experts": 4, "moe_intermediate_size": 16}
    sparse |= {"num_hidden_layers": 1, "num_experts_per_tok": 2}
    plain_path, _ = make_checkpoint(family="Qwen3Moe", **sparse)
    fp4_path, _ = write(plain_path, KINDS["nvfp4"], tmp_path_factory.mktemp("fp4"))
    paths = os.pathsep.join(map(str, (path, latent_path, fp4_path)))
    env = {"PYTHONPATH": str(ROOT), "CHECKPOINTS": paths}
    env |= {"TRITON_INTERPRET": "1", "TRITON_DEFAULT_FP_FUSION": "1"}
    factor = pytestconfig.getoption("--fuzz")
    names = {item.name for item in request.session.items}
    groups = [
        f"{group}={factor * number}"
        for group, number in NUM_SHAPES.items()
        if f"test_kernels_equal_their_torch_references[{group}]" in names
    ]
    command = [sys.executable, "-W", "error", str(SCRIPT), *groups]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True)


FEATURES = {
    "O02": "all_reduce",
    "S04": "route_in_groups",
    "S08": "integer|fp8|nvfp4|rounding|short",
    "S09": "e4m3",
    "S10": "adapters",
}
"""Expressions that find the groups of checks which show a row."""


def marked(group: str) -> Any:
    found = [row for row, expression in FEATURES.items() if re.search(expression, group)]
    marks = [pytest.mark.feature(row) for row in found]
    return pytest.param(group, marks=[*marks, *[pytest.mark.slow] * (group in SLOW)])


@pytest.mark.feature("Y02")
@pytest.mark.parametrize("group", [marked(group) for group in NUM_SHAPES])
def test_kernels_equal_their_torch_references(
    interpreted: subprocess.CompletedProcess[str], group: str, pytestconfig: pytest.Config
) -> None:
    number = pytestconfig.getoption("--fuzz") * NUM_SHAPES[group]
    lines = interpreted.stdout.splitlines()
    assert f"{group}: {number} shapes" in lines, interpreted.stderr


REPORT = ROOT / "examples" / "bench" / "kernel_report.py"
KERNELS = {
    "adapters": ("expand", "shrink"),
    "all_reduce": ("all_reduce_norm",),
    "decode": ("join", "split"),
    "elementwise": ("norm", "silu"),
    "experts": ("down", "sum", "up"),
    "filters": ("filter", "search"),
    "fp4": ("linear",),
    "fp8": ("linear",),
    "integers": ("linear",),
    "latent": ("latent", "write"),
    "latent_chunks": ("before", "own"),
    "prefill": ("prefill",),
    "rope": ("rope",),
    "rounding": ("blocks", "groups", "rows"),
    "routing": ("route", "sort"),
}
SHARED_LIMIT = {80: 100 * 1024, 90: 164 * 1024}


@pytest.fixture(scope="module")
def usages(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, str(REPORT), "--json"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.feature("Y02")
def test_every_kernel_compiles_for_both_architectures(usages: list[dict[str, Any]]) -> None:
    assert {(usage["kernel"], usage["arch"]) for usage in usages} == {
        (f"{module}._{kernel}_kernel", arch)
        for module, kernels in KERNELS.items()
        for kernel in kernels
        for arch in SHARED_LIMIT
    }


@pytest.mark.slow
@pytest.mark.feature("Y02")
def test_no_kernel_spills_or_exceeds_a_multiprocessor(usages: list[dict[str, Any]]) -> None:
    assert [u for u in usages if u["stack_bytes"] or u["local_bytes"]] == []
    assert [u for u in usages if not 0 < u["registers"] <= 255] == []
    # A multiprocessor has 65,536 registers; a program that takes more cannot start.
    assert [u for u in usages if u["registers"] * u["num_warps"] * 32 > 65536] == []
    assert [u for u in usages if u["shared_bytes"] > SHARED_LIMIT[u["arch"]]] == []


@pytest.mark.slow
@pytest.mark.feature("Y02")
def test_attention_copies_tiles_ahead_and_decode_leaves_room_for_three_programs(
    usages: list[dict[str, Any]],
) -> None:
    """A decode whose copies are waited for at once reads memory at a fraction of its rate."""
    decodes = [u for u in usages if u["kernel"] == "decode._split_kernel"]
    assert {u["arch"] for u in decodes} == set(SHARED_LIMIT) and len(decodes) >= 20
    assert [u for u in decodes if min(u["buffers"]) < 2 or max(u["waits"]) < 2] == []
    assert [u for u in decodes if u["per_multiprocessor"] < 3] == []
    prefills = [u for u in usages if u["kernel"] == "prefill._prefill_kernel"]
    assert {u["arch"] for u in prefills} == set(SHARED_LIMIT)
    assert [u for u in prefills if min(u["buffers"]) < 2 or max(u["waits"]) < 2] == []
