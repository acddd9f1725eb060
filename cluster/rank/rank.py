"""What leaders and followers share: a loaded model, what moves its KV, and their figures."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import zmq

from cluster.engine.prefix_index import PrefixUpdate
from cluster.engine.watchdog import Heartbeat
from cluster.group.context import LoadedAdapters, RankContext, RankStats
from cluster.group.membership import GroupMembership
from cluster.group.rendezvous import Rendezvous
from cluster.kv.handoff import KVHolder
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer
from cluster.observe.counts import Counts
from cluster.observe.metrics import SchedulerStats
from cluster.rank.adapters import AdapterReads
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import KVSource, LoraAdapter, RankProcess
from cluster.wire.shared_memory import SharedMemory
from cluster.wire.sockets import Doorbell, end_context, node_id
from compile.counters import cache_misses, counter
from model.config import ModelConfig
from model.kernels.cpu.native import fetch_libraries, libraries_for
from model.parallel import Shard


class KVConnector:
    """What moves a rank's KV, once started: a server for what leaves, a puller for what comes."""

    def __init__(self, rank: RankContext) -> None:
        self._rank = rank
        self._memory: SharedMemory | None = None
        self.server: KVServer | None = None
        self.puller: KVPuller | None = None

    def storage(self, size_bytes: int) -> memoryview | None:
        """Let peers on its node map a rank's pool, unless it is a GPU's."""
        config = self._rank.config
        if config.device != "cpu" or config.transfer.transport == "tcp":
            return None
        self._memory = SharedMemory(size_bytes)
        return self._memory.view

    def start(
        self, pool: torch.Tensor, sockets: zmq.Context[zmq.Socket[bytes]], doorbell: Doorbell
    ) -> None:
        """Start both threads; `doorbell` rings when something has ended."""
        rank, transfer = self._rank, self._rank.config.transfer
        self.server = KVServer(
            KVHolder(transfer.lease_s, time.monotonic),
            pool,
            host=rank.host,
            credentials=rank.credentials,
            epoch=rank.place.epoch,
            doorbell=doorbell,
        )
        self.puller = KVPuller(
            pool,
            tp_rank=rank.place.tp_rank,
            transport=transfer.transport,
            context=sockets,
            credentials=rank.credentials,
            doorbell=doorbell,
        )

    @property
    def source(self) -> KVSource:
        """Where this rank's slice can be read; on a rank that holds nothing, only its place."""
        return KVSource(
            tp_rank=self._rank.place.tp_rank,
            boot_id=node_id(),
            pid=self._memory.pid if self._memory else 0,
            shm_fd=self._memory.fd if self._memory else -1,
            address=self.server.address if self.server else "",
            process=self.server.process if self.server else RankProcess(-1, ""),
        )

    @property
    def bytes_sent(self) -> int:
        return self.server.bytes_sent if self.server else 0

    @property
    def bytes_received(self) -> int:
        return self.puller.reads.bytes_received if self.puller else 0

    def counts(self) -> Counts:
        counts: Counts = {}
        if self.server is not None:
            counts["kv_transfer_sent_bytes_total",] = self.server.bytes_sent
            counts["kv_leases_expired_total",] = self.server.num_expired
        if self.puller is not None:
            reads = self.puller.reads
            counts["kv_transfer_received_bytes_total",] = reads.bytes_received
            counts["kv_transfers_total",] = reads.num_reads
            counts["kv_transfer_failures_total",] = reads.num_failed
            counts["kv_transfer_seconds_total",] = reads.read_s
        return counts

    def close(self) -> None:
        for part in (self.server, self.puller):
            if part is not None:
                part.close()


class Rank(ABC):
    """A leader or a follower: its runner, what moves its KV, and what wakes its step thread. Any
    thread may call `stop` and `set_adapters`, and `stats`, `counts` and `heartbeat`, which read
    plain numbers."""

    def __init__(
        self,
        context: RankContext,
        sockets: zmq.Context[zmq.Socket[bytes]],
        rendezvous: Rendezvous | None,
        listener: socket.socket | None = None,
    ) -> None:
        """Load, and wait until all ranks of the group have. `listener` is of the group's store."""
        self.context = context
        self._sockets = sockets
        self._doorbell = Doorbell()
        if context.config.device == "cpu":  # the group asks what the kernels can do, and the runner
            _fetch_kernels(context)
        self._group = join_group(context, rendezvous, listener)
        self.transfer = KVConnector(context)
        self.runner = ModelRunner(
            context, group=self._group, storage=self.transfer.storage, wake=self._doorbell.ring
        )
        self._adapter_reads = AdapterReads(self.runner.adapters, self._doorbell.ring)
        self.transfer.start(self.runner.kv_pool, sockets, self._doorbell)
        self._wait_for("the other ranks")
        self._group.barrier("loaded")

    @abstractmethod
    def run(self) -> None:
        """Step until stopped, and close; or raise the `StepDivergence` that ends the group."""

    @abstractmethod
    def stop(self) -> None:
        """Make `run` return: a leader's after the step in which all leaders were stopped."""

    @abstractmethod
    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """Have these adapters as soon as may be, beside those that the rank started with, and no
        others. Leaders tell followers."""

    @abstractmethod
    def _scheduler_stats(self) -> SchedulerStats: ...

    def _prefixes(self, since: int) -> PrefixUpdate | None:
        """Return what changed in its cache of prefixes since a number; only leaders have one."""
        return None

    def _loaded_adapters(self) -> LoadedAdapters:
        """Return what the group has of the adapters that it was told to have, on a leader."""
        return LoadedAdapters()

    def stats(self, prefixes_since: int | None = None) -> RankStats:
        """Return its figures, with what changed in its cache since a number if one is given."""
        transfer = self.transfer
        return RankStats.of(
            self.context,
            "ready",
            step=self.runner.step_stats.last_step,
            scheduler=self._scheduler_stats(),
            token_s=self.runner.step_stats.token_s(),
            prefixes=None if prefixes_since is None else self._prefixes(prefixes_since),
            kv_bytes_sent=transfer.bytes_sent,
            kv_bytes_received=transfer.bytes_received,
            compiling=self.runner.compile_progress is not None,
            compile_error=self.runner.compile_error,
            adapters=self._loaded_adapters(),
        )

    def counts(self) -> Counts:
        misses: Counts = {
            ("compile_cache_misses_total", reason): n for reason, n in [*cache_misses.items()]
        }
        return {
            ("compilations_total",): counter.num_backend_compilations,
            ("late_compilations_total",): counter.num_late_compilations,
            **misses,
            **self.transfer.counts(),
        }

    def heartbeat(self) -> Heartbeat:
        return self.runner.step_stats.heartbeat()

    def _wait_for(self, name: str) -> None:
        if self.context.progress is not None:
            self.context.progress(f"waiting for {name}", 0, 1)

    def _close(self) -> None:
        """Stop moving KV and compiling, let go of graphs, group and sockets, in this order."""
        self.transfer.close()
        self.runner.close()
        self._group.close()
        place, role = self.context.place, self.context.config.role
        end_context(self._sockets, f"{place.name} of role {role.value}")


def join_group(
    context: RankContext, rendezvous: Rendezvous | None, listener: socket.socket | None
) -> GroupMembership:
    if rendezvous is None:
        return GroupMembership(None, Shard())
    config, place = context.config, context.place
    dp_rank, dp_size = context.lockstep_place
    return GroupMembership.join(
        rendezvous,
        place.tp_rank,
        config.device,
        context.host,
        listener=listener,
        hello=rendezvous.hello(context.credentials, place.epoch),
        dp_rank=dp_rank,
        dp_size=dp_size,
        shares_experts=ModelConfig.from_dir(config.model_path).experts is not None,
        maps_gpu_memory=config.has_custom_all_reduce,
    )


def _fetch_kernels(context: RankContext) -> None:
    config = context.config
    libraries = libraries_for(
        getattr(torch, config.dtype),
        getattr(torch, config.kv_dtype),
        config.quantization,
        has_peers=config.parallel.world_size > 1,
    )
    fetch_libraries(context.exchange if config.compilation.share_artifacts else None, libraries)
