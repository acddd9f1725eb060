"""A graph that one rank has no room for is captured by none, and all come to it together.

What can still be allocated is told by /proc, and by cgroups as containers and schedulers set them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import config_of, run_ranks
from wire_structs import plan_of, vote_of

from cluster.engine.lockstep import agree
from cluster.group.context import RankContext, RankPlace
from cluster.group.membership import GroupMembership
from cluster.rank import forward
from cluster.rank.free_memory import (
    MARGIN_BYTES,
    available_memory_bytes,
    bytes_per_token,
    free_memory_bytes,
)
from cluster.rank.runner import ModelRunner
from compile.context import ForwardContext, forward_context, get_forward_context
from model.config import ModelConfig
from model.kernels import cpu


@pytest.mark.feature("C04", "P03", "P05", "P10")
def test_two_ranks_look_for_room_together_and_skip_what_one_has_none_for(
    oracle: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once both have KV: what a rank of the node finds is what others are about to take."""
    path, log = oracle.path, list[str]()
    entered: list[tuple[int, ForwardContext]] = []
    # The last rank has no room for graphs of two sequences.
    free = {0: [1 << 40] * 3, 1: [1 << 40, MARGIN_BYTES, 1 << 40]}
    told: dict[int, list[str]] = {0: [], 1: []}

    def rank() -> int:
        return int(threading.current_thread().name)

    @contextmanager
    def enter(value: ForwardContext) -> Iterator[ForwardContext]:
        entered.append((rank(), value))
        with forward_context(value):
            yield value

    def look(device: torch.device) -> int:
        log.append("looked")
        time.sleep(0.02 * rank())
        return free[rank()].pop(0)

    monkeypatch.setattr(forward, "free_memory_bytes", look)
    monkeypatch.setattr(forward, "forward_context", enter)
    captured: list[tuple[int, int]] = []
    write = cpu.rope_and_write_kv

    def write_and_note(*args: Any) -> Any:
        if (key := get_forward_context().batch_descriptor) is not None:
            captured.append((rank(), key.num_tokens))
        return write(*args)

    monkeypatch.setattr(cpu, "rope_and_write_kv", write_and_note)

    def work(group: GroupMembership) -> tuple[int, ...]:
        threading.current_thread().name = str(group.rank)
        graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": (1, 2, 4)}
        config = config_of(path, 32, parallel=(1, 2), level=0, **graphs)

        def allocate_late(size: int) -> None:
            time.sleep(0.5 * group.rank)
            log.append("allocated")

        def tell(what: str, done: int, total: int) -> None:
            told[group.rank].append(what)

        context = RankContext(config, RankPlace(group.dp_rank), progress=tell)
        runner = ModelRunner(context, group=group, storage=allocate_late)
        runner.execute(plan_of([]), agree(votes, runner.forward.captured))  # a dummy step
        return runner.forward.captured.batch_sizes

    votes = [vote_of(1, n) for n in (3, 9)]
    assert run_ranks(work, dp=2) == [(1, 4)] * 2
    assert log == ["allocated"] * 2 + ["looked"] * 6
    assert "capturing graphs" in told[0] and "capturing graphs" not in told[1]
    # The same order on both ranks, and neither is a size ahead.
    assert [size for _, size in dict.fromkeys(captured)] == [4, 4, 1, 1]
    for place in range(2):
        [*_, last] = [context for each, context in entered if each == place]
        assert last.dp_metadata is not None and last.dp_metadata.num_tokens_across_dp == (3, 9)


def test_what_a_graph_needs_follows_from_the_model(tiny_checkpoint: Any) -> None:
    config = ModelConfig.from_dir(tiny_checkpoint)
    assert bytes_per_token(config, "float32") == 2 * bytes_per_token(config, "bfloat16")
    assert free_memory_bytes(torch.device("cpu")) > 1 << 20


def test_what_a_graph_of_a_sparse_model_needs_counts_each_tokens_experts() -> None:
    dense: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    sparse = dense | experts | {"architectures": ["Qwen3MoeForCausalLM"]}
    plain, routed = (ModelConfig.from_dict(each, "config.json") for each in (dense, sparse))
    row = 24 * 2 + 32 * 4  # gated in bfloat16, computed in float32
    for ranks in (1, 3):
        more = bytes_per_token(routed, "bfloat16", ranks) - bytes_per_token(
            plain, "bfloat16", ranks
        )
        assert more == ranks * 4 * row


# --- what the machine has left --------------------------------------------------------------------

FREE_KIB = 1000
STAT = """anon 100
inactive_file 30
active_file 20
total_inactive_file 300
total_active_file 200
"""


def node(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    shown = {"proc/meminfo": f"MemTotal: 9999 kB\nMemAvailable: {FREE_KIB} kB\n", **files}
    if cgroup:
        shown["proc/self/cgroup"] = cgroup
    for name, text in shown.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(group: str, limit: str, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/{group}"
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{used}\n",
        f"{path}/memory.stat": STAT,
    }


def v1(group: str, limit: int, used: int) -> dict[str, str]:
    path = f"sys/fs/cgroup/memory/{group}"
    return {
        f"{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{path}/memory.usage_in_bytes": f"{used}\n",
        f"{path}/memory.stat": STAT,
    }


@pytest.mark.parametrize(
    ("cgroup", "files", "wanted"),
    [
        pytest.param("", {}, FREE_KIB * 1024, id="no cgroups"),
        pytest.param("0::/\n", {}, FREE_KIB * 1024, id="no memory controller"),
        pytest.param("0::/\n", v2(".", "max", 7), FREE_KIB * 1024, id="no limit"),
        # What was read from files may be let go of.
        pytest.param("0::/\n", v2(".", "5000", 4990), 60, id="container"),
        pytest.param("0::/a/b\n", v2("a/b", "5000", 4990), 60, id="nested"),
        pytest.param(
            "0::/a/b\n", v2("a", "4000", 3995) | v2("a/b", "5000", 4990), 55, id="around it"
        ),
        pytest.param("0::/elsewhere\n", v2(".", "5000", 4990), 60, id="the mount is the group"),
        pytest.param(
            "3:cpu:/x\n9:hugetlb,memory:/job/7\n", v1("job/7", 5000, 4990), 510, id="version 1"
        ),
        pytest.param("9:memory:/x\n", v1("x", 2**63 - 4096, 4990), FREE_KIB * 1024, id="v1, none"),
        pytest.param("9:memory:/docker/1\n0::/\n", v1(".", 5000, 4990), 510, id="v1 container"),
    ],
)
def test_the_closest_limit_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], wanted: int
) -> None:
    assert available_memory_bytes(node(tmp_path, cgroup, files)) == wanted
