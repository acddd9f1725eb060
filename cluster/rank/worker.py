"""What leaders and followers have alike: a loaded model with what moves its KV.

1. The runner loads and compiles the model, allocates the KV pool and captures graphs.
2. The connector starts what the role moves KV with, on that pool.
3. All ranks of the group wait for one another: the first step finds them ready.
"""

from __future__ import annotations

import zmq

from cluster.config import EngineConfig
from cluster.credentials import Credentials
from cluster.engine.watchdog import Heartbeat
from cluster.kv.transport.connector import KVConnector
from cluster.rank.forward import Progress
from cluster.rank.groups import GroupMembership
from cluster.rank.runner import ModelRunner
from cluster.wire.doorbell import Doorbell
from compile.scope import ArtifactExchange


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

    def heartbeat(self) -> Heartbeat:
        """Return what the step thread does. Any thread may call it."""
        return self.runner.phases.heartbeat()

    def close(self) -> None:
        """Stop moving KV, and let go of graphs and of the group, in this order."""
        self.connector.close()
        self.runner.forward.close()
        self._group.close()
