"""A leader: the process of one data-parallel rank that plans, steps and talks to the world.

A step's border is the only place where anything from outside comes in:

1. Frames that wait in the inbox (submissions, aborts) are decoded and given to the engine, and
   followers' reports of KV that was read or released to the group's holder and reader.
2. `engine.step()` runs one step, together with the other data-parallel leaders.
3. Its outputs leave, one frame per ingress.
4. If no rank found anything to run, the leader sleeps in one wait over its inbox, its followers'
   reports, its peers' votes and its doorbell (a finished KV read, an ended lease, a stop).
5. Leaders that were stopped say so in their votes, and all end at the same step.

The one thing to know: nothing but the step thread runs Python here for more than a fraction of a
millisecond at a time; a busy second thread would slow every step a hundredfold.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict

import zmq

from cluster.channel_messages import FollowerHello, ReadEnded, TicketsEnded
from cluster.config import EngineConfig, Role
from cluster.engine.engine import Engine
from cluster.engine.group_kv import GroupHolder, GroupReader
from cluster.engine.handoff import HandoffTerms
from cluster.engine.lockstep import LockstepMachine
from cluster.engine.step_digest import StepDivergence
from cluster.engine.watchdog import Heartbeat
from cluster.lockstep_messages import PeerHello
from cluster.messages import (
    PROTOCOL_VERSION,
    Abort,
    FrameError,
    Inbound,
    KVSource,
    Submit,
    Watch,
    check_header,
    decode,
    header_bytes,
)
from cluster.rank.assembly import assemble_engine
from cluster.rank.contexts import end_context
from cluster.rank.doorbell import Doorbell
from cluster.rank.forward import Progress
from cluster.rank.groups import GroupMembership
from cluster.rank.kv_transfer.end import TransferEnd
from cluster.rank.lockstep import JoinedLockstep, Lockstep
from cluster.rank.meeting import Meeting, Rendezvous
from cluster.rank.outlet import Outlet
from cluster.rank.runner import ModelRunner
from cluster.rank.sockets import keep_alive
from cluster.rank.stats import RankStats
from compile.exchange import ArtifactExchange
from model.config import ModelConfig

log = logging.getLogger("lockstep.leader")

MAX_SLEEP_MS = 1000
"""An idle leader looks around this often, whatever rang: the bound on a lost wake-up."""


class Leader:
    """Engine, sockets and transfer of one leading rank.

    `inbox` is the endpoint that takes requests. All sockets of one process share a context.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_id: str,
        epoch: int,
        host: str,
        config_hash: str,
        dp_rank: int = 0,
        progress: Progress | None = None,
        meeting: Meeting | None = None,
        rendezvous: Rendezvous | None = None,
        exchange: ArtifactExchange | None = None,
    ) -> None:
        """Load, and wait until all followers and all other leaders have.

        Args:
            meeting: where the followers were told to go; needed where there are any.
            rendezvous: where to find other leaders; needed where there are any.
            exchange: where ranks on other nodes publish what they compile.
        """
        self.config = config
        self.epoch = epoch
        self._name = f"rank dp={dp_rank} tp=0 epoch={epoch}"
        self._header = header_bytes(config_hash)
        meeting = meeting or Meeting(
            config, host=host, config_hash=config_hash, epoch=epoch, dp_rank=dp_rank
        )
        self._context = meeting.context
        self._channel = meeting.channel
        self._peers = meeting.peers
        self._doorbell = Doorbell()
        self._is_stopping = False

        dp_size = config.parallel.lockstep_size
        self._group = GroupMembership.lead(
            meeting,
            config.parallel.tensor_parallel_size,
            config.device,
            dp_rank=dp_rank if dp_size > 1 else 0,
            dp_size=dp_size,
            shares_experts=ModelConfig.from_dir(config.model_path).experts is not None,
            where=rendezvous,
        )
        self.transfer = TransferEnd(config, tp_rank=0)
        self.runner = ModelRunner(
            config,
            dp_rank=dp_rank,
            group=self._group,
            progress=progress,
            storage=self.transfer.storage,
            exchange=exchange,
        )
        self.transfer.start(
            self.runner.kv_pool,
            context=self._context,
            host=host,
            header=self._header,
            epoch=epoch,
            doorbell=self._doorbell,
        )
        self._holder: GroupHolder | None = None
        self._reader: GroupReader | None = None
        followers = self._channel.accept(self.runner.forward.shape_of)
        self.engine = self._assemble(followers, self._join(rendezvous, config_hash))

        self._inbox = self._context.socket(zmq.PULL)
        keep_alive(self._inbox)
        self._inbox.rcvhwm = 0  # a submission is never dropped; queues are bounded at the ingress
        self.inbox = f"tcp://{host}:{self._inbox.bind_to_random_port(f'tcp://{host}')}"
        self._outlet = Outlet(
            context=self._context,
            header=self._header,
            engine_id=engine_id,
            inbox=self.inbox,
            epoch=epoch,
            lease_s=config.transfer.lease_s,
        )
        self._look_at = 0.0
        self._poller = zmq.Poller()
        self._poller.register(self._inbox, zmq.POLLIN)
        self._poller.register(self._doorbell.fileno(), zmq.POLLIN)
        for socket in (*self._channel.sockets, *(self._peers.sockets if self._peers else ())):
            self._poller.register(socket, zmq.POLLIN)

    def run(self) -> None:
        """Step until all leaders are stopped. Returns normally only after `stop`.

        Raises:
            StepDivergence: another leader's step is not this one's; names rank, step and field.
        """
        while not self.engine.has_ended:
            self.step()
            if self.engine.is_idle and not self.engine.has_ended:
                self._sleep()
        self._close()

    def _sleep(self) -> None:
        """Wait until something is to be done, here or on a peer."""
        self.runner.pulse.wait(self._last_step, is_asleep=True)
        self._poller.poll(MAX_SLEEP_MS)
        self._doorbell.clear()

    @property
    def _last_step(self) -> int:
        return self.engine.agreed.step if self.engine.agreed else 0

    def step(self) -> None:
        """Take what waits in the inbox, run one step and send its outputs."""
        self.runner.pulse.plan(self._last_step + 1)
        self._take_inbox()
        self._take_reports()
        self.engine.is_draining = self._is_stopping
        try:
            outputs = self.engine.step()
        except StepDivergence as error:
            raise error.after(self.runner.steps.tail()) from None
        lost = self._outlet.send(outputs) if outputs else []
        if time.monotonic() > self._look_at:
            self._look_at = time.monotonic() + MAX_SLEEP_MS / 1000
            lost += self._outlet.give_up_on_the_dead()
            if not self._is_stopping:
                self._channel.check()
        if lost:
            self.engine.abort(lost)

    def stop(self) -> None:
        """Make `run` return at the border of the step in which all leaders were stopped.

        Any thread may call it.
        """
        self._is_stopping = True
        self._doorbell.ring()

    def stats(self, *, tp_rank: int, dp_rank: int, pid: int, node: str) -> RankStats:
        """Return the rank's counters. Any thread may call it: it reads plain numbers."""
        numbers = asdict(self.engine.stats())
        return RankStats(
            tp_rank=tp_rank,
            dp_rank=dp_rank,
            pid=pid,
            node=node,
            state="ready",
            epoch=self.epoch,
            step=self._last_step,
            kv_bytes_sent=self.transfer.bytes_sent,
            kv_bytes_received=self.transfer.bytes_received,
            **{name: numbers[name] for name in _SCHEDULER_STATS},
        )

    def heartbeat(self) -> Heartbeat:
        """Return what the step thread does. Any thread may call it."""
        return self.runner.pulse.heartbeat()

    def _take_inbox(self) -> None:
        while True:
            try:
                header, body = self._inbox.recv_multipart(zmq.NOBLOCK)
                check_header(header, self._header)
                message = decode(body, Inbound)
            except zmq.Again:
                return
            except (FrameError, ValueError) as error:
                log.error("inbox: dropped a frame: %s", error)
                continue
            match message:
                case Submit():
                    self._outlet.expect(message.request.request_id, message.request.reply_to)
                    self.engine.submit(message)
                case Abort():
                    self.engine.abort(message.request_ids)
                case Watch():
                    self._outlet.watch(message.address)

    def _take_reports(self) -> None:
        """Book what has ended on the followers."""
        for tp_rank, report in self._channel.take_reports():
            match report:
                case TicketsEnded():
                    assert self._holder is not None
                    self._holder.on_tickets_ended(report.tickets)
                case ReadEnded():
                    assert self._reader is not None
                    error = f"tp={tp_rank}: {report.error}" if report.error else ""
                    self._reader.on_read_ended(report.request_id, error)

    def _join(self, rendezvous: Rendezvous | None, config_hash: str) -> JoinedLockstep | None:
        """Greet the other leaders; return the lockstep with them, or None where there are none."""
        if self._peers is None:
            return None
        assert rendezvous is not None, f"{self._name}: wanted its peers' rendezvous, found None"
        group, forward = self._group, self.runner.forward
        self._peers.open(
            rendezvous.earlier,
            PeerHello(
                protocol=PROTOCOL_VERSION,
                config_hash=config_hash,
                epoch=self.epoch,
                dp_rank=group.dp_rank,
                dp_size=group.dp_size,
                graphs=forward.checksum(),
            ),
        )
        machine = LockstepMachine(
            dp_rank=group.dp_rank,
            dp_size=group.dp_size,
            epoch=self.epoch,
            shape_of=forward.shape_of,
        )
        return Lockstep.joined(machine, self._peers, self.runner.pulse)

    def _assemble(self, followers: list[FollowerHello], lockstep: JoinedLockstep | None) -> Engine:
        for hello in followers:
            _check_follower(hello, self.runner)
        tell, transfer = self._channel.tell, self.transfer
        if transfer.server is not None:
            self._holder = GroupHolder(transfer.server, len(followers), tell)
        if transfer.puller is not None:
            self._reader = GroupReader(transfer.puller, len(followers), tell)
        sources = [transfer.source, *(hello.source for hello in followers)]
        return assemble_engine(
            self.config,
            self.runner,
            epoch=self.epoch,
            channel=self._channel,
            lockstep=lockstep,
            holder=self._holder,
            terms=None if self.config.role is Role.MIXED else self._terms(sources),
            reader=self._reader,
        )

    def _terms(self, sources: list[KVSource]) -> HandoffTerms:
        return HandoffTerms(
            sources=sources,
            block_bytes=self.runner.kv_spec.block_bytes,
            layout=self.runner.kv_spec.layout,
            lease_s=self.config.transfer.lease_s,
        )

    def _close(self) -> None:
        self.transfer.close()
        self._outlet.close()
        self._channel.close()
        if self._peers is not None:
            self._peers.close()
        self.runner.forward.close()
        self._group.close()
        self._inbox.close(linger=0)
        end_context(self._context, f"{self._name} of role {self.config.role.value}")


def _check_follower(hello: FollowerHello, runner: ModelRunner) -> None:
    """Compare what a follower made of the configuration with what we made of it."""
    wanted = {"num_blocks": runner.num_blocks, "layout": runner.kv_spec.layout}
    for field, ours in wanted.items():
        theirs = getattr(hello, field)
        if ours != theirs:
            raise FrameError(f"follower tp={hello.tp_rank}: {field}: wanted {ours}, found {theirs}")


_SCHEDULER_STATS = (
    "num_blocks",
    "num_free_blocks",
    "num_running",
    "num_waiting",
    "held_tickets",
    "prompt_tokens_computed",
)
