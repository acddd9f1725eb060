"""`RankActor`: the Ray actor that owns one (data-parallel, tensor-parallel) rank.

`run()` is the step loop and occupies a concurrency group of its own; its object reference is the
rank's sentinel, where death, exception and normal end all arrive. Every other method is control
plane, in the `ctl` group. No Ray call happens inside a step.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray

from cluster.actors.artifact_board import RayExchange
from cluster.actors.load_progress import LoadClock, LoadProgress
from cluster.config import EngineConfig
from cluster.counts import Counts
from cluster.credentials import Credentials
from cluster.engine.watchdog import Heartbeat, Phase
from cluster.logs import configure_logs
from cluster.rank.rendezvous import LeaderEndpoints, Rendezvous
from cluster.rank.status import RankStats

if TYPE_CHECKING:
    from cluster.rank.follower import Follower
    from cluster.rank.leader import Leader


@dataclass(frozen=True)
class RankPlace:
    """Which rank an actor is. Invariant: no two actors of one epoch share a place."""

    dp_rank: int
    tp_rank: int
    epoch: int


class RankActor:
    """One rank's process. Lives and dies with its group: a rank alone is worth nothing."""

    def __init__(
        self,
        config: EngineConfig,
        place: RankPlace,
        engine_id: str,
        credentials: Credentials,
        artifact_board: Any,
        is_on_one_node: bool,
    ) -> None:
        """Wait to be told what to load; `is_on_one_node`: the whole group is."""
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        configure_logs(config.log_format)
        # Read when torch is loaded, which happens in `load` and not before.
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
        self._config = config
        self._place = place
        self._engine_id = engine_id
        self._credentials = credentials
        self._is_on_one_node = is_on_one_node
        self._exchange = None if artifact_board is None else RayExchange(artifact_board)
        self._state = "starting"
        self._progress = LoadClock("starting")
        self._endpoints: LeaderEndpoints | None = None
        self._rank: Leader | Follower | None = None

    def meet(self) -> Rendezvous | None:
        """Open where followers and other leaders will find this one; None if there are none."""
        self._endpoints = LeaderEndpoints(
            self._config,
            host=ray.util.get_node_ip_address(),
            credentials=self._credentials,
            dp_rank=self._place.dp_rank,
            is_on_one_node=self._is_on_one_node,
        )
        return self._endpoints.rendezvous

    def load(self, rendezvous: Rendezvous | None = None) -> str:
        """Load the model and join the group.

        Returns:
            A leader's endpoint that takes requests; nothing of a follower.

        Raises:
            CannotCompile: no other rank would load either.
        """
        self._state = "loading"
        is_leader = self._place.tp_rank == 0
        try:
            rank = self._lead(rendezvous) if is_leader else self._follow(rendezvous)
        except Exception as error:
            from cluster.rank.compiling import as_final  # which imports torch

            if (final := as_final(error)) is None:
                raise
            raise final from error
        self._rank = rank
        self._state = "ready"
        return getattr(rank, "inbox", "")

    def _lead(self, rendezvous: Rendezvous | None) -> Leader:
        # Imported here: the owner of the group imports this module too, and must not pay for
        # torch (2 s and 180 MB).
        from cluster.rank.leader import Leader

        return Leader(
            self._config,
            engine_id=self._engine_id,
            epoch=self._place.epoch,
            host=ray.util.get_node_ip_address(),
            credentials=self._credentials,
            dp_rank=self._place.dp_rank,
            progress=self._on_progress,
            endpoints=self._endpoints,
            rendezvous=rendezvous,
            exchange=self._exchange,
        )

    def _follow(self, rendezvous: Rendezvous | None) -> Follower:
        from cluster.rank.follower import Follower

        assert rendezvous is not None, "rank: wanted its leader's rendezvous, found None"
        return Follower(
            self._config,
            dp_rank=self._place.dp_rank,
            tp_rank=self._place.tp_rank,
            epoch=self._place.epoch,
            host=ray.util.get_node_ip_address(),
            credentials=self._credentials,
            rendezvous=rendezvous,
            progress=self._on_progress,
            exchange=self._exchange,
        )

    def run(self) -> None:
        """Step until stopped: the rank's life."""
        assert self._rank is not None, "rank: wanted load() before run(), found no model"
        # Other threads of this process only answer the control plane; a short switch interval
        # keeps a step from waiting 5 ms for one of them.
        sys.setswitchinterval(2e-4)
        keep_what_is_loaded()
        try:
            self._rank.run()
        finally:
            self._state = "stopped"

    def stats(self) -> tuple[RankStats, LoadProgress | None, Counts]:
        """Return figures, progress while the rank is not ready or compiles, and its counts."""
        place, node = self._place, ray.get_runtime_context().get_node_id()
        if self._state == "ready" and self._rank is not None:
            stats = self._rank.stats(
                tp_rank=place.tp_rank, dp_rank=place.dp_rank, pid=os.getpid(), node=node
            )
            progress = self._rank.compile_progress()
            if progress is None:
                return stats, None, self._rank.counts()
            self._progress.note(*progress)
            told = self._progress.read(place.dp_rank, place.tp_rank)
            return stats, told, self._rank.counts()
        stats = RankStats(
            tp_rank=place.tp_rank,
            dp_rank=place.dp_rank,
            pid=os.getpid(),
            node=node,
            state=self._state,
            epoch=place.epoch,
            step=0,
        )
        return stats, self._progress.read(place.dp_rank, place.tp_rank), {}

    def heartbeat(self) -> Heartbeat | None:
        """Return what the step thread does; None before the rank loads weights, and after its end.

        Until then it imports torch, and may not answer for longer than a rank may be silent.
        """
        if self._state == "loading" and self._progress.what != "starting":
            return Heartbeat(0, Phase.WAITING, 0.0, 0.0, is_asleep=True)
        if self._state != "ready" or self._rank is None:
            return None
        return self._rank.heartbeat()

    def debug(self) -> dict[str, Any]:
        """Return what `/debug/ranks` shows of this rank."""
        place = {"dp_rank": self._place.dp_rank, "tp_rank": self._place.tp_rank}
        rank = {**place, "epoch": self._place.epoch, "pid": os.getpid(), "state": self._state}
        return rank if self._rank is None else {**rank, **self._rank.runner.debug()}

    def stop(self) -> None:
        """End the step loop at its next border."""
        if self._rank is not None:
            self._rank.stop()

    def _on_progress(self, what: str, done: int, total: int) -> None:
        self._progress.note(what, done, total)


RemoteRank = ray.remote(
    max_restarts=0, max_task_retries=0, concurrency_groups={"step": 1, "ctl": 2}
)(RankActor)
"""The actor class. Methods name their concurrency group where they are called."""


def keep_what_is_loaded() -> None:
    """Exclude what a ready process has loaded from garbage collection.

    Libraries and a model are some hundred thousand objects. A full collection goes through all of
    them while no other Python runs, so steps, or all clients' tokens, wait.
    """
    gc.collect()
    gc.freeze()
