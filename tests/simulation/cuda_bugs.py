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

TOKENS = "tokens of request"
NO_TOKEN = "IndexError: index out of range"
TOO_LARGE = "OverflowError: number too large"
"""What is read before it is written may be no token at all."""
EAGER = Case("Llama", "eager")
OVERLAPPED = replace(EAGER, is_overlapped=True)
PAIR = replace(EAGER, is_pair=True)
FULL = Case("Llama", "0-FULL")
PIECES = Case("Llama", "3-PIECEWISE")


@dataclass(frozen=True)
class Bug:
    """A planted bug, the case that shows it, and what is found; of an error, its type."""

    owner: type
    method: str
    around: Callable[..., Any]
    case: Case
    found: str

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Call `around(method, self, *args)` in place of the method."""
        method = getattr(self.owner, self.method)
        patch.setattr(self.owner, self.method, lambda *args: self.around(method, *args))


BUGS: dict[str, Bug] = {}
Around = Callable[..., Any]


def planted(
    name: str, owner: type, method: str, case: Case, found: str = TOKENS
) -> Callable[[Around], Around]:
    """Let the bug of this name be what is called around a method."""

    def plant(around: Around) -> Around:
        BUGS[name] = Bug(owner, method, around, case, found)
        return around

    return plant


# --- host memory ----------------------------------------------------------------------------------


@planted("one staging array under overlap", Staging, "__init__", OVERLAPPED, NO_TOKEN)
def _one_array(begin: Any, self: Staging, device: torch.device, num_steps: int = 1) -> None:
    begin(self, device, 1)


@planted("step inputs in pageable memory", Staging, "allocate", EAGER, "pageable copies: wanted 0")
def _pageable(whole: Any, self: Staging) -> None:
    whole(self)
    if self.is_copied:
        self._arrays = [array.clone() for array in self._arrays]
        for buffer in self._buffers:
            buffer.place(self._arrays, self._on_device)


class _NoEvent:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Go on at once."""


@planted("a wait without its event", ModelRunner, "wait", EAGER, TOO_LARGE)
def _no_event(whole: Any, self: ModelRunner, launched: LaunchedStep) -> Any:
    ended = _NoEvent() if launched.ended is not None else None
    return whole(self, replace(launched, ended=ended))


@planted("an event before its step", ModelRunner, "launch", PAIR, "prompt_token_ids: wanted ids")
def _early_event(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
    early = torch.cuda.Event() if self.device.type == "cuda" else None
    if early is not None:
        early.record()
    launched: LaunchedStep = whole(self, *args)
    return replace(launched, ended=early)


@planted("no event for a step that draws nothing", ModelRunner, "launch", OVERLAPPED, NO_TOKEN)
def _no_event_without_a_draw(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
    launched: LaunchedStep = whole(self, *args)
    return launched if launched.drawn is not None else replace(launched, ended=None)


@planted("tokens that are read at the launch", ModelRunner, "launch", EAGER, TOO_LARGE)
def _tokens_at_the_launch(whole: Any, self: ModelRunner, *args: Any) -> LaunchedStep:
    launched: LaunchedStep = whole(self, *args)
    if launched.drawn is None:
        return launched
    token_ids = launched.drawn.token_ids.clone()
    return replace(launched, drawn=replace(launched.drawn, token_ids=token_ids))


@planted("a wait for the device in each step", StepForward, "run", EAGER, "device waits: wanted 0")
def _waits_in_a_step(whole: Any, self: StepForward, *args: Any) -> Any:
    self._synchronize()
    return whole(self, *args)


# --- inputs ---------------------------------------------------------------------------------------


@planted("inputs copied on a stream that nothing waits for", Staging, "upload", EAGER)
def _uploads_aside(whole: Any, self: Staging) -> None:
    if not self.is_copied:
        whole(self)
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        whole(self)


@planted("sampled rows that are not copied again", StepInputs, "_upload", EAGER)
def _keeps_sampled_rows(whole: Any, self: StepInputs, num_seqs: int) -> None:
    """What has the size that it had before is not copied again."""
    sampled = self._of_sampled
    if sampled._spans == getattr(self, "_spans_before", None):
        sampled._spans = []
    elif sampled._spans:
        self._spans_before = sampled._spans  # type: ignore[attr-defined]
    whole(self, num_seqs)


@planted("a block table that is not spread", StaticTable, "spread", EAGER)
def _no_spread(whole: Any, self: StaticTable, n: int) -> None:
    """Go on at once."""


@planted("a block table that moves under a graph", StaticTable, "stage", FULL)
def _two_tables(whole: Any, self: StaticTable, n: int) -> torch.Tensor:
    """Steps take turns with two tables on the device; a graph reads one."""
    if self._is_packed:
        tables = self.__dict__.setdefault("_tables", [self.device, self.device.clone()])
        tables.reverse()
        self.__dict__["device"], self._view = tables[0], None
    return whole(self, n)


@planted("padding in live slots under a replay", StepInputs, "_pad", FULL)
def _pads_live_slots(whole: Any, self: StepInputs, num_tokens: int, end: int, *seqs: int) -> None:
    """Padding writes where an earlier step has written."""
    slots = self._slot_mapping.host[num_tokens:end]
    before = slots.copy()
    whole(self, num_tokens, end, *seqs)
    if self._of_step.is_copied:
        slots[:] = before


# --- graphs ---------------------------------------------------------------------------------------


@planted(
    "a read inside of a captured scoring",
    StepForward,
    "_score_rows",
    FULL,
    f"{CaptureInvalid.__name__}: hidden reads",
)
def _reads_in_a_capture(whole: Any, self: StepForward, hidden: torch.Tensor) -> Scored:
    hidden.sum().item()
    return whole(self, hidden)


@planted(
    "a capture on the default stream",
    CudaGraphPool,
    "capture_stream",
    FULL,
    f"{CaptureInvalid.__name__}: a capture on",
)
def _captures_on_the_default_stream(whole: Any, self: CudaGraphPool) -> torch.cuda.Stream:
    return torch.cuda.current_stream(self.device)


@planted("an output that another graph of the pool overwrites", CudaStepGraph, "capture", PIECES)
def _keeps_no_output(whole: Any, self: CudaStepGraph, fn: Callable[[], Any]) -> Any:
    """What a capture returned is free for the captures after it."""
    return map_tensors(alias, whole(self, fn))


# --- blocks ---------------------------------------------------------------------------------------


@planted("blocks that are sent before they are copied", BlockStore, "gather", PAIR)
@planted("blocks that a step reads before they are written", BlockStore, "scatter", PAIR)
def _does_not_wait(whole: Any, self: BlockStore, *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as inner:
        if self._stream is not None:
            inner.setattr(self._stream, "synchronize", lambda: None)
        return whole(self, *args)


@planted("blocks that a new pool's zeros overwrite", BlockStore, "__init__", PAIR)
def _store_overtakes_the_pool(whole: Any, self: BlockStore, pool: torch.Tensor) -> None:
    whole(self, pool)
    if self._stream is not None:
        self._stream = torch.cuda.Stream(pool.device)
