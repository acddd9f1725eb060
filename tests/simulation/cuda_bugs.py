"""Planted bugs: what the simulated CUDA device must find, each a slip of one line in the product.

Nothing of the code under test is edited. A CPU shows none of them: it has no streams, copies
nothing to a device, and captures graphs of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cuda_device import CaptureInvalid
from cuda_work import Case

from cluster.kv.transport.store import BlockStore
from cluster.rank.buffers import Staging
from cluster.rank.forward import Scored, StepForward
from cluster.rank.inputs import StaticTable, StepInputs
from cluster.rank.runner import LaunchedStep, ModelRunner
from compile.graphs.boundary import map_tensors
from compile.graphs.cuda import CudaGraphPool, CudaStepGraph, alias

Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]
TOKENS = "tokens of request"
NO_TOKEN = "IndexError: index out of range"
TOO_LARGE = "OverflowError: number too large"
"""What is read before it is written may be no token at all."""


class _NoEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Go on at once."""


def _wrap(patch: Patch, owner: type, name: str, around: Callable[..., Any]) -> None:
    """Call `around(method, self, *args)` in place of a method."""
    method = getattr(owner, name)
    patch.setattr(owner, name, lambda self, *args: around(method, self, *args))


# --- host memory ----------------------------------------------------------------------------------


def _one_array(patch: Patch) -> None:
    begin = Staging.__init__

    def with_one(self: Staging, device: torch.device, num_steps: int = 1) -> None:
        begin(self, device, 1)

    patch.setattr(Staging, "__init__", with_one)


def _pageable(patch: Patch) -> None:
    def allocate(whole: Any, self: Staging) -> None:
        whole(self)
        if self.is_copied:
            self._arrays = [array.clone() for array in self._arrays]
            for buffer in self._buffers:
                buffer.place(self._arrays, self._on_device)

    _wrap(patch, Staging, "allocate", allocate)


def _no_event(patch: Patch) -> None:
    def wait(whole: Any, self: ModelRunner, launched: LaunchedStep) -> Any:
        ended = _NoEvent() if launched.ended is not None else None
        return whole(self, replace(launched, ended=ended))

    _wrap(patch, ModelRunner, "wait", wait)


def _early_event(patch: Patch) -> None:
    def launch(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
        early = torch.cuda.Event() if self.device.type == "cuda" else None
        if early is not None:
            early.record()
        launched: LaunchedStep = whole(self, *args)
        return replace(launched, ended=early)

    _wrap(patch, ModelRunner, "launch", launch)


def _no_event_without_a_draw(patch: Patch) -> None:
    def launch(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
        launched: LaunchedStep = whole(self, *args)
        return launched if launched.drawn is not None else replace(launched, ended=None)

    _wrap(patch, ModelRunner, "launch", launch)


def _tokens_at_the_launch(patch: Patch) -> None:
    def launch(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
        launched: LaunchedStep = whole(self, *args)
        if launched.drawn is None:
            return launched
        token_ids = launched.drawn.token_ids.clone()
        return replace(launched, drawn=replace(launched.drawn, token_ids=token_ids))

    _wrap(patch, ModelRunner, "launch", launch)


def _waits_in_a_step(patch: Patch) -> None:
    def run(whole: Any, self: StepForward, *args: Any) -> Any:
        self._synchronize()
        return whole(self, *args)

    _wrap(patch, StepForward, "run", run)


# --- inputs ---------------------------------------------------------------------------------------


def _uploads_aside(patch: Patch) -> None:
    def upload(whole: Any, self: Staging) -> None:
        if not self.is_copied:
            whole(self)
            return
        with torch.cuda.stream(torch.cuda.Stream()):
            whole(self)

    _wrap(patch, Staging, "upload", upload)


def _keeps_sampled_rows(patch: Patch) -> None:
    """What has the size that it had before is not copied again."""

    def upload(whole: Any, self: StepInputs, num_seqs: int) -> None:
        sampled = self._of_sampled
        if sampled._spans == getattr(self, "_spans_before", None):
            sampled._spans = []
        elif sampled._spans:
            self._spans_before = sampled._spans  # type: ignore[attr-defined]
        whole(self, num_seqs)

    _wrap(patch, StepInputs, "_upload", upload)


def _no_spread(patch: Patch) -> None:
    patch.setattr(StaticTable, "spread", lambda self, n: None)


def _two_tables(patch: Patch) -> None:
    """Steps take turns with two tables on the device; a graph reads one."""

    def stage(whole: Any, self: StaticTable, n: int) -> torch.Tensor:
        if self._is_packed:
            tables = self.__dict__.setdefault("_tables", [self.device, self.device.clone()])
            tables.reverse()
            self.__dict__["device"], self._view = tables[0], None
        found: torch.Tensor = whole(self, n)
        return found

    _wrap(patch, StaticTable, "stage", stage)


def _pads_live_slots(patch: Patch) -> None:
    """Padding writes where an earlier step has written."""

    def pad(whole: Any, self: StepInputs, num_tokens: int, end: int, *seqs: int) -> None:
        slots = self._slot_mapping.host[num_tokens:end]
        before = slots.copy()
        whole(self, num_tokens, end, *seqs)
        if self._of_step.is_copied:
            slots[:] = before

    _wrap(patch, StepInputs, "_pad", pad)


# --- graphs ---------------------------------------------------------------------------------------


def _reads_in_a_capture(patch: Patch) -> None:
    def score(whole: Any, self: StepForward, hidden: torch.Tensor) -> Scored:
        hidden.sum().item()
        scored: Scored = whole(self, hidden)
        return scored

    _wrap(patch, StepForward, "_score_rows", score)


def _captures_on_the_default_stream(patch: Patch) -> None:
    def capture_stream(self: CudaGraphPool) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    patch.setattr(CudaGraphPool, "capture_stream", capture_stream)


def _keeps_no_output(patch: Patch) -> None:
    """What a capture returned is free for the captures after it."""

    def capture(whole: Any, self: CudaStepGraph, fn: Callable[[], Any]) -> Any:
        return map_tensors(alias, whole(self, fn))

    _wrap(patch, CudaStepGraph, "capture", capture)


# --- blocks ---------------------------------------------------------------------------------------


def _does_not_wait(method: str) -> Plant:
    def plant(patch: Patch) -> None:
        def copy(whole: Any, self: BlockStore, *args: Any) -> Any:
            with pytest.MonkeyPatch.context() as inner:
                if self._stream is not None:
                    inner.setattr(self._stream, "synchronize", lambda: None)
                return whole(self, *args)

        _wrap(patch, BlockStore, method, copy)

    return plant


def _store_overtakes_the_pool(patch: Patch) -> None:
    def begin(whole: Any, self: BlockStore, pool: torch.Tensor) -> None:
        whole(self, pool)
        if self._stream is not None:
            self._stream = torch.cuda.Stream(pool.device)

    _wrap(patch, BlockStore, "__init__", begin)


@dataclass(frozen=True)
class Bug:
    """A planted bug, the case that shows it, and what is found; of an error, its type."""

    plant: Plant
    case: Case
    found: str = TOKENS


EAGER = Case("Llama", "eager")
OVERLAPPED = replace(EAGER, is_overlapped=True)
PAIR = replace(EAGER, is_pair=True)
FULL = Case("Llama", "0-FULL")
PIECES = Case("Llama", "3-PIECEWISE")

BUGS = {
    "one staging array under overlap": Bug(_one_array, OVERLAPPED, NO_TOKEN),
    "a wait without its event": Bug(_no_event, EAGER, TOO_LARGE),
    "a read inside of a captured scoring": Bug(
        _reads_in_a_capture, FULL, f"{CaptureInvalid.__name__}: hidden reads"
    ),
    "step inputs in pageable memory": Bug(_pageable, EAGER, "pageable copies: wanted 0"),
    "a wait for the device in each step": Bug(_waits_in_a_step, EAGER, "device waits: wanted 0"),
    "an event before its step": Bug(_early_event, PAIR, "prompt_token_ids: wanted ids"),
    "no event for a step that draws nothing": Bug(_no_event_without_a_draw, OVERLAPPED, NO_TOKEN),
    "tokens that are read at the launch": Bug(_tokens_at_the_launch, EAGER, TOO_LARGE),
    "inputs copied on a stream that nothing waits for": Bug(_uploads_aside, EAGER),
    "sampled rows that are not copied again": Bug(_keeps_sampled_rows, EAGER),
    "a block table that is not spread": Bug(_no_spread, EAGER),
    "a block table that moves under a graph": Bug(_two_tables, FULL),
    "padding in live slots under a replay": Bug(_pads_live_slots, FULL),
    "a capture on the default stream": Bug(
        _captures_on_the_default_stream, FULL, f"{CaptureInvalid.__name__}: a capture on"
    ),
    "an output that another graph of the pool overwrites": Bug(_keeps_no_output, PIECES),
    "blocks that are sent before they are copied": Bug(_does_not_wait("gather"), PAIR),
    "blocks that a step reads before they are written": Bug(_does_not_wait("scatter"), PAIR),
    "blocks that a new pool's zeros overwrite": Bug(_store_overtakes_the_pool, PAIR),
}
