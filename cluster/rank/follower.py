"""A follower: a rank that runs the steps that its leader plans.

Its whole loop (`follower_loop.py`) is receive and execute. It has no scheduler, no blocks to give
and no requests: a plan tells everything, and its digest tells whether the two still speak of the
same step. It also does its slice of a KV handoff: it holds and reads when its leader says so, and
reports what has ended.

A follower that disagrees with its leader raises before it enters the step's collectives. That ends
`run`, and the owner of the group learns which rank it was and why.
"""

from __future__ import annotations

import zmq

from cluster.config import EngineConfig
from cluster.counts import Counts
from cluster.credentials import Credentials
from cluster.engine.divergence import StepDigester
from cluster.engine.watchdog import Heartbeat
from cluster.group_messages import FollowerHello
from cluster.messages import PROTOCOL_VERSION
from cluster.rank.channel import StepReceiver
from cluster.rank.follower_loop import FollowerLoop
from cluster.rank.forward import Progress
from cluster.rank.groups import GroupMembership
from cluster.rank.rendezvous import Rendezvous
from cluster.rank.status import RankStats
from cluster.rank.worker import Worker
from cluster.wire.sockets import end_context
from compile.scope import ArtifactExchange
from model.config import ModelConfig


class Follower:
    """Runner, transfer and loop of one following rank."""

    def __init__(
        self,
        config: EngineConfig,
        *,
        dp_rank: int,
        tp_rank: int,
        epoch: int,
        host: str,
        credentials: Credentials,
        rendezvous: Rendezvous,
        progress: Progress | None = None,
        exchange: ArtifactExchange | None = None,
    ) -> None:
        """Load, and tell the leader."""
        self.epoch = epoch
        self._name = f"rank dp={dp_rank} tp={tp_rank} epoch={epoch}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

        dp_size = config.parallel.lockstep_size
        group = GroupMembership.follow(
            rendezvous,
            tp_rank,
            config.device,
            host,
            hello=rendezvous.hello(credentials, epoch),
            dp_rank=dp_rank if dp_size > 1 else 0,
            dp_size=dp_size,
            shares_experts=ModelConfig.from_dir(config.model_path).experts is not None,
        )
        self._worker = Worker(
            config,
            group,
            context=self._context,
            dp_rank=dp_rank,
            tp_rank=tp_rank,
            epoch=epoch,
            host=host,
            credentials=credentials,
            progress=progress,
            exchange=exchange,
        )
        self.runner, self.transfer = self._worker.runner, self._worker.connector
        self._receiver = StepReceiver(
            self._context,
            rendezvous.channels[tp_rank - 1],
            self._worker.doorbell,
            credentials=credentials,
        )
        self._receiver.open(
            FollowerHello(
                protocol=PROTOCOL_VERSION,
                config_hash=credentials.config_hash,
                epoch=epoch,
                nonce=rendezvous.nonce,
                tp_rank=tp_rank,
                num_blocks=self.runner.num_blocks,
                layout=self.runner.kv_spec.layout,
                source=self.transfer.source,
                graphs=self.runner.forward.checksum(),
            )
        )
        self.loop = FollowerLoop(
            self._name,
            receiver=self._receiver,
            runner=self.runner,
            digester=StepDigester(is_overlapped=config.overlap),
            is_overlapped=config.overlap,
            holder=self.transfer.server,
            reader=self.transfer.puller,
        )

    def run(self) -> None:
        """Do what the leader says until it ends, or until stopped.

        Raises:
            StepDivergence: a step is not the leader's; names rank, step and field.
        """
        self.loop.run()
        self._close()

    def stop(self) -> None:
        """Make `run` return at the next step's border. Any thread may call it."""
        self.loop.is_stopping = True
        self._worker.doorbell.ring()

    def stats(self, *, tp_rank: int, dp_rank: int, pid: int, node: str) -> RankStats:
        """Return the rank's counters. Any thread may call it. Blocks are its leader's account."""
        server = self.transfer.server
        return RankStats(
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            pid=pid,
            node=node,
            state="ready",
            epoch=self.epoch,
            step=self.runner.steps.last_step,
            held_tickets=server.num_held if server else 0,
            kv_bytes_sent=self.transfer.bytes_sent,
            kv_bytes_received=self.transfer.bytes_received,
            compiling=self.runner.compile_progress is not None,
            compile_error=self.runner.compile_error,
        )

    def counts(self) -> Counts:
        """Return what the rank has counted; its leader counts the steps. Any thread may call it."""
        return self._worker.counts()

    def heartbeat(self) -> Heartbeat:
        """Return what the step thread does. Any thread may call it."""
        return self._worker.heartbeat()

    def compile_progress(self) -> tuple[str, int, int] | None:
        """Return what is compiled while the rank serves. Any thread may call it."""
        return self._worker.compile_progress()

    def _close(self) -> None:
        self._receiver.close()
        self._worker.close()
        end_context(self._context, self._name)
