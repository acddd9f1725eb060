"""What a rank has done when it is ready: graphs captured, progress told, the process sealed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from wire_structs import vote_of

from cluster.config import CacheConfig, EngineConfig, SchedulerConfig
from cluster.engine.lockstep import AloneLockstep
from cluster.group.context import RankContext
from cluster.rank import forward
from cluster.rank.free_memory import MARGIN_BYTES, bytes_per_token
from cluster.rank.runner import ModelRunner
from compile.config import CompilationConfig
from compile.dispatch import BatchDescriptor
from compile.errors import LateCapture

GRAPH_BS = (1, 2, 4)


def make_runner(oracle: Any, sealed: str = "strict", **arguments: Any) -> ModelRunner:
    config = EngineConfig(
        model_path=str(oracle.path),
        max_model_len=32,
        cache=CacheConfig(block_size=4, num_kv_blocks=32),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16),
        compilation=CompilationConfig(
            level=0,
            cudagraph_mode="FULL_DECODE_ONLY",
            cudagraph_capture_sizes=GRAPH_BS,
            sealed=sealed,
        ),
    )
    return ModelRunner(RankContext(config, **arguments))


@pytest.mark.feature("C04")
def test_each_captured_graph_is_progress_that_is_told(make_oracle: Callable[[str], Any]) -> None:
    told: list[tuple[str, int, int]] = []
    runner = make_runner(
        make_oracle("tied"), progress=lambda what, done, total: told.append((what, done, total))
    )
    assert [each for each in told if each[0] == "capturing graphs"] == [
        ("capturing graphs", done, 3) for done in (1, 2, 3)
    ]
    report = runner.forward.report
    assert report is not None and report.elapsed_s > 0 and report.batch_sizes == GRAPH_BS


@pytest.mark.feature("P05")
def test_a_graph_that_does_not_fit_into_memory_is_skipped_and_its_steps_are_padded_to_none(
    make_oracle: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = make_oracle("tied")
    needed = bytes_per_token(make_runner(oracle).model_config, "float32")
    monkeypatch.setattr(forward, "free_memory_bytes", lambda device: MARGIN_BYTES + 2 * needed)
    runner = make_runner(oracle)
    assert runner.forward.captured.batch_sizes == (1, 2)
    agreed = AloneLockstep(runner.switch).agree(vote_of(3))
    assert (agreed.mode, agreed.batch.num_seqs) == (0, 3)


@pytest.mark.feature("X01")
@pytest.mark.parametrize("sealed", ["strict", "warn"])
def test_a_rank_that_is_ready_captures_nothing_more(
    make_oracle: Callable[[str], Any], sealed: str
) -> None:
    """Even if it is told to replay what no rank has captured."""
    runner = make_runner(make_oracle("tied"), sealed)
    agreed = AloneLockstep(runner.switch).agree(vote_of(4))
    agreed = msgspec.structs.replace(agreed, batch=BatchDescriptor(3, 3, True))
    batch = runner.inputs.dummy(3, 3)
    with torch.inference_mode():
        if sealed == "strict":
            with pytest.raises(LateCapture, match=r"num_tokens=3"):
                runner.forward.run(batch, agreed, 3)
        else:
            runner.forward.run(batch, agreed, 3)
    assert {key.num_seqs for key in runner.forward.num_replays} == set(GRAPH_BS)
