"""Connections between the ranks of a group: frames arrive in order, each after its own while.

A link fault strikes a frame of its sender to its receiver, in or after the fault's step. What was
lost never arrives, and nobody is told.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING, Any, get_args

import msgspec
from sim_schedule import LINK, Fault

from cluster.engine.divergence import StepDigester
from cluster.group.channel import PeerSockets, StepReceiver, StepSender
from cluster.wire.group_messages import EndOfSteps, FollowerReport, KVOrder, StepFrame, ToFollower
from cluster.wire.messages import Vote, decode, encode

if TYPE_CHECKING:
    from sim_group import SimGroup
    from sim_rank import SimFollower, SimLeader


ORDERS = {kind.__name__ for kind in (*get_args(KVOrder), EndOfSteps)}
"""What no link fault strikes."""


class Link:
    """One direction of a connection, which a link fault may strike if it has a `sender`."""

    def __init__(
        self,
        group: SimGroup,
        deliver: Callable[[bytes], None],
        sender: SimLeader | None = None,
        peer: int = -1,
    ) -> None:
        self._group, self._loop = group, group.loop
        self._random = group.rng.random
        self._mean_s = group.schedule.delay_s
        self._deliver = deliver
        self._sender, self._peer = sender, peer
        self._arrives_at = 0.0
        self._is_lost = False

    def send(self, body: bytes) -> None:
        fault = self._sender.due(LINK) if self._sender is not None else None
        if fault is None or fault.peer != self._peer or decode(body, Any)[0] in ORDERS:
            self._put(body)
        else:
            self._strike(fault, body)

    def close(self) -> None:
        """What was sent still arrives."""

    def _put(self, body: bytes, late_s: float = 0.0) -> None:
        if self._is_lost:
            return
        at = self._loop.now - self._mean_s * log(1.0 - self._random()) + late_s
        if at < self._arrives_at:
            at = self._arrives_at
        self._arrives_at = at
        self._loop.at(at, self._deliver, body)

    def _strike(self, fault: Fault, body: bytes) -> None:
        group = self._group
        match fault.kind:
            case "diverge":
                self._put(_alter_vote(group, fault, body))
                return
            case "altered plan":
                self._put(_alter_plan(group, fault, body))
                return
            case "held link":
                self._put(body, fault.duration_s)
            case "lost link":
                self._is_lost = True
        group.strike(fault)


class SimPeers(PeerSockets):
    """A leader's connections to the other leaders: the real ones but for what waits."""

    def __init__(self, leader: SimLeader) -> None:
        self._leader = leader
        self._links: dict[int, Any] = {}
        self._frames: list[deque[bytes]] = [deque() for _ in range(leader.group.dp_size)]
        self._awaited = -1

    def connect(self) -> None:
        me = self._leader
        for peer in me.group.leaders:
            if peer is not me:
                receive = peer.peers.receiver(me.dp_rank)
                self._links[peer.index] = Link(me.group, receive, me, peer.index)

    def receiver(self, sender: int) -> Callable[[bytes], None]:
        """Return what takes the frames of a peer. Called from the loop."""
        leader, frames = self._leader, self._frames[sender]
        process = leader.process

        def deliver(body: bytes) -> None:
            frames.append(body)
            if self._awaited == sender or leader.is_asleep:
                process.wake(process.ticket)

        return deliver

    def receive(self, dp_rank: int, *, is_patient: bool = True) -> bytes | None:
        frames = self._frames[dp_rank]
        if not frames:
            self._awaited = dp_rank
            while not frames:
                self._leader.process.wait()
            self._awaited = -1
        return frames.popleft()

    @property
    def has_frames(self) -> bool:
        return any(self._frames)


class SimSender(StepSender):
    """A leader's side of the step channel: the real one but for its ends."""

    def __init__(self, leader: SimLeader) -> None:
        self._leader = leader
        self._digester = StepDigester(is_overlapped=leader.group.schedule.is_overlapped)
        self.reports: deque[tuple[int, bytes]] = deque()

    def connect(self, followers: list[SimFollower]) -> None:
        me, links = self._leader, list[Any]()
        for follower in followers:
            links.append(Link(me.group, follower.receiver.deliver, me, follower.index))
            follower.receiver.connect(self)
        self.links = tuple(links)

    def take_reports(self) -> list[tuple[int, FollowerReport]]:
        reports = [(tp_rank, decode(body, FollowerReport)) for tp_rank, body in self.reports]
        self.reports.clear()
        return reports

    def on_report(self, tp_rank: int, body: bytes) -> None:
        """A report is there. Called from the loop."""
        self.reports.append((tp_rank, body))
        self._leader.wake()


class SimReceiver(StepReceiver):
    """A follower's side of the step channel: the real one but for what waits."""

    def __init__(self, follower: SimFollower) -> None:
        self._follower = follower
        self._frames: deque[bytes] = deque()
        self._has_rung = False
        self._is_waiting = False

    def connect(self, sender: SimSender) -> None:
        tp_rank = self._follower.tp_rank
        link: Any = Link(self._follower.group, lambda body: sender.on_report(tp_rank, body))
        self._link = link

    def deliver(self, body: bytes) -> None:
        """A frame is there. Called from the loop."""
        self._frames.append(body)
        self._wake()

    def ring(self) -> None:
        """Ring the doorbell. Called from the loop."""
        self._has_rung = True
        self._wake()

    def _wake(self) -> None:
        if self._is_waiting:
            self._follower.process.wake(self._follower.process.ticket)

    def receive(self) -> Any:
        """Wait for a frame or a ring of the doorbell; return the frame, or None after a ring."""
        self._is_waiting = True
        while not (self._frames or self._has_rung):
            self._follower.process.wait()
        self._is_waiting = False
        if not self._frames:
            self._has_rung = False
            return None
        frame = decode(self._frames.popleft(), ToFollower)
        if isinstance(frame, StepFrame):
            self._follower.on_plan(frame)
        return frame


def _alter_vote(group: SimGroup, fault: Fault, body: bytes) -> bytes:
    """Return another vote in place of the first one with work from the fault's step on."""
    vote = decode(body, Vote) if decode(body, Any)[0] == "Vote" else None
    if vote is None or vote.step < fault.step or not vote.has_work:
        return body
    group.strike(fault)
    group.diverged_at = vote.step
    value = getattr(vote, fault.field) + 1
    return encode(msgspec.structs.replace(vote, **{fault.field: value}))


def _alter_plan(group: SimGroup, fault: Fault, body: bytes) -> bytes:
    """Return another plan, agreement or digest in place of the first one with sequences."""
    frame: StepFrame = decode(body, StepFrame)
    if frame.plan.step < fault.step or not frame.plan.rows:
        return body
    group.strike(fault)
    group.diverged_at = frame.plan.step
    replace = msgspec.structs.replace
    match fault.field:
        case "digest":
            digest = replace(frame.digest, previous_step=frame.digest.previous_step + 1)
            return encode(replace(frame, digest=digest))
        case "agreed":
            batch = frame.agreed.batch
            longer = batch._replace(num_tokens=batch.num_tokens + 1)
            agreed = replace(frame.agreed, batch=longer)
            return encode(replace(frame, agreed=agreed))
        case "step":
            plan = replace(frame.plan, step=frame.plan.step + 1)
        case field:
            first, *others = getattr(frame.plan, field)
            plan = replace(frame.plan, **{field: [first + 1, *others]})
    return encode(replace(frame, plan=plan))
