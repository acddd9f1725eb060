"""A follower: a rank that runs the steps that its leader plans.

Its whole loop (`follower_loop.py`) is receive and execute. It has no scheduler, no blocks to give
and no requests: a plan tells everything, and its digest tells whether the two still speak of the
same step. It also does its slice of a KV handoff: it holds and reads when its leader says so, and
reports what has ended.

A follower that disagrees with its leader raises before it enters the step's collectives. That ends
`run`, and the owner of the group learns which rank it was and why.
"""

from __future__ import annotations

import msgspec
import zmq

from cluster.engine.divergence import StepDigester
from cluster.engine.scheduler import SchedulerStats
from cluster.group.channel import StepReceiver
from cluster.group.context import RankContext
from cluster.group.rendezvous import Rendezvous
from cluster.rank.follower_loop import FollowerLoop
from cluster.rank.rank import Rank
from cluster.wire.group_messages import FollowerHello


class Follower(Rank):
    """One following rank, with its receiver and its loop."""

    def __init__(self, context: RankContext, rendezvous: Rendezvous) -> None:
        super().__init__(context, zmq.Context(), rendezvous)
        place, credentials = context.place, context.credentials
        self._receiver = StepReceiver(
            self._sockets,
            rendezvous.channels[place.tp_rank - 1],
            self._doorbell,
            credentials=credentials,
        )
        self._receiver.open(
            FollowerHello(
                **msgspec.structs.asdict(rendezvous.hello(credentials, place.epoch)),
                tp_rank=place.tp_rank,
                num_blocks=self.runner.num_blocks,
                layout=self.runner.kv_spec.layout,
                source=self.transfer.source,
                graphs=self.runner.forward.checksum(),
            )
        )
        is_overlapped = context.config.overlap
        self.loop = FollowerLoop(
            place.name,
            receiver=self._receiver,
            runner=self.runner,
            digester=StepDigester(is_overlapped=is_overlapped),
            is_overlapped=is_overlapped,
            holder=self.transfer.server,
            reader=self.transfer.puller,
        )

    def run(self) -> None:
        self.loop.run()
        self._receiver.close()
        self._close()

    def stop(self) -> None:
        self.loop.is_stopping = True
        self._doorbell.ring()

    def _scheduler_stats(self) -> SchedulerStats:
        """Of its own slice: blocks and requests are its leader's account."""
        server = self.transfer.server
        return SchedulerStats(held_tickets=server.num_held if server else 0)
