"""Faults on purpose: a rank that dies, stops or disagrees in the middle of a step.

Who wants to see what a group makes of it (`faults.py`, the tests) arms one of its ranks: `arm`
where it is an object of this process, `arm_actor` where it is an actor. The fault strikes the next
time that this rank comes to the place.

The packages know nothing of this. Arming puts a function around one method of a live object, at a
seam that every step goes through; Ray brings the function to the rank's process.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import psutil

from cluster.config import Role
from cluster.wire.group_messages import ToPeer
from cluster.wire.messages import (
    KVCall,
    KVRead,
    KVRelease,
    KVSource,
    StepAgreement,
    StepKind,
    StepPlan,
    Vote,
    decode,
)
from compile.config import CUDAGraphMode
from compile.dispatch import BatchDescriptor

if TYPE_CHECKING:
    from cluster.actors.rank_actor import RankActor
    from cluster.rank.follower import Follower
    from cluster.rank.leader import Leader


class Place(Enum):
    """Where a fault strikes."""

    PREFILL = "prefill"
    """A step with prompt tokens of this rank: its inputs are built, no collective has begun."""
    DECODE = "decode"
    """A step in which this rank only decodes; there as well."""
    PLAN = "plan"
    """A plan's transfer: a leader has sent it to half of its followers, or without followers its
    vote to its peers; a follower has received it."""
    KV = "kv"
    """KV's transfer: a decode rank has got blocks and not released them, a prefill rank has not
    answered their release; a link is cut that a read or a release has just been sent over."""


class Action(Enum):
    """What the rank does there."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    DIVERGE = "diverge"
    """It holds the step for another one, in one field of its agreement or of its digest."""
    CUT = "cut"
    """It loses its connection to the holder that it reads KV from, and what was on its way."""


@dataclass(frozen=True)
class Fault:
    """One fault. `note` names a file that is told the step and the time, by the monotonic clock.

    `field`, with `DIVERGE`, is one of `StepAgreement` on a leader that has peers,
    else of `StepDigest`.
    """

    place: Place
    action: Action
    note: str
    field: str = ""

    def strike(self, step: int) -> None:
        """End or stop this process, with all of its threads."""
        self.tell(step)
        os.kill(os.getpid(), getattr(signal, self.action.value))

    def tell(self, step: int) -> None:
        """Note that the fault strikes now."""
        draft = Path(f"{self.note}.draft")
        draft.write_text(f"{step} {time.monotonic()}")
        draft.rename(self.note)

    def is_due(self, kind: int) -> bool:
        """Return whether steps of this kind, as in a vote, are those to strike in."""
        return kind > 0 and (kind == StepKind.DECODE) == (self.place is Place.DECODE)


def arm(rank: Leader | Follower, fault: Fault) -> None:
    """Let the rank fail when it comes to the fault's place. Any thread may call it.

    Raises:
        ValueError: the rank never comes there.
    """
    if fault.action is Action.DIVERGE:
        _diverge(rank, fault)
    elif fault.place is Place.PLAN:
        _strike_in_plan(rank, fault)
    elif fault.place is Place.KV:
        _strike_in_kv(rank, fault)
    else:
        _strike_in_step(rank.runner, fault)


def arm_actor(actor: Any, fault: Fault) -> None:
    """Arm the rank of a `RankActor`. Not waited for: the fault may strike before Ray answers."""
    import ray.cloudpickle

    # The rank's process need not find this file: it is sent along.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    actor.__ray_call__.options(concurrency_group="ctl").remote(_arm_rank_of, fault)


def _arm_rank_of(actor: RankActor, fault: Fault) -> None:
    assert actor._rank is not None, "rank: wanted one that is ready, found none"
    arm(actor._rank, fault)


def _after(owner: object, name: str, then: Callable[..., Any]) -> None:
    """Let a method of this one object return what `then(result, *args)` makes of its result."""
    method = getattr(owner, name)
    setattr(owner, name, lambda *args: then(method(*args), *args))


def _strike_in_step(runner: Any, fault: Fault) -> None:
    execute = runner.execute

    def execute_with_fault(
        plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None] | None = None
    ) -> Any:
        def confirm_and_strike() -> None:
            if confirm is not None:
                confirm()
            if fault.is_due(plan.vote().kind):
                fault.strike(plan.step)

        return execute(plan, agreed, confirm_and_strike)

    runner.execute = execute_with_fault


def _strike_in_plan(rank: Any, fault: Fault) -> None:
    def on_frame(frame: Any) -> Any:
        if hasattr(frame, "plan"):
            fault.strike(frame.plan.step)
        return frame

    def on_vote(_: None, body: bytes) -> None:
        frame = decode(body, ToPeer)
        if isinstance(frame, Vote) and frame.has_work:
            fault.strike(frame.step)

    if not hasattr(rank, "engine"):
        _after(rank.loop.receiver, "receive", on_frame)
    elif rank.engine.channel is not None:
        _send_half(rank.engine.channel, fault)
    elif hasattr(rank.engine.lockstep, "_channel"):
        _after(rank.engine.lockstep._channel, "send", on_vote)
    else:
        raise ValueError("place: wanted one that a rank without others comes to, found plan")


def _send_half(channel: Any, fault: Fault) -> None:
    send = channel.send

    def send_half(plan: StepPlan, agreed: StepAgreement) -> None:
        channel.links = channel.links[: (len(channel.links) + 1) // 2]
        send(plan, agreed)
        fault.strike(plan.step)

    channel.send = send_half


def _strike_in_kv(rank: Any, fault: Fault) -> None:
    def strike(*_: Any) -> None:
        fault.strike(rank.heartbeat().step)

    match rank.context.config.role:
        case Role.DECODE if fault.action is Action.CUT:
            _cut_link(rank, fault)
        case Role.DECODE:  # mapped memory, or what came over a socket
            _after(rank.transfer.puller._transport, "copy", strike)
            _after(rank.transfer.puller._transport, "write", strike)
        case Role.PREFILL:
            _after(rank.transfer.server._holder, "release", strike)
        case Role.MIXED:
            raise ValueError("place: wanted one that a rank of a mixed pool comes to, found kv")


def _cut_link(rank: Any, fault: Fault) -> None:
    transport = rank.transfer.puller._transport

    def cut(_: None, source: KVSource, call: KVCall) -> None:
        if isinstance(call, KVRead | KVRelease):
            del transport.send
            cut_connections(source.address)
            fault.tell(rank.heartbeat().step)

    _after(transport, "send", cut)


def cut_connections(endpoint: str) -> None:
    """End this process's connections to an endpoint, as a network does that fails."""
    port = int(endpoint.rpartition(":")[2])
    for connection in psutil.Process().net_connections("tcp"):
        if connection.raddr and connection.raddr.port == port:
            with socket.socket(fileno=os.dup(connection.fd)) as link:
                link.shutdown(socket.SHUT_RDWR)


# --- divergence ---------------------------------------------------------------------------------


def _diverge(rank: Any, fault: Fault) -> None:
    """Alter one field where this rank computes it, so that all that follows from it is altered."""

    def altered(struct: Any, step: int, kind: int) -> Any:
        if not fault.is_due(kind) or not hasattr(struct, fault.field):
            return struct
        fault.tell(step)
        value = another(getattr(struct, fault.field))
        if fault.field == "mode":  # a frame with a mode past the last one would be refused
            value %= CUDAGraphMode.FULL.value + 1
        return msgspec.structs.replace(struct, **{fault.field: value})

    def of_agreement(agreed: StepAgreement, *_: Any) -> Any:
        return altered(agreed, agreed.step, agreed.kind)

    def of_digest(digest: Any, plan: StepPlan, _: StepAgreement) -> Any:
        return altered(digest, plan.step, plan.vote().kind)

    if not hasattr(rank, "engine"):
        _after(rank.loop._digester, "digest", of_digest)
    elif hasattr(rank.engine.lockstep, "_machine"):
        _after(rank.engine.lockstep._machine, "_agree", of_agreement)
    else:
        _after(rank.engine.channel._digester, "digest", of_digest)


def another(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, BatchDescriptor):
        return value._replace(num_tokens=value.num_tokens + 1)
    if isinstance(value, tuple):
        return (another(value[0]), *value[1:])
    return not value if isinstance(value, bool) else value + 1
