"""What runs a rank's steps: its own process, as on a CPU, or a device beside it, as with CUDA.

A device runs what was launched in order, whether or not the rank's process is stopped meanwhile,
and ends with it. Whatever fails there, the rank hears of when it waits for the step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from sim_loop import Process, Violation

if TYPE_CHECKING:
    from sim_rank import SimRank


class Job:
    """One step's work."""

    def __init__(self, run: Callable[[], list[int]]) -> None:
        self.run = run
        self.drawn: list[int] | None = None
        """What was drawn, once it has ended."""
        self.error: Exception | None = None


class HostDevice:
    """Runs a step within its launch."""

    def __init__(self, rank: SimRank) -> None:
        self.process = rank.process
        """Where collectives block."""

    def launch(self, job: Job) -> None:
        job.drawn = job.run()

    def wait(self, job: Job) -> list[int]:
        assert job.drawn is not None
        return job.drawn

    def kill(self) -> None:
        """It is the rank's process."""


class AsyncDevice:
    """Runs steps in a process of its own, one after the other."""

    def __init__(self, rank: SimRank) -> None:
        self._rank = rank
        self._loop, self._rng = rank.group.loop, rank.group.rng
        self._jobs: deque[Job] = deque()
        self._is_idle = False
        self._is_awaited = False
        self.process = Process(self._loop, self._main)
        """Where collectives block."""
        self._loop.after(0.0, self.process.wake, 0)

    def launch(self, job: Job) -> None:
        self._jobs.append(job)
        if self._is_idle:
            self._is_idle = False
            self._loop.after(0.0, self.process.wake, self.process.ticket)

    def wait(self, job: Job) -> list[int]:
        """Wait until it has ended, and return what it drew."""
        self._is_awaited = True
        while job.drawn is None and job.error is None:
            self._rank.process.wait()
        self._is_awaited = False
        if job.error is not None:
            raise job.error
        assert job.drawn is not None
        return job.drawn

    def kill(self) -> None:
        self.process.kill()

    def _main(self) -> None:
        while True:
            while not self._jobs:
                self._is_idle = True
                self.process.wait()
            job = self._jobs.popleft()
            # Now and then it is far behind the host.
            if self._rng.random() < 0.5:
                self.process.sleep(self._rng.random() * 0.003)
            try:
                job.drawn = job.run()
            except Violation as error:
                self._loop.fail(error)
                return
            except Exception as error:
                job.error = error
            self._loop.after(0.0, self._tell)
            if job.error is not None:
                return

    def _tell(self) -> None:
        if self._is_awaited:
            self._rank.process.wake(self._rank.process.ticket)
