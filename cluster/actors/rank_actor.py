"""`RankActor`: the Ray actor that owns one (data-parallel, tensor-parallel) rank.

`run()` is the step loop and occupies the concurrency group `step`, as `meet` and `load` do before
it; its object reference is the rank's sentinel, where death, exception and normal end all arrive.
Every other method is control plane, in the `ctl` group.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import ray

from cluster.actors.artifact_board import RayExchange
from cluster.actors.placement import cores_of_node, own_gpu, ranks_beside
from cluster.config import EngineConfig
from cluster.engine.watchdog import Heartbeat, Phase
from cluster.group.context import LOOPBACK, RankContext, RankPlace, RankStats, num_cores
from cluster.group.rendezvous import LeaderEndpoints, Rendezvous
from cluster.observe.counts import Counts
from cluster.observe.load_progress import LoadClock, LoadProgress, keep_what_is_loaded
from cluster.observe.logs import configure_logs
from cluster.wire.credentials import Credentials
from cluster.wire.messages import LoraAdapter

if TYPE_CHECKING:
    from cluster.rank.rank import Rank


class RankActor:
    """One rank's process. Lives and dies with its group: a rank alone is worth nothing."""

    def __init__(
        self,
        config: EngineConfig,
        place: RankPlace,
        engine_id: str,
        credentials: Credentials,
        *,
        is_on_one_node: bool,
        is_reached_from_one_node: bool,
        first_bundle: int,
    ) -> None:
        logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        configure_logs(config.log_format)
        self._state = "starting"
        self._progress = LoadClock("starting")
        node = ray.get_runtime_context().get_node_id()
        self._context = RankContext(
            config,
            place,
            host=LOOPBACK if is_reached_from_one_node else ray.util.get_node_ip_address(),
            credentials=credentials,
            engine_id=engine_id,
            node=node,
            # Before torch is loaded, which reads what this sets.
            gpu=own_gpu(node).gpu if config.device == "cuda" else "",
            is_on_one_node=is_on_one_node,
            num_cores=min(num_cores(), cores_of_node(node)),
            ranks_on_node=ranks_beside(node, first_bundle),
            progress=self._progress.note,
            exchange=RayExchange(config.compilation.cache_dir),
        )
        # Read when torch is loaded, which happens in `load` and not before.
        os.environ["OMP_NUM_THREADS"] = str(self._context.threads)
        self._endpoints: LeaderEndpoints | None = None
        self._rank: Rank | None = None
        self._adapters: Sequence[LoraAdapter] = ()
        self._adapters_lock = threading.Lock()
        """Between the thread that loads the rank and those of the control plane."""

    def meet(self) -> Rendezvous | None:
        self._endpoints = LeaderEndpoints(self._context)
        return self._endpoints.rendezvous

    def load(self, rendezvous: Rendezvous | None = None) -> str:
        """Load the model and join the group; return a leader's inbox. `CannotCompile` is final."""
        self._state = "loading"
        try:
            rank = self._loaded(rendezvous)
        except Exception as error:
            from cluster.rank.compiling import as_final  # which imports torch

            if (final := as_final(error)) is None:
                raise
            raise final from error
        with self._adapters_lock:
            self._rank = rank
            rank.set_adapters(self._adapters)
        self._state = "ready"
        return getattr(self._rank, "inbox", "")

    def _loaded(self, rendezvous: Rendezvous | None) -> Rank:
        # Imported here: the owner of the group imports this module too, and must not pay for
        # torch (2 s and 180 MB).
        if self._context.place.tp_rank == 0:
            from cluster.rank.leader import Leader

            return Leader(self._context, self._endpoints, rendezvous)
        from cluster.rank.follower import Follower

        assert rendezvous is not None, "rank: wanted its leader's rendezvous, found None"
        return Follower(self._context, rendezvous)

    def run(self) -> None:
        assert self._rank is not None, "rank: wanted load() before run(), found no model"
        # Other threads of this process only answer the control plane; a short switch interval
        # keeps a step from waiting 5 ms for one of them.
        sys.setswitchinterval(2e-4)
        keep_what_is_loaded()
        try:
            self._rank.run()
        finally:
            self._state = "stopped"

    def stats(
        self, prefixes_since: int | None = None
    ) -> tuple[RankStats, LoadProgress | None, Counts]:
        """Return figures, progress while the rank is not ready or compiles, and its counts; with
        the figures what changed in a leader's prefix cache since a number, if one is given."""
        place = self._context.place
        if self._state != "ready" or self._rank is None:
            stats = RankStats.of(self._context, self._state)
            return stats, self._progress.read(place.dp_rank, place.tp_rank), {}
        told: LoadProgress | None = None
        if (progress := self._rank.runner.compile_progress) is not None:
            self._progress.note(*progress)
            told = self._progress.read(place.dp_rank, place.tp_rank)
        return self._rank.stats(prefixes_since), told, self._rank.counts()

    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Have a leader's group load and forget adapters; before it is ready, once it is."""
        with self._adapters_lock:
            self._adapters = adapters
            if self._rank is not None:
                self._rank.set_adapters(adapters)

    def heartbeat(self) -> Heartbeat | None:
        """Return what the step thread does; None before the rank loads weights, and after its end:
        until then it imports torch, and may not answer for longer than a rank may be silent."""
        if self._state == "loading" and self._progress.what != "starting":
            return Heartbeat(0, Phase.WAITING, 0.0, 0.0, is_asleep=True)
        if self._state != "ready" or self._rank is None:
            return None
        return self._rank.heartbeat()

    def debug(self) -> dict[str, Any]:
        rank = {
            **asdict(self._context.place),
            **{"device": self._context.device.name, "gpu": self._context.device.gpu},
            **{"pid": os.getpid(), "state": self._state},
        }
        return rank if self._rank is None else {**rank, **self._rank.runner.debug()}

    def stop(self) -> None:
        if self._rank is not None:
            self._rank.stop()


RANK_OPTIONS: dict[str, Any] = {
    **{"max_restarts": 0, "max_task_retries": 0, "concurrency_groups": {"step": 1, "ctl": 2}},
    # Ray cancels what a request has asked ranks with the request. Those that keep each caller's
    # order would wait for ever for a call that was cancelled before it was sent. What has an order,
    # `meet`, `load` and `run`, is called once the last one has returned.
    "allow_out_of_order_execution": True,
}
RemoteRank = ray.remote(**RANK_OPTIONS)(RankActor)
