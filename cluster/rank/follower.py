"""A follower: a rank that runs the steps that its leader plans.

1. A step's plan is run if the follower's own digest of it is the leader's. Otherwise it raises,
   before it enters the step's collectives; the group's owner learns which rank it was and why.
2. An order about KV, or to read an adapter, is done to this rank's slice as the leader does to its
   own.
3. After each, what has ended here is reported.

If the leader's loop overlaps, a step is waited for when the next one is launched, as there; and
before an order is done, because a reader must find the KV of all steps that came before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import zmq

from cluster.engine.divergence import StepDigester, StepDivergence, check_digest
from cluster.engine.engine import Runner
from cluster.group.channel import StepReceiver
from cluster.group.context import RankContext
from cluster.group.rendezvous import Rendezvous
from cluster.kv.handoff import HandoffHolder, KVReader
from cluster.observe.metrics import SchedulerStats
from cluster.rank.adapters import AdapterReader
from cluster.rank.rank import Rank
from cluster.wire.group_messages import (
    CancelRead,
    DropKV,
    EndOfSteps,
    ExpectKV,
    FollowerHello,
    FollowerReport,
    HandoffsEnded,
    HoldKV,
    KVOrder,
    LoadAdapter,
    PiecesLoaded,
    StartRead,
    StepFrame,
)
from cluster.wire.messages import FrameError, LoraAdapter


class PlanReceiver(Protocol):
    """The follower's side of the step channel."""

    def receive(self) -> Any:
        """Wait for a frame or a ring of the doorbell; return the frame, or None after a ring."""

    def report(self, report: FollowerReport) -> None: ...


class FollowerLoop:
    """One follower's steps. Invariant: its leader's are executed in order, or `run` raises."""

    def __init__(
        self,
        name: str,
        *,
        receiver: PlanReceiver,
        runner: Runner,
        digester: StepDigester,
        holder: HandoffHolder | None,
        reader: KVReader | None,
        adapters: AdapterReader | None,
        is_overlapped: bool = False,
    ) -> None:
        self.receiver = receiver
        self.step = 0
        self.is_stopping = False
        self._name = name
        self._runner = runner
        self._digester = digester
        self._holder = holder
        self._reader = reader
        self._adapters = adapters
        self._has_said_loaded = False
        self._is_overlapped = is_overlapped
        self._in_flight: Any = None

    def run(self) -> None:
        while not self.is_stopping:
            self._runner.step_stats.wait(self.step + 1, is_asleep=False)
            match self.receiver.receive():
                case StepFrame() as frame:
                    self._execute(frame)
                case EndOfSteps():
                    break
                case None:
                    pass  # the doorbell rang
                case HoldKV() | DropKV() | ExpectKV() | StartRead() | CancelRead() as order:
                    self._do(order)
                case LoadAdapter() as order if self._adapters is not None:
                    self._retire()
                    self._adapters.start(order)
                case frame:
                    raise FrameError(f"step channel: wanted a step, found {type(frame).__name__}")
            self._report()
        self._retire()

    def _execute(self, frame: StepFrame) -> None:
        mine = self._digester.digest(frame.plan, frame.agreed)
        try:
            check_digest(self._name, frame.digest, mine)
        except StepDivergence as error:
            raise error.after(self._runner.step_stats.tail()) from None
        switch, wanted = self._runner.switch, frame.agreed.stage
        if not switch.accepts(wanted):
            raise StepDivergence(self._name, mine.step, "stage", wanted, switch.stage)
        if wanted != switch.stage:
            self._retire()  # a stage is entered between two steps
        self.step = frame.plan.step
        if not self._is_overlapped:
            self._runner.execute(frame.plan, frame.agreed)
            return
        launched = self._runner.launch(frame.plan, frame.agreed)
        self._retire()
        self._in_flight = launched

    def _retire(self) -> None:
        if self._in_flight is not None:
            launched, self._in_flight = self._in_flight, None
            self._digester.note_drawn(self._runner.wait(launched).token_ids)

    def _do(self, order: KVOrder) -> None:
        self._retire()
        holder, reader = self._holder, self._reader
        match order:
            case HoldKV() if holder is not None:
                handoff_id = holder.hold(order.request_id, order.block_ids, order.generations)
                if handoff_id != order.handoff_id:
                    raise FrameError(
                        f"{self._name}: handoff: wanted {order.handoff_id}, found {handoff_id}"
                    )
            case DropKV() if holder is not None:
                holder.drop(order.handoff_id)
            case ExpectKV() if reader is not None:
                reader.expect(order.request_id, order.handoff)
            case StartRead() if reader is not None:
                reader.start(
                    order.request_id, order.handoff, order.source_indices, order.dst_blocks
                )
            case CancelRead() if reader is not None:
                reader.cancel(order.request_id)
            case _:
                found = type(order).__name__
                raise FrameError(f"{self._name}: wanted an order for its role, found {found}")

    def _report(self) -> None:
        self._runner.load_piece()
        if self._adapters is not None:
            self._adapters.load_slice()
            for loaded in self._adapters.take_ended():
                self.receiver.report(loaded)
        if self._runner.switch.is_loaded and not self._has_said_loaded:
            self._has_said_loaded = True
            self.receiver.report(PiecesLoaded())
        if self._holder is not None and (handoff_ids := self._holder.take_ended()):
            self.receiver.report(HandoffsEnded(handoff_ids))
        for result in self._reader.take_finished() if self._reader is not None else ():
            self.receiver.report(result)


class Follower(Rank):
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
            adapters=self._adapter_reads,
        )

    def run(self) -> None:
        self.loop.run()
        self._receiver.close()
        self._close()

    def stop(self) -> None:
        self.loop.is_stopping = True
        self._doorbell.ring()

    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        """It waits for its leader's orders."""

    def _scheduler_stats(self) -> SchedulerStats:
        """Of its own slice: blocks and requests are its leader's account."""
        server = self.transfer.server
        return SchedulerStats(num_handoffs=server.num_held if server else 0)
