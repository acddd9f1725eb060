"""`CompileAhead`: what a rank does about its compiled pieces while it serves without them.

1. Another process compiles them into the cache (`compile_process.py`).
2. When it has ended, the step thread loads one piece between two steps: all of them at once
   would hold its streams up.
3. Then the rank's `CompileHandover` knows, and its next vote says so.

If compiling is ended from outside, or by the machine, the rank says why, once, and goes on as it
is. If the model cannot be compiled, the rank ends, as it would have without serving meanwhile: the
group's owner ends the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch

from cluster.engine.compile_handover import CannotCompile
from cluster.rank.compile_process import CompileJob, CompileProcess
from cluster.rank.forward import StepForward

log = logging.getLogger("lockstep.compile")


class CompileAhead:
    """Everything but `progress`, `error` and `close` belongs to the step thread."""

    def __init__(self, job: CompileJob, forward: StepForward, wake: Callable[[], None]) -> None:
        """Start compiling.

        Args:
            wake: wakes the step thread. Called on any thread.
        """
        self.error = ""
        """Why the rank goes on without compiled pieces."""
        self._num_threads = job.config.threads
        self._forward = forward
        self._wake = wake
        self._loading: Iterator[None] | None = None
        self._process = CompileProcess(job, wake)
        log.warning(
            "serving without compiled pieces, of which the cache lacks some; process %d compiles "
            "them",
            self._process.pid,
        )

    @property
    def progress(self) -> tuple[str, int, int] | None:
        """What is being done, how much of it is done and of how much; None when all is."""
        handover = self._forward.handover
        if self.error or handover.is_over:
            return None
        if handover.stage:
            return "capturing graphs", handover.stage - 1, handover.last_stage - 1
        return "compiling", self._process.done, self._process.total

    def load_slice(self) -> None:
        """Load the next piece, if there is one. Call it between steps.

        Raises:
            CannotCompile: there is nothing to load, and no other start would have it.
        """
        if self.error or self._forward.handover.is_loaded:
            return
        is_compiling = not self._process.has_ended
        # A step whose threads wait for one that the compiler has displaced takes a hundred times
        # as long.
        _set_num_threads(max(1, self._num_threads - is_compiling))
        if is_compiling:
            return
        if self._process.is_final:
            raise CannotCompile(self._process.error)
        if self._process.error:
            self._give_up(self._process.error)
            return
        if self._loading is None:
            self._loading = self._forward.loading()
        with torch.inference_mode():
            has_more = next(self._loading, self) is not self
        if not has_more and self._forward.is_loaded:
            self._forward.handover.on_loaded()
        elif not has_more:
            self._give_up("what was compiled cannot be loaded")
        self._wake()

    def close(self) -> None:
        self._process.close()

    def _give_up(self, error: str) -> None:
        self.error = error
        log.warning("serving without compiled pieces until the next start: %s", error)


def _set_num_threads(num_threads: int) -> None:
    if torch.get_num_threads() != num_threads:
        torch.set_num_threads(num_threads)
