"""What leaders and followers have alike: a loaded model with what moves its KV.

1. The runner loads and compiles the model, allocates the KV pool and captures graphs.
2. The connector starts what the role moves KV with, on that pool.
3. All ranks of the group wait for one another: the first step finds them ready.
"""

from __future__ import annotations

import time

import torch
import zmq

from cluster.config import EngineConfig, Role
from cluster.counts import Counts
from cluster.credentials import Credentials
from cluster.engine.watchdog import Heartbeat
from cluster.kv.handoff import KVHolder
from cluster.kv.transport.memory import SharedMemory, node_id
from cluster.kv.transport.puller import KVPuller
from cluster.kv.transport.server import KVServer
from cluster.messages import KVSource, RankProcess
from cluster.rank.forward import Progress
from cluster.rank.groups import GroupMembership
from cluster.rank.runner import ModelRunner
from cluster.wire.polling import Doorbell
from compile.counters import cache_misses, counter
from compile.scope import ArtifactExchange


class KVConnector:
    """What a rank holds and reads KV with: a server, a puller or neither, by the engine's role.

    Invariant: `server` is there on a prefill rank, `puller` on a decode rank, from `start` on.
    """

    def __init__(self, config: EngineConfig, tp_rank: int) -> None:
        self._config = config
        self._tp_rank = tp_rank
        self._memory: SharedMemory | None = None
        self.server: KVServer | None = None
        self.puller: KVPuller | None = None

    def storage(self, size_bytes: int) -> memoryview | None:
        """Let peers map the pool of a rank that hands KV over on its node."""
        hands_over = self._config.role is Role.PREFILL and self._config.device == "cpu"
        if not hands_over or self._config.transfer.transport == "tcp":
            return None
        self._memory = SharedMemory(size_bytes)
        return self._memory.view

    def start(
        self,
        pool: torch.Tensor,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        host: str,
        credentials: Credentials,
        epoch: int,
        doorbell: Doorbell,
    ) -> None:
        """Start the thread that the role asks for; `doorbell` rings when something has ended."""
        transfer = self._config.transfer
        if self._config.role is Role.PREFILL:
            self.server = KVServer(
                KVHolder(transfer.lease_s, time.monotonic),
                pool,
                host=host,
                credentials=credentials,
                epoch=epoch,
                doorbell=doorbell,
            )
        if self._config.role is Role.DECODE:
            self.puller = KVPuller(
                pool,
                tp_rank=self._tp_rank,
                transport=transfer.transport,
                context=context,
                credentials=credentials,
                doorbell=doorbell,
            )

    @property
    def source(self) -> KVSource:
        """Where this rank's slice can be read; on a rank that holds nothing, only its place."""
        return KVSource(
            tp_rank=self._tp_rank,
            boot_id=node_id(),
            pid=self._memory.pid if self._memory else 0,
            shm_fd=self._memory.fd if self._memory else -1,
            address=self.server.address if self.server else "",
            process=self.server.process if self.server else RankProcess(-1, ""),
        )

    @property
    def bytes_sent(self) -> int:
        """Bytes that readers copied under leases that were alive to the end."""
        return self.server.bytes_sent if self.server else 0

    @property
    def bytes_received(self) -> int:
        """Bytes copied in reads that were believed."""
        return self.puller.bytes_received if self.puller else 0

    def counts(self) -> Counts:
        """Return what was counted of the KV that was moved. Any thread may call it."""
        parts = (part for part in (self.server, self.puller) if part is not None)
        return {key: value for part in parts for key, value in part.counts().items()}

    def close(self) -> None:
        """Stop the thread."""
        for part in (self.server, self.puller):
            if part is not None:
                part.close()


class Worker:
    """One rank, loaded: its runner, its connector, and the doorbell that wakes its step thread."""

    def __init__(
        self,
        config: EngineConfig,
        group: GroupMembership,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        dp_rank: int,
        tp_rank: int,
        epoch: int,
        host: str,
        credentials: Credentials,
        progress: Progress | None,
        exchange: ArtifactExchange | None,
    ) -> None:
        """Load, and wait until all ranks of the group have."""
        self.doorbell = Doorbell()
        self.connector = KVConnector(config, tp_rank)
        self.runner = ModelRunner(
            config,
            dp_rank=dp_rank,
            group=group,
            progress=progress,
            storage=self.connector.storage,
            exchange=exchange,
            wake=self.doorbell.ring,
        )
        self.connector.start(
            self.runner.kv_pool,
            context=context,
            host=host,
            credentials=credentials,
            epoch=epoch,
            doorbell=self.doorbell,
        )
        self._group = group
        if progress is not None:
            progress("waiting for the other ranks", 0, 1)
        group.barrier("loaded")

    def compile_progress(self) -> tuple[str, int, int] | None:
        """Return what is compiled while the rank serves. Any thread may call it."""
        return self.runner.compile_progress

    def heartbeat(self) -> Heartbeat:
        """Return what the step thread does. Any thread may call it."""
        return self.runner.phases.heartbeat()

    def counts(self) -> Counts:
        """Return what any rank has counted. Any thread may call it."""
        misses: Counts = {
            ("compile_cache_misses_total", reason): n for reason, n in [*cache_misses.items()]
        }
        return {
            ("compilations_total",): counter.num_backend_compilations,
            ("late_compilations_total",): counter.num_late_compilations,
            **misses,
            **self.connector.counts(),
        }

    def close(self) -> None:
        """Stop moving KV and compiling, let go of graphs and of the group, in this order."""
        self.connector.close()
        self.runner.close()
        self._group.close()
