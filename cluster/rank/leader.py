"""A leader: the process of one data-parallel rank that plans, steps and talks to the world.

Anything from outside comes in between two steps alone:

1. Frames of ingresses that wait in the inbox (submissions, aborts, moves) are decoded and given to
   the scheduler, and followers' reports of KV that was read or released to the group's holder and
   reader. Both are bounded, so that a flood cannot hold a step up. Adapters are read or forgotten
   as the application wants (`cluster/rank/adapters.py`).
2. `engine.step()` runs one step, together with the other data-parallel leaders.
3. Its outputs leave, one frame per ingress.
4. If no rank found anything to run, the leader sleeps in one wait over its inbox, its followers'
   reports, its peers' votes and its doorbell (a finished KV read, an expired lease, other adapters,
   a stop).
5. Leaders that were stopped say so in their votes, and all end at the same step.

Nothing but the step thread runs Python here for more than a fraction of a millisecond at a time; a
busy second thread would slow every step a hundredfold.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import zmq

from cluster.config import EngineConfig
from cluster.engine.adapters import AdapterSlots
from cluster.engine.blocks import BlockManager
from cluster.engine.divergence import StepDivergence
from cluster.engine.drafter import drafter_of
from cluster.engine.engine import Channel, Engine, Lockstep, OverlappedEngine
from cluster.engine.kv_handover import KVHandover
from cluster.engine.lockstep import AloneLockstep, JoinedLockstep, LockstepMachine
from cluster.engine.prefix_index import PrefixFeed, PrefixUpdate
from cluster.engine.request_limits import RequestLimits
from cluster.engine.scheduler import Scheduler
from cluster.group.channel import StepSender
from cluster.group.context import LoadedAdapters, RankContext
from cluster.group.rendezvous import LeaderEndpoints, Rendezvous
from cluster.kv.handoff import GroupHolder, GroupReader, HandoffHolder, HandoffMetadata, KVReader
from cluster.observe.counts import Counts
from cluster.observe.metrics import SchedulerStats
from cluster.rank.adapters import GroupAdapters
from cluster.rank.output_sender import OutputSender
from cluster.rank.rank import Rank
from cluster.rank.runner import ModelRunner
from cluster.wire.group_messages import (
    AdapterLoaded,
    FollowerHello,
    FollowerReport,
    HandoffsEnded,
    PeerHello,
    PiecesLoaded,
    ReadEnded,
)
from cluster.wire.messages import (
    MAX_GRAMMAR_CHARS,
    Abort,
    FrameError,
    Hello,
    Inbound,
    Leave,
    LoraAdapter,
    OutputFrame,
    Submit,
    decode,
    encode,
    request_id_of,
)
from cluster.wire.sockets import Budget, CurveHandshake, bind_tcp, listening_socket, unpack

log = logging.getLogger("lockstep.leader")

MAX_SLEEP_MS = 1000
"""An idle leader looks around this often, whatever rang: the bound on a lost wake-up."""
MAX_INBOX_FRAMES, MAX_INBOX_S = 256, 0.002
"""Taken between two steps, while all ranks wait: as long as a short step."""
MAX_INBOX_WAITING = 64
"""Frames of one ingress, which may be long; any more wait in its own process."""
CLOSE_LINGER_MS = 1000
MAX_OUTPUTS_WAITING = 20_000
"""Frames for an ingress that does not read, then given up: ten seconds of a fast model's steps."""


class Leader(Rank):
    """Engine, sockets and transfer of one leading rank; `inbox` is where requests go."""

    def __init__(
        self,
        context: RankContext,
        endpoints: LeaderEndpoints | None = None,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        endpoints = endpoints or LeaderEndpoints(context)
        rendezvous = rendezvous or endpoints.rendezvous
        super().__init__(context, endpoints.sockets, rendezvous, endpoints.listener)
        self._channel = endpoints.channel
        self._peers = endpoints.peers
        self._is_stopping = False
        self._holder: GroupHolder | None = None
        self._reader: GroupReader | None = None
        self._prefix_feed = PrefixFeed()
        followers, lockstep = self._meet(rendezvous)
        config, tell = context.config, self._channel.tell if self._channel is not None else None
        num_static, num_ranks = len(config.lora_modules), 1 + len(followers)
        slots = AdapterSlots(num_static, config.num_lora_slots, num_ranks)
        self._adapters = GroupAdapters(slots, self._adapter_reads, tell)
        self.engine = self._assemble(followers, lockstep, slots)

        self._inbox = Inbox(context, self._sockets, self.runner.model_config.vocab_size)
        self.inbox = self._inbox.address
        self._output_sender = OutputSender(self._inbox.socket)
        self._look_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.socket, zmq.POLLIN)
        self._poller.register(self._doorbell.fileno(), zmq.POLLIN)
        for ends in (self._channel, self._peers):
            for socket in ends.sockets if ends is not None else ():
                self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        while not self.engine.has_ended:
            self.step()
            if self.engine.is_idle and not self.engine.has_ended:
                self._sleep()
        self._close()

    def _sleep(self) -> None:
        self.runner.step_stats.wait(self._last_step, is_asleep=True)
        self._poller.poll(MAX_SLEEP_MS)
        self._doorbell.clear()

    @property
    def _last_step(self) -> int:
        return self.engine.agreed.step if self.engine.agreed else 0

    def step(self) -> None:
        self.runner.step_stats.plan(self._last_step + 1)
        self._take_inbox()
        if self._channel is not None:
            self._take_reports(self._channel)
        self.runner.load_piece()
        self._adapters.advance(self.engine.scheduler.uses_adapter)
        self.engine.is_draining = self._is_stopping
        try:
            outputs = self.engine.step()
        except StepDivergence as error:
            raise error.after(self.runner.step_stats.tail()) from None
        lost = self._output_sender.send(outputs)
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + MAX_SLEEP_MS / 1000
            if self._channel is not None and not self._is_stopping:
                self._channel.check()
        if lost:
            self.engine.scheduler.abort(lost)

    def stop(self) -> None:
        self._is_stopping = True
        self._doorbell.ring()

    def set_adapters(self, adapters: Sequence[LoraAdapter]) -> None:
        self._adapters.want(adapters)
        self._doorbell.ring()

    def _loaded_adapters(self) -> LoadedAdapters:
        return self._adapters.loaded

    def _scheduler_stats(self) -> SchedulerStats:
        return self.engine.scheduler.stats()

    def _prefixes(self, since: int) -> PrefixUpdate | None:
        return self._prefix_feed.since(since)

    def counts(self) -> Counts:
        scheduled = self.engine.scheduler.stats()
        return {
            ("num_preemptions_total",): scheduled.num_preemptions,
            ("prefix_cache_queries_total",): scheduled.prefix_queries,
            ("prefix_cache_hits_total",): scheduled.prefix_hits,
            ("spec_decode_num_drafts_total",): scheduled.num_drafts,
            ("spec_decode_num_draft_tokens_total",): scheduled.num_draft_tokens,
            ("spec_decode_num_accepted_tokens_total",): scheduled.num_accepted_tokens,
            ("prompt_tokens_computed_total",): scheduled.prompt_tokens_computed,
            **self.runner.step_stats.counts(),
            **super().counts(),
        }

    def _take_inbox(self) -> None:
        for peer, message in self._inbox.take():
            match message:
                case Submit():
                    if self._expect(message.request.request_id, peer):
                        self.engine.scheduler.add(message)
                case BadSubmit():
                    if self._expect(message.request_id, peer):
                        self.engine.scheduler.refuse(message.request_id, message.error)
                case Abort():
                    self.engine.scheduler.abort(message.request_ids)
                case Leave():
                    self.engine.scheduler.leave(message.request_ids, with_kv=message.with_kv)

    def _expect(self, request_id: str, peer: bytes) -> bool:
        """Note where a request's outputs go; return whether it is a new one."""
        if self._output_sender.expects(request_id):
            # Its end would be taken for the other one's, everywhere.
            log.error("inbox: request_id: wanted a new one, found %r unfinished", request_id)
            return False
        self._output_sender.expect(request_id, peer)
        return True

    def _take_reports(self, channel: StepSender) -> None:
        """Book what has ended on the followers; name one that reports what it was not asked for."""
        for tp_rank, report in channel.take_reports():
            try:
                self._book(tp_rank, report)
            except FrameError as error:
                raise FrameError(f"follower tp={tp_rank}: {error}") from error

    def _book(self, tp_rank: int, report: FollowerReport) -> None:
        match report:
            case HandoffsEnded() if self._holder is not None:
                self._holder.on_handoffs_ended(report.handoff_ids)
            case ReadEnded() if self._reader is not None:
                error = f"tp={tp_rank}: {report.error}" if report.error else ""
                self._reader.on_read_ended(report.request_id, error)
            case AdapterLoaded():
                self._adapters.on_loaded(tp_rank, report)
            case PiecesLoaded() if self.runner.switch.on_follower_loaded():
                pass
            case _:
                raise FrameError(f"wanted a report of its role, found {type(report).__name__}")

    def _meet(
        self, rendezvous: Rendezvous | None
    ) -> tuple[list[FollowerHello], JoinedLockstep | None]:
        if rendezvous is None:
            return [], None
        hello = rendezvous.hello(self.context.credentials, self.context.place.epoch)
        channel, peers = self._channel, self._peers
        followers = channel.accept(hello, self._wait_for) if channel is not None else []
        if peers is None:
            return followers, None
        place: dict[str, Any] = {"dp_rank": self._group.dp_rank, "dp_size": self._group.dp_size}
        graphs = self.runner.forward.checksum()
        ours = PeerHello(**msgspec.structs.asdict(hello), **place, graphs=graphs)
        peers.open(rendezvous.earlier, ours, self._wait_for)
        machine = LockstepMachine(**place, epoch=hello.epoch, switch=self.runner.switch)
        return followers, JoinedLockstep(machine, peers, self.runner.step_stats)

    def _assemble(
        self,
        followers: list[FollowerHello],
        lockstep: JoinedLockstep | None,
        adapters: AdapterSlots,
    ) -> Engine:
        for hello in followers:
            _check_follower(hello, self.runner)
        context, transfer, channel = self.context, self.transfer, self._channel
        tell = channel.tell if channel is not None else None
        if transfer.server is not None:
            self._holder = GroupHolder(transfer.server, len(followers), tell)
        if transfer.puller is not None:
            self._reader = GroupReader(transfer.puller, len(followers), tell)
        metadata = HandoffMetadata(
            sources=[transfer.source, *(hello.source for hello in followers)],
            block_bytes=self.runner.kv_spec.block_bytes,
            kv_hash=context.config.kv_hash,
            lease_s=context.config.transfer.lease_s,
        )
        return assemble_engine(
            context.config,
            self.runner,
            epoch=context.place.epoch,
            channel=channel,
            lockstep=lockstep,
            metadata=metadata,
            holder=self._holder,
            reader=self._reader,
            prefix_feed=self._prefix_feed,
            adapters=adapters,
        )

    def _close(self) -> None:
        for ends in (self._channel, self._peers):
            if ends is not None:
                ends.close()
        self._inbox.close()
        super()._close()


def _check_follower(hello: FollowerHello, runner: ModelRunner) -> None:
    wanted = {
        "num_blocks": runner.num_blocks,
        "layout": runner.kv_spec.layout,
        "graphs": runner.forward.checksum(),
    }
    for field, ours in wanted.items():
        theirs = getattr(hello, field)
        if ours != theirs:
            raise FrameError(f"follower tp={hello.tp_rank}: {field}: wanted {ours}, found {theirs}")


def assemble_engine(
    config: EngineConfig,
    runner: ModelRunner,
    *,
    epoch: int = 0,
    channel: Channel | None = None,
    lockstep: Lockstep | None = None,
    metadata: HandoffMetadata | None = None,
    holder: HandoffHolder | None = None,
    reader: KVReader | None = None,
    prefix_feed: PrefixFeed | None = None,
    adapters: AdapterSlots | None = None,
) -> Engine:
    """Return the engine of a leader; None for what it has not. `prefix_feed`: who is told of the
    prefix cache; `adapters`: None for those alone that the configuration has."""
    cache, model = config.cache, runner.model_config
    blocks = BlockManager(
        runner.num_blocks,
        cache.block_size,
        cache.enable_prefix_caching,
        sliding_window=model.kv_window,
        changes=prefix_feed.changes if prefix_feed is not None else None,
        num_behind=cache.num_behind,
    )
    handover: KVHandover | None = None
    if metadata is not None:
        handover = KVHandover(blocks, metadata, holder=holder, reader=reader)
    scheduler = Scheduler(
        config.scheduler,
        RequestLimits(
            blocks=blocks,
            max_model_len=config.max_model_len,
            role=config.role,
            vocab_size=model.vocab_size,
            max_prompt_len=model.max_prompt_len,
            adapters=adapters or AdapterSlots(len(config.lora_modules)),
        ),
        epoch=epoch,
        handover=handover,
        grammars=runner.grammars,
        clock=time.monotonic,
        drafter=drafter_of(config),
        tokens_within=runner.step_stats.tokens_within,
    )
    loop = OverlappedEngine if config.overlap else Engine
    return loop(scheduler, lockstep or AloneLockstep(runner.switch), channel, runner)


@dataclass(frozen=True)
class BadSubmit:
    """A submission that could not be decoded, but names its request."""

    request_id: str
    error: str


class Inbox:
    """Where ingresses connect to this leader. Belongs to the step thread. Whatever comes in,
    nothing here raises: a bad submission that names its request is answered with an error, any
    other bad frame dropped with a line in the log."""

    def __init__(
        self, rank: RankContext, sockets: zmq.Context[zmq.Socket[bytes]], vocab_size: int
    ) -> None:
        self._credentials = rank.credentials
        self._hello = Hello(rank.engine_id, rank.place.epoch)
        self._max_bytes = max_submit_bytes(rank.config.max_model_len, vocab_size)
        handshake = CurveHandshake(rank.credentials.secret)
        self.socket = listening_socket(
            sockets, zmq.ROUTER, handshake, max_waiting=MAX_INBOX_WAITING
        )
        self.socket.sndhwm = MAX_OUTPUTS_WAITING
        self.socket.router_mandatory = True
        self.socket.linger = CLOSE_LINGER_MS
        self.address = bind_tcp(self.socket, rank.host)

    def take(self) -> Iterator[tuple[bytes, Submit | BadSubmit | Abort | Leave]]:
        """Yield what waits with the peer that sent it, as much as there is time for between two
        steps."""
        budget = Budget(MAX_INBOX_FRAMES, MAX_INBOX_S)
        while budget.take():
            try:
                peer, *parts = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._read(parts)
            if isinstance(message, Hello):
                self._greet(peer, message)
            elif message is not None:
                yield peer, message

    def _greet(self, peer: bytes, hello: Hello) -> None:
        if hello != self._hello:
            log.error("inbox: wanted %s, found %s", self._hello, hello)
            return
        with suppress(zmq.ZMQError):  # it has left
            self.socket.send_multipart((peer, encode(OutputFrame([]))), zmq.NOBLOCK)

    def _read(self, parts: list[bytes]) -> Inbound | BadSubmit | None:
        try:
            body = unpack(parts, self._credentials, self._max_bytes)
        except FrameError as error:
            log.error("inbox: dropped a frame: %s", error)
            return None
        try:
            message: Inbound = decode(body, Inbound)
        except FrameError as error:
            log.error("inbox: refused a frame: %s", error)
            request_id = request_id_of(body)
            return BadSubmit(request_id, str(error)) if request_id else None
        return message

    def close(self) -> None:
        """Close; what was sent still leaves for a second."""
        self.socket.close()


def max_submit_bytes(max_model_len: int, vocab_size: int) -> int:
    """Return how long a submission may be: a token takes up to 5 bytes, and as much again for its
    block's id and generation in a handed over sequence with blocks of one token."""
    return (256 << 10) + 4 * MAX_GRAMMAR_CHARS + vocab_size // 8 + 16 * max_model_len
