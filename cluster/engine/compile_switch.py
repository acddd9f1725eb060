"""`CompileSwitch`: how far a rank has gone over from eager steps to compiled and captured ones.

1. Stage 0: steps run eagerly, and another process compiles.
2. A rank whose compiled pieces are loaded says so in its vote; a leader waits for its followers.
3. Once all votes say so, the agreement names the next stage, and every rank enters it before it
   runs that step: stage 1 runs the compiled pieces.
4. Each further stage captures one graph. The last one ends it: graphs are replayed from the next
   step on, and the process is sealed.
"""

from __future__ import annotations

from compile.dispatch import CapturedGraphs


class CannotCompile(RuntimeError):
    """A model cannot be compiled as it is configured: every start would end so. One line."""


class CompileSwitch:
    """One rank's stage. Invariant: `stage` is what the last agreement named, and `is_over` if no
    stage follows. Steps dispatch over `captured`, which is equal on all ranks and empty before the
    last stage."""

    def __init__(
        self, captured: CapturedGraphs | None = None, *, last_stage: int = 0, num_followers: int = 0
    ) -> None:
        """If stage 0 is the last one, all is compiled. So many followers must load too."""
        self.stage = 0
        self.last_stage = last_stage
        self.is_over = last_stage == 0
        self.captured = captured or CapturedGraphs()
        self.is_loaded = False
        self._num_awaited = num_followers

    @property
    def can_advance(self) -> bool:
        if self.is_over:
            return False
        return self.stage > 0 or (self.is_loaded and not self._num_awaited)

    def accepts(self, stage: int) -> bool:
        """Return whether this rank may run a step of `stage`: its own, or the next if it can."""
        is_next = stage == self.stage + 1 <= self.last_stage
        return stage == self.stage or (is_next and (self.stage > 0 or self.is_loaded))

    def on_follower_loaded(self) -> bool:
        """A follower has loaded what was compiled; return whether one was still awaited."""
        was_awaited = self._num_awaited > 0
        self._num_awaited -= was_awaited
        return was_awaited

    def enter(self, stage: int, captured: CapturedGraphs | None = None) -> None:
        assert stage == self.stage + 1 and self.accepts(stage), (stage, self.stage, self.last_stage)
        self.stage = stage
        self.is_over = stage == self.last_stage
        if captured is not None:
            self.captured = captured
