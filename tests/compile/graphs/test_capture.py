"""Graphs are captured once, largest first, in one window, for the memory that was estimated."""

from __future__ import annotations

import gc
import itertools
import pickle
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor, ForwardContext, get_forward_context
from compile.counters import counter
from compile.errors import GraphError, LateCapture, LateCompilation
from compile.graphs.capture import (
    MIN_GRAPH_BYTES,
    CaptureCase,
    CaptureReport,
    CaptureTrial,
    capture_all,
    capture_trials,
    capture_window,
    estimate_graph_bytes,
    graphs_to_capture,
    is_in_capture_window,
    is_sealed,
    note_late_capture,
    note_late_compile,
    seal,
    unseal,
    warmups_of,
)
from compile.graphs.cpu.pool import CpuGraphPool
from compile.graphs.pools import GraphPools
from compile.graphs.wrapper import CUDAGraphWrapper

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL
CONFIG = CompilationConfig(
    level=3,
    cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE,
    graph_bs=(1, 2, 4),
    capture_num_tokens=(1, 8, 16),
    num_warmups_full=1,
    num_warmups_piecewise=3,
)
IN_ORDER = [
    (PIECEWISE, BatchDescriptor(16, None, False)),
    (PIECEWISE, BatchDescriptor(8, None, False)),
    (PIECEWISE, BatchDescriptor(1, None, False)),
    (FULL, BatchDescriptor(4, 4, True)),
    (FULL, BatchDescriptor(2, 2, True)),
    (FULL, BatchDescriptor(1, 1, True)),
]
WHOLE_IN_ORDER = [
    (FULL, BatchDescriptor(16, 3, False)),
    (FULL, BatchDescriptor(8, 3, False)),
    *IN_ORDER[3:],
    (FULL, BatchDescriptor(1, 1, False)),
]
"""Of steps with at most three sequences, where no pieces are captured."""


NO_WARMUPS = {FULL: 0, PIECEWISE: 0}


@dataclass
class Recorder:
    """Stands where a model does, and notes what happens."""

    policy: str = "shared"
    num_pieces: int = 2
    events: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pools = GraphPools(lambda: CpuGraphPool(segment_bytes=1 << 12), policy=self.policy)
        self.inputs = torch.ones(16, 1024)
        pieces = self.pieces = [
            CUDAGraphWrapper(torch.tanh, PIECEWISE, self.pools, trims_pool=i == 0)
            for i in range(self.num_pieces)
        ]
        self.forward = CUDAGraphWrapper(lambda x: [p(x) for p in pieces][-1], FULL, self.pools)

    def run(self, case: CaptureCase) -> Any:
        mode = get_forward_context().cudagraph_runtime_mode
        self.events.append((mode.name, case.descriptor.num_tokens))
        return self.forward(self.inputs[: case.descriptor.num_tokens])

    def cases(self) -> list[CaptureCase]:
        return [CaptureCase(*graph, ForwardContext) for graph in graphs_to_capture(CONFIG, 4)]

    def capture(self, cases: list[CaptureCase] | None = None, **options: Any) -> CaptureReport:
        given: dict[str, Any] = {
            "rank": 0,
            "pools": self.pools,
            "warmups": warmups_of(CONFIG),
            "synchronize": lambda: self.events.append("synchronize"),
        }
        return capture_all(self.cases() if cases is None else cases, self.run, **(given | options))

    def trials(self) -> list[CaptureTrial]:
        return capture_trials(
            self.cases(),
            self.run,
            pools=self.pools,
            warmups=NO_WARMUPS,
            synchronize=lambda: None,
            used_bytes=lambda: self.pools.num_bytes,
        )

    def captured(self) -> list[Any]:
        return [event for event in self.events if event[0] in ("FULL", "PIECEWISE")]


# --- which graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "graphs"),
    [
        (NONE, []),
        (PIECEWISE, IN_ORDER[:3]),
        (FULL, WHOLE_IN_ORDER),
        (CUDAGraphMode.FULL_DECODE_ONLY, IN_ORDER[3:]),
        (CUDAGraphMode.FULL_AND_PIECEWISE, IN_ORDER),
    ],
)
def test_a_configuration_names_the_graphs_that_its_mode_replays(
    mode: CUDAGraphMode, graphs: list[Any]
) -> None:
    assert graphs_to_capture(replace(CONFIG, cudagraph_mode=mode), 3) == graphs
    # Where tokens are drafted, each batch size has a graph for that as well.
    drafting = graphs_to_capture(replace(CONFIG, cudagraph_mode=mode), 3, query_len=5)
    decodes = [key.num_seqs for _, key in graphs if key.uniform_decode]
    more = [(FULL, BatchDescriptor(bs * 5, bs, True)) for bs in decodes]
    assert Counter(drafting) == Counter([*graphs, *more])
    num_tokens = [key.num_tokens for mode, key in drafting if mode is FULL]
    assert num_tokens == sorted(num_tokens, reverse=True)


# --- the loop -----------------------------------------------------------------------------------


@pytest.mark.feature("C02")
def test_captures_descend_whatever_order_cases_come_in_and_reports_ascend() -> None:
    for cases in itertools.islice(itertools.permutations(Recorder().cases()), 0, 720, 97):
        recorder = Recorder()
        report = recorder.capture(list(cases))
        assert recorder.captured() == [(mode.name, key.num_tokens) for mode, key in IN_ORDER]
        assert report.captured == (*reversed(IN_ORDER[:3]), *reversed(IN_ORDER[3:]))
        assert (report.token_counts, report.batch_sizes) == ((1, 8, 16), (1, 2, 4))


@pytest.mark.feature("C04")
@pytest.mark.parametrize(("rank", "shown"), [(0, [(i, 6) for i in range(1, 7)]), (1, [])])
def test_progress_is_shown_on_rank_0_alone(rank: int, shown: list[Any]) -> None:
    times = iter([10.0, 12.5])
    progress: list[Any] = []
    report = Recorder().capture(
        rank=rank, progress=lambda *numbers: progress.append(numbers), clock=lambda: next(times)
    )
    assert progress == shown
    assert report.elapsed_s == 2.5


@pytest.mark.feature("C05", "C08")
@pytest.mark.parametrize(
    ("fields", "full", "piecewise"),
    [({}, 1, 3), ({"num_warmups_full": 2, "num_warmups_piecewise": 0}, 2, 0)],
)
def test_each_capture_is_warmed_up(fields: dict[str, int], full: int, piecewise: int) -> None:
    recorder = Recorder()
    recorder.capture(warmups=warmups_of(replace(CONFIG, **fields)))
    wanted: list[Any] = []
    for mode, key in IN_ORDER:
        num_warmups = full if mode is FULL else piecewise
        wanted += [("NONE", key.num_tokens)] * num_warmups
        wanted += [(mode.name, key.num_tokens), "synchronize"]
    assert recorder.events == wanted


@pytest.mark.feature("C05")
def test_memory_that_warm_ups_leave_is_released_once_a_mode_before_its_largest_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = Recorder()
    released = ("released",)
    monkeypatch.setattr(CpuGraphPool, "release_cache", lambda _: recorder.events.append(released))
    recorder.capture()
    at = [i for i, event in enumerate(recorder.events) if event == released]
    assert [recorder.events[i + 1] for i in at] == [("PIECEWISE", 16), ("FULL", 4)]
    assert [recorder.events[i - 1] for i in at] == [("NONE", 16), ("NONE", 4)]


@pytest.mark.feature("C02", "C06", "M03")
@pytest.mark.parametrize("policy", ["shared", "per_bucket"])
def test_graphs_share_a_pool_or_have_one_per_token_count(policy: str) -> None:
    recorder = Recorder(policy)
    report = recorder.capture()
    pools = [recorder.pools.of(key) for _, key in IN_ORDER]
    buckets = [key.num_tokens if policy == "per_bucket" else 0 for _, key in IN_ORDER]
    for (a, first), (b, second) in itertools.combinations(zip(buckets, pools, strict=True), 2):
        assert (first is second) == (a == b)
    # In a shared pool the largest graph alone decides. A piecewise one holds one output while it
    # writes the next.
    rows = 16 if policy == "shared" else 16 + 8 + 4 + 2 + 1
    assert report.num_bytes == recorder.pools.num_bytes == rows * 4096 * 2


@pytest.mark.feature("C09")
@pytest.mark.parametrize("was_enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_garbage_collection_is_paused_and_put_back(was_enabled: bool, fails: bool) -> None:
    seen = []

    def run(case: CaptureCase) -> None:
        seen.append((gc.isenabled(), torch.is_inference_mode_enabled(), is_in_capture_window()))
        assert gc.get_freeze_count() > 0
        if fails:
            raise RuntimeError("inside")

    recorder = Recorder()
    if not was_enabled:
        gc.disable()
    try:
        recorder.run = run  # type: ignore[method-assign]
        if fails:
            with pytest.raises(RuntimeError, match="inside"):
                recorder.capture()
        else:
            recorder.capture()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
    assert set(seen) == {(False, True, True)}
    assert not torch.is_inference_mode_enabled() and not is_in_capture_window()
    assert get_forward_context() == ForwardContext()


def test_room_is_asked_for_before_each_graph_and_what_has_none_is_skipped() -> None:
    recorder = Recorder()
    asked: list[BatchDescriptor] = []

    def fits_on_all_ranks(key: BatchDescriptor) -> bool:
        asked.append(key)
        return key.num_tokens not in (16, 2)

    report = recorder.capture(warmups=NO_WARMUPS, fits_on_all_ranks=fits_on_all_ranks)
    assert asked == [key for _, key in IN_ORDER]
    assert recorder.captured() == [
        ("PIECEWISE", 8), ("PIECEWISE", 1), ("FULL", 4), ("FULL", 1)
    ]  # fmt: skip
    assert report.skipped == (IN_ORDER[0], IN_ORDER[4])
    assert (report.token_counts, report.batch_sizes) == ((1, 8), (1, 4))


# --- the window and the seal --------------------------------------------------------------------


@pytest.mark.feature("X01")
@pytest.mark.parametrize("what", ["compile", "capture"])
def test_a_late_one_is_counted_and_named_once(what: str, caplog: pytest.LogCaptureFixture) -> None:
    note = {"compile": note_late_compile, "capture": note_late_capture}[what]
    with counter.expect(num_late_compilations=0):
        note_late_compile("size 7")
    seal("warn")
    assert is_sealed()
    expected = {"compile": (3, 0), "capture": (0, 3)}[what]
    with counter.expect(num_late_compilations=expected[0], num_late_captures=expected[1]):
        for name in ("size 7", "size 7", "size 9"):
            note(name)
    assert [r.getMessage().split(": ")[-1] for r in caplog.records] == ["size 7", "size 9"]


@pytest.mark.feature("X01")
@pytest.mark.parametrize(
    ("note", "error"), [(note_late_compile, LateCompilation), (note_late_capture, LateCapture)]
)
def test_a_strict_seal_refuses(note: Callable[[str], None], error: type[GraphError]) -> None:
    seal("strict")
    wanted = "wanted none after the process was sealed, found size 7"
    with pytest.raises(error, match=wanted) as caught:
        note("size 7")
    copy = pickle.loads(pickle.dumps(caught.value))  # as it leaves the process of its rank
    assert (type(copy), str(copy)) == (error, str(caught.value))


def test_a_window_is_open_on_its_thread_alone() -> None:
    with capture_window(), ThreadPoolExecutor(1) as other:
        assert is_in_capture_window() and not other.submit(is_in_capture_window).result()
    assert not is_in_capture_window()


@pytest.mark.feature("C11")
def test_no_window_opens_after_a_strict_seal() -> None:
    seal("strict")
    with pytest.raises(LateCapture, match="a capture window"):
        Recorder().capture()
    unseal()
    assert len(Recorder().capture().captured) == 6


# --- memory --------------------------------------------------------------------------------------


def test_in_a_shared_pool_the_largest_graph_pays_for_all_tensors() -> None:
    mib = MIN_GRAPH_BYTES
    pieces = CaptureTrial((16, 8, 4), first_bytes=100 * mib, second_bytes=3 * mib)
    whole = CaptureTrial((4, 2), first_bytes=40 * mib, second_bytes=mib // 2)
    assert estimate_graph_bytes([pieces, whole]) == (100 + 2 * 3 + 1) * mib
    assert estimate_graph_bytes([pieces]) == 106 * mib
    assert estimate_graph_bytes([CaptureTrial((4,), 5, 0)]) == 5
    assert estimate_graph_bytes([CaptureTrial((), 0, 0)]) == 0


def test_separate_pools_pay_for_each_size_in_proportion() -> None:
    pieces = CaptureTrial((16, 8, 4), first_bytes=160, second_bytes=0)
    whole = CaptureTrial((3, 1), first_bytes=10, second_bytes=0)
    assert estimate_graph_bytes([pieces, whole], policy="per_bucket") == 280 + 14


def test_a_trial_measures_the_two_largest_of_each_mode_and_leaves_nothing() -> None:
    recorder = Recorder(num_pieces=1)
    # In a shared pool the second one finds room in what the first has let go of.
    assert recorder.trials() == [
        CaptureTrial((16, 8, 1), 16 * 4096, 0),
        CaptureTrial((4, 2, 1), 4 * 4096, 0),
    ]
    assert recorder.pools.num_bytes == 0
    assert not recorder.forward.num_replays and not recorder.pieces[0].num_replays
    assert recorder.trials() == recorder.trials()


def test_the_estimate_of_a_shared_pool_is_no_less_than_what_is_captured() -> None:
    recorder = Recorder(num_pieces=1)
    estimate = estimate_graph_bytes(recorder.trials())
    report = recorder.capture(warmups=NO_WARMUPS)
    assert len(recorder.pieces[0].num_replays) == len(recorder.forward.num_replays) == 3
    assert 16 * 4096 <= report.num_bytes <= estimate
