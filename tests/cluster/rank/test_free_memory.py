"""A graph that one rank has no room for is captured by none, and all come to it together."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from cluster.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from cluster.engine.lockstep import agree
from cluster.group.context import RankContext, RankPlace
from cluster.group.membership import GroupMembership
from cluster.group.rendezvous import LeaderEndpoints, introduce
from cluster.rank import forward, free_memory
from cluster.rank.free_memory import MARGIN_BYTES, FreeMemory, bytes_per_token, free_memory_bytes
from cluster.rank.runner import ModelRunner
from cluster.wire.credentials import Credentials
from cluster.wire.messages import StepKind, StepPlan, Vote
from cluster.wire.sockets import end_context
from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, forward_context
from compile.graphs.capture import CaptureCase, capture_all
from compile.graphs.pools import GraphPools, new_graph_pool
from model.config import ModelConfig

HOST = "127.0.0.1"
CREDENTIALS = Credentials("test", b"s" * 32)
SIZES = (8, 4, 2, 1)


def run_ranks(dp: int, tp: int, work: Callable[[GroupMembership], Any]) -> list[Any]:
    """Join dp x tp ranks on threads through one store, do the work on each and leave."""
    config = EngineConfig("model", 64, parallel=ParallelConfig(tp, dp))
    opened = [
        LeaderEndpoints(RankContext(config, RankPlace(dp_rank), credentials=CREDENTIALS))
        for dp_rank in range(dp)
    ]
    offers = [endpoints.rendezvous for endpoints in opened]
    told = introduce([offer for offer in offers if offer is not None])

    def run(rank: int) -> Any:
        dp_rank, tp_rank = divmod(rank, tp)
        where = told[dp_rank]
        place: dict[str, Any] = {"dp_rank": dp_rank, "dp_size": dp, "shares_experts": True}
        place["hello"] = where.hello(CREDENTIALS, 0)
        place["listener"] = opened[dp_rank].listener if tp_rank == 0 else None
        group = GroupMembership.join(where, tp_rank, "cpu", HOST, **place)
        try:
            return work(group)
        finally:
            group.close()

    try:
        with ThreadPoolExecutor(dp * tp) as threads:
            return list(threads.map(run, range(dp * tp)))
    finally:
        for endpoints in opened:
            end_context(endpoints.sockets, "test", linger=0)


def test_ranks_wait_for_all_and_sum_among_their_own_or_across() -> None:
    def work(group: GroupMembership) -> Any:
        mine = group.shard.all_reduce(torch.full((1,), 10.0**group.rank))
        assert group.shard.data is not None
        across = group.shard.data.all_reduce(torch.full((1,), 10.0**group.rank))
        return group.rank, group.all_reduce_min("n", 10 - group.rank), float(mine), float(across)

    assert run_ranks(2, 2, work) == [
        (0, 7, 11.0, 101.0),
        (1, 7, 11.0, 1010.0),
        (2, 7, 1100.0, 101.0),
        (3, 7, 1100.0, 1010.0),
    ]


@pytest.mark.feature("P05", "P10")
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_a_size_that_one_rank_has_no_room_for_is_skipped_by_all(dp: int, tp: int) -> None:
    """Each size is captured when all ranks have come to it; the last rank lacks room for two."""
    log: list[tuple[int, int]] = []
    lock = threading.Lock()
    per_token = 1000

    def work(group: GroupMembership) -> Any:
        is_last = group.rank == group.size - 1
        short = iter([MARGIN_BYTES + 7999, 1 << 40, MARGIN_BYTES, 1 << 40])
        free_memory = FreeMemory(
            group,
            torch.device("cpu"),
            per_token,
            free_bytes=lambda device: next(short) if is_last else 1 << 40,
        )

        def run(case: CaptureCase) -> None:
            with lock:
                log.append((case.descriptor.num_tokens, group.rank))

        def fits_on_all_ranks(key: BatchDescriptor) -> bool:
            time.sleep(0.02 * group.rank)
            return free_memory.fits_on_all_ranks(key.num_tokens)

        report = capture_all(
            [
                CaptureCase(CUDAGraphMode.FULL, BatchDescriptor(n, n, True), ForwardContext)
                for n in SIZES
            ],
            run,
            rank=group.rank,
            pools=GraphPools(lambda: new_graph_pool(torch.device("cpu")), policy="shared"),
            warmups={CUDAGraphMode.FULL: 0},
            synchronize=lambda: None,
            fits_on_all_ranks=fits_on_all_ranks,
        )
        return report.batch_sizes, [key.num_tokens for _, key in report.skipped]

    results = run_ranks(dp, tp, work)
    assert results == [((1, 4), [2, 8])] * (dp * tp)
    # The same order on all ranks, and nobody is a size ahead.
    assert [size for size, _ in log] == [4] * (dp * tp) + [1] * (dp * tp)


@pytest.mark.feature("C04", "P03", "P05")
def test_two_ranks_look_for_room_once_both_have_kv_one_tells_progress_and_each_knows_all_tokens(
    make_oracle: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a node share its memory: what one finds is what the others are about to take."""
    path, log = str(make_oracle("tied").path), []
    contexts: dict[int, list[ForwardContext]] = {0: [], 1: []}

    @contextmanager
    def entered(value: ForwardContext) -> Iterator[ForwardContext]:
        contexts[int(threading.current_thread().name)].append(value)
        with forward_context(value):
            yield value

    def free(device: torch.device) -> int:
        log.append("looked")
        return 1 << 40

    monkeypatch.setattr(free_memory, "free_memory_bytes", free)
    monkeypatch.setattr(forward, "forward_context", entered)
    told: dict[int, list[str]] = {0: [], 1: []}

    def work(group: GroupMembership) -> tuple[int, ...]:
        threading.current_thread().name = str(group.rank)
        config = EngineConfig(
            model_path=path,
            max_model_len=32,
            cache=CacheConfig(block_size=4, num_kv_blocks=32),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
            parallel=ParallelConfig(1, 2),
            compilation=CompilationConfig(
                level=0, cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=(1, 2)
            ),
        )

        def late(size: int) -> None:
            time.sleep(0.5 * group.rank)
            log.append("allocated")

        def tell(what: str, done: int, total: int) -> None:
            told[group.rank].append(what)

        context = RankContext(config, RankPlace(group.dp_rank), progress=tell)
        runner = ModelRunner(context, group=group, storage=late)
        plan = StepPlan(0, 1, 0, 0, [], [], [], [], [], [], [], 0, [])  # a dummy step
        runner.execute(plan, agree(votes, runner.forward.captured))
        return runner.forward.captured.batch_sizes

    votes = [Vote(0, 1, StepKind.MIXED, n, 1, n, True, False, 0, False) for n in (3, 9)]
    assert run_ranks(2, 1, work) == [(1, 2)] * 2
    assert log == ["allocated"] * 2 + ["looked"] * 4
    assert told[0].count("capturing graphs") == 2 and "capturing graphs" not in told[1]
    for rank in range(2):
        metadata = contexts[rank][-1].dp_metadata
        assert metadata is not None and metadata.num_tokens_across_dp == (3, 9)


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
