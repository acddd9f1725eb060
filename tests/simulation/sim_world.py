"""One simulation: clients, router, pools and ranks from a schedule, and what must hold of them.

1. Everything ends, in bounded time.
2. Each request's tokens are the oracle's, or a head of them where its client left.
3. All ranks of an epoch go by the same agreements, in the same order, through the same
   collectives, each with the tokens that were agreed on; the ranks under one leader draw alike.
4. A group ends only by a fault, and then a rank is named that it struck.
5. A group that serves while it compiles has gone over to its graphs, all ranks at the same steps.
6. An aborted request gets no token any more, no token of a step leaves that ranks were told
   different things about, and in the end all blocks are free and no handoff is held.
7. A request is given up only if no replica has been healthy for `MAX_PAUSE_S`. Where one is, it is
   submitted within that time of its arrival, of its last output, or of when the ingress must know
   that what ran it is lost. Whoever drains gets nothing more, and is empty when it stops.
8. A client that leaves is told of to all who may have some of its request, and a connection that
   has not ended is kept.
9. Where a replica of its pool is healthy, one that drains lets go of what it runs: each request
   leaves with its next token, and goes on elsewhere under the same attempt, which a loss alone
   ends. If nothing else strikes and leaders have room, the replica is empty, and each request has
   its next token, in bounded time (`_check_move`, `on_drained`). Nobody is told to leave if all
   others drain as well.

The first `Violation` ends a simulation; `run_schedule` never raises.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from math import inf, log
from typing import Any

from sim_check import check_scheduler
from sim_group import SimGroup, SimHandle
from sim_ingress import (
    HEARD_S,
    LEARN_S,
    POLL_S,
    SimBoard,
    SimConnection,
    SimInbox,
    SimIngress,
    SimOutputSender,
    hashes,
)
from sim_kv import place_of
from sim_loop import SimLoop, Violation
from sim_model import GRAPHS, continuation
from sim_rank import SimFollower, SimLeader, SimRank, SimRunner
from sim_replica import SimReplica
from sim_schedule import (
    FATAL,
    LOST,
    MAX_MODEL_LEN,
    MIN_STEPS,
    NEW_BLOCKS,
    VOCAB,
    Arrival,
    Fault,
    Schedule,
    draw_arrival,
)
from sim_serve import SimServe

from cluster.actors.rank_group import STATS_TIMEOUT_S
from cluster.engine.engine import OverlappedEngine
from cluster.engine.lockstep import LockstepMachine
from cluster.engine.scheduler import Scheduler
from cluster.engine.watchdog import Phase
from cluster.group.context import RankPlace
from cluster.kv.handoff import GroupHolder, GroupReader, KVHolder
from cluster.kv.reads import ANSWER_TIMEOUT_S, KVPulls
from cluster.rank.follower import FollowerLoop
from cluster.wire.messages import (
    EngineOutput,
    FinishReason,
    GenerateRequest,
    Sampling,
    StepAgreement,
)
from serve.pools.directory import Directory, NoLeader
from serve.pools.pool_core import EMPTY_REPORTS, REPORT_PERIOD_S, PoolCore
from serve.pools.quarantine import SHARED_DEATHS, FairLock
from serve.pools.router import GOES_ON, Router
from serve.pools.router import LOST as LOST_ENDS
from serve.pools.scaling import Meter

END_S = 180.0
"""Of simulated time: no schedule has more to do than half a minute."""
MAX_EXTRA = 64
"""Requests beyond the schedule's, for steps and for faults that have not struck."""
PACE_S = 0.3
SETTLE_S = 1.5
"""Until the last abort has reached its engine."""
REST_S = 12.0
"""Until the last lease has ended, and the last read from a dead holder."""
MAX_PAUSE_S = 1.0
LEAVE_S = 0.5
"""Until what was told to leave has: a frame and two steps."""
EMPTY_S = (EMPTY_REPORTS + 2) * (REPORT_PERIOD_S + 0.02)
"""Until an empty replica knows that it is."""
ABORT_S = 0.01
"""Until engines are told that a client has left."""
LONGEST_DELAY = 4.0
"""Of the mean. A frame that is later is held up by a fault: else the shortest lease may end by bad
luck alone, and a request be lost once more than its schedule's faults account for."""


NAMED = {
    "kill": (" ended: ",),
    "stop": (": no heartbeat for ", ": does not advance in step "),
    "stall": (": does not advance in step ",),
    "told to stop": (" ended: stopped",),
    "diverge": (": wanted ",),
    "altered plan": (": wanted ",),
    "lost link": (": does not advance in step ", ": wanted "),
    "lost frame": (": does not advance in step ", ": wanted "),
}
"""What a group's end says of a fault."""


# --- a simulation -------------------------------------------------------------------------------


class Plants:
    """What a simulation is made of; a planted bug puts something else in a place."""

    scheduler: Any = Scheduler
    machine: Any = LockstepMachine
    runner: Any = SimRunner
    overlapped_engine: Any = OverlappedEngine
    leader: Any = SimLeader
    follower: Any = SimFollower
    follower_loop: Any = FollowerLoop
    kv_holder: Any = KVHolder
    kv_pulls: Any = KVPulls
    group_holder: Any = GroupHolder
    group_reader: Any = GroupReader
    group: Any = SimGroup
    handle: Any = SimHandle
    inbox: Any = SimInbox
    output_sender: Any = SimOutputSender
    connection: Any = SimConnection
    directory: Any = Directory
    pool_core: Any = PoolCore
    router: Any = Router
    meter: Any = Meter
    hashes: Any = staticmethod(hashes)
    is_met: Callable[[Schedule], bool] = staticmethod(lambda schedule: True)
    """Whether a schedule comes to that place at all."""


@dataclass
class Outcome:
    schedule: Schedule
    finding: Violation | None = None
    num_steps: int = 0
    num_restarts: int = 0
    num_requests: int = 0
    num_aborted: int = 0
    num_refused: int = 0
    """Requests that no leader could take in time."""
    num_resubmitted: int = 0
    """Attempts beyond the first of each request."""
    num_replicas: int = 0
    """All that were started."""
    num_preemptions: int = 0
    num_handoffs: int = 0
    """Handoffs that were issued."""
    moves: Counter[str] = field(default_factory=Counter)
    """How often a request left who drained, by its pool."""
    num_moves_with_kv: int = 0
    num_lost_moves: int = 0
    """Of these whose KV was lost on its way."""
    scaled: Counter[str] = field(default_factory=Counter)
    """How often a pool was scaled up or down."""
    longest_move_s: float = 0.0
    """Of a client whose request moved, where nothing struck and there was room."""
    longest_drain_s: float = 0.0
    """Of a replica, likewise."""
    num_judged: Counter[str] = field(default_factory=Counter)
    """Moves and drains of these."""
    struck: list[str] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    """Why groups ended."""
    longest_pause_s: float = 0.0
    """Of a client beyond the time to detect, while a replica was healthy."""
    simulated_s: float = 0.0
    trace: int = 0
    """A hash of all agreements and outputs with their times."""


def run_schedule(schedule: Schedule, plants: Plants | None = None) -> Outcome:
    with _quiet():
        return World(schedule, plants or Plants()).run()


class World:
    def __init__(self, schedule: Schedule, plants: Plants) -> None:
        self.schedule = schedule
        self.plants = plants
        self.loop = SimLoop()
        self.rng = random.Random(schedule.seed + 1)
        self.outcome = Outcome(schedule)
        self.board = SimBoard(self)
        self.connections: dict[bytes, SimConnection] = {}
        """By what a leader calls the ingress."""
        self.ingresses: list[SimIngress]
        """To which clients come, to each in turn."""
        self.trials = FairLock(self.loop.time)
        self.serve = SimServe(self)
        self.replicas: list[SimReplica] = []
        """All that are not stopped yet."""
        self._groups: dict[tuple[str, int, int], SimGroup] = {}
        """By pool, replica and epoch."""
        self._num_deaths: Counter[str] = Counter()
        """By request: of what ran it, as far as the ingress can tell."""
        self._ways: dict[str, list[SimConnection]] = {}
        """By request where its last attempt was submitted."""
        self._progress_at: dict[str, float] = {}
        """By request when it came, was submitted, had an output or ended a stage: the latest."""
        self._faults = list(schedule.faults)
        self.fault = self._faults[0] if self._faults else None
        """The one that strikes next."""
        self._attempts: dict[str, str] = {}
        """By request the last one that was submitted."""
        self._moved: dict[str, tuple[float, int]] = {}
        """By request when it left who drained, and its tokens then; until its next one."""
        self._has_new_blocks = any(fault.kind == NEW_BLOCKS for fault in schedule.faults)
        self._crowded: set[SimReplica] = set()
        """Those that had more to let go of than fits into a leader at once, where it is or goes."""
        self._troubled_until = 0.0
        """Until what struck last, drains apart, is over."""
        self._arrives_at: dict[Any, float] = {}
        self.calls_lost_until = 0.0
        self._is_done = False

    def run(self) -> Outcome:
        outcome = self.outcome
        try:
            self.loop.after(0.0, self._begin)
            has_ended = self.loop.run(END_S)
            if not has_ended or not self._is_done:
                raise Violation("hang", f"after {self.loop.now:.1f} s; {self._where()}")
        except Violation as error:
            outcome.finding = error
        except AssertionError as error:
            outcome.finding = Violation("assertion", str(error))
        except Exception as error:
            outcome.finding = Violation("error", repr(error))
        for group in self._groups.values():
            for rank in group.ranks:
                rank.kill()
        outcome.simulated_s = self.loop.now
        self.loop.close()
        outcome.num_restarts = len(self._groups) - outcome.num_replicas
        return outcome

    def _begin(self) -> None:
        number = range(self.schedule.num_ingresses)
        self.ingresses = [SimIngress(self, weights=0, block_times=1) for _ in number]
        self._main_task = self.spawn(self._main())
        self._main_task.add_done_callback(self._on_main_done)

    def _on_main_done(self, task: asyncio.Task[None]) -> None:
        self._is_done = True
        self.loop.stop()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run something whose error is the simulation's."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.loop.fail(error)

    def _where(self) -> str:
        texts = [f"struck {self.outcome.struck}"]
        for replica in self.replicas:
            beats = [(rank.name, rank.step_stats.heartbeat()) for rank in replica.group.ranks]
            ranks = [f"{who} {beat.phase.name} step {beat.step}" for who, beat in beats]
            name = f"{replica.pool} {replica.replica_id}"
            texts.append(f"{name} {replica.core.state}: {', '.join(ranks)}")
        return "; ".join(texts)

    # --- the story --------------------------------------------------------------------------------

    async def _main(self) -> None:
        schedule, serve = self.schedule, self.serve
        shapes = [shape for shape in schedule.groups for _ in range(shape.num_replicas)]
        await asyncio.gather(*map(serve.start_replica, shapes))
        while not all(
            ingress.directory._able(shape.pool)
            for ingress in self.ingresses
            for shape in schedule.groups
        ):
            await asyncio.sleep(POLL_S)  # until then an ingress answers with 503
        if schedule.scaling is not None:
            for shape in schedule.groups:
                serve.scale(shape, schedule.scaling)
        await asyncio.gather(*map(self._client, self.schedule.arrivals))
        num_extra = 0
        while self.outcome.num_steps < MIN_STEPS or (
            num_extra < MAX_EXTRA and (self._faults or serve.is_busy)
        ):
            arrivals = [self._extra(num_extra + i) for i in range(3)]
            num_extra += len(arrivals)
            await asyncio.gather(*map(self._client, arrivals))
            if self.fault is not None and self.fault.in_move and not serve.is_busy:
                self._drop(self.fault)  # nothing moved
            if any(replica.healthy_from > self.loop.now for replica in self.replicas):
                await asyncio.sleep(PACE_S)  # the next fault may be meant for that one
        self._faults, self.fault = [], None
        serve.end_scaling()
        while serve.is_busy:
            await asyncio.sleep(POLL_S)
        await asyncio.sleep(SETTLE_S)
        for replica in self.replicas:
            while replica.core.state != "ready" or self._fatal(replica.group):
                await asyncio.sleep(0.5)
        began = self.loop.now
        while self._is_busy() and self.loop.now < began + REST_S:
            await asyncio.sleep(0.5)
        for replica in self.replicas:
            self._check_rest(replica.group)
        for ingress in self.ingresses:
            ingress.close()
        await asyncio.gather(*(replica.core.stop() for replica in self.replicas))

    def _extra(self, i: int) -> Arrival:
        arrival = draw_arrival(self.rng, i, 8, has_aborts=False, is_long=self.serve.is_busy)
        return Arrival(f"x{i}", 0.0, arrival.prompt, arrival.max_tokens, arrival.stop, None)

    async def _client(self, arrival: Arrival) -> None:
        await asyncio.sleep(arrival.at)
        number = int(arrival.request_id[1:]) % len(self.ingresses)
        while not (ingress := self.ingresses[number]).directory.has_served:
            await asyncio.sleep(POLL_S)  # 503
        ingress.num_clients += 1
        self.outcome.num_requests += 1
        tokens: list[int] = []
        try:
            async with asyncio.timeout(arrival.abort_after_s):
                await self._consume(ingress, arrival, tokens)
        except TimeoutError:
            self.outcome.num_aborted += 1
            self.loop.after(ABORT_S, self._check_left, arrival.request_id)
        except NoLeader as error:
            self.outcome.num_refused += 1
            pool, *_ = str(error).split()
            if self.healthy_from(pool, ingress.weights) <= self.loop.now - MAX_PAUSE_S:
                raise Violation("given up", f"{arrival.request_id}: {error}") from error
        finally:
            ingress.num_clients -= 1

    async def _consume(self, ingress: SimIngress, arrival: Arrival, tokens: list[int]) -> None:
        request, reason = _request(arrival), ""
        wanted = continuation(request, VOCAB, MAX_MODEL_LEN, ingress.weights)
        self._progress_at[arrival.request_id] = self.loop.now
        async with aclosing(ingress.router.generate(request)) as outputs:
            async for output in outputs:
                self._progress_at[arrival.request_id] = self.loop.now
                self.board.num_first_tokens += not tokens and bool(output.token_ids)
                tokens += output.token_ids
                self._check_move(arrival.request_id, len(tokens))
                reason = output.finish_reason
                if tokens != wanted[: len(tokens)] or reason == "error":
                    text = f"wanted {wanted}, found {tokens} {reason} {output.error}"
                    raise Violation("tokens differ", f"{arrival.request_id}: {text}")
        is_stop = bool(wanted) and wanted[-1] in arrival.stop
        if tokens != wanted or reason != ("stop" if is_stop else "length"):
            text = f"wanted {wanted}, found {tokens} {reason}"
            raise Violation("tokens differ", f"{arrival.request_id}: {text}")

    def _check_left(self, request_id: str) -> None:
        """Assert that whoever may have some of a request is told that its client has left."""
        for connection in self._ways.get(request_id, []):
            [attempt] = [each for each in connection.ends if _request_of(each) == request_id][-1:]
            may_have = connection.ends[attempt] in ("", FinishReason.HANDOFF, *LOST_ENDS)
            goes_on = ("", *GOES_ON, *LOST_ENDS)
            if may_have and connection.is_open and attempt not in connection.aborted:
                ends = [each.ends.get(attempt) for each in self._ways[request_id]]
                if all(end in goes_on for end in ends):
                    text = f"{attempt} at {connection.rank.name}"
                    self.loop.fail(Violation("abort not sent", text))

    def _is_busy(self) -> bool:
        leaders = [leader for replica in self.replicas for leader in replica.group.leaders]
        return any(
            leader.scheduler.has_unfinished or not leader.switch.is_over for leader in leaders
        )

    def _check_rest(self, group: SimGroup) -> None:
        for leader in group.leaders:
            scheduler = leader.scheduler
            check_scheduler(scheduler)
            if not leader.switch.is_over or leader.switch.captured != GRAPHS:
                text = f"{leader.name}: at stage {leader.switch.stage}"
                raise Violation("not gone over", text)
            if scheduler.has_unfinished or scheduler.blocks.num_free_blocks != (
                self.schedule.num_blocks
            ):
                found = f"{scheduler.blocks.num_free_blocks} of {self.schedule.num_blocks} free"
                raise Violation("something is left", f"{leader.name}: {found}")
            leader.check_handoffs()

    # --- replicas ---------------------------------------------------------------------------------

    def replicas_of(self, pool: str) -> list[SimReplica]:
        return [replica for replica in self.replicas if replica.pool == pool]

    def target(self, fault: Fault) -> SimReplica | None:
        """Return the replica that a fault is meant for."""
        replicas = self.replicas_of(fault.pool)
        return replicas[fault.replica % len(replicas)] if replicas else None

    def on_trouble(self, until: float) -> None:
        """Something strikes that is over, and known everywhere, by then."""
        self._troubled_until = max(self._troubled_until, until + LEARN_S)

    def _is_quiet(self, since: float) -> bool:
        return self._troubled_until < since

    def has_room(self, connection: SimConnection) -> bool:
        """Return whether all that a leader runs fits into it at once."""
        connections = self.connections_to(connection.rank)
        running = [len(each.directory_leader._running) for each in connections]
        return sum(running) <= self.schedule.room

    def _check_move(self, request_id: str, num_tokens: int) -> None:
        """A request has so many tokens: assert that the first one since it left somewhere does not
        come long after that."""
        moved_at, num_before = self._moved.get(request_id, (inf, num_tokens))
        if num_tokens <= num_before:
            return
        del self._moved[request_id]
        if not self._is_quiet(moved_at):
            return
        took_s = self.loop.now - moved_at
        self.outcome.num_judged["moves"] += 1
        self.outcome.longest_move_s = max(self.outcome.longest_move_s, took_s)
        if took_s > MAX_PAUSE_S + self.schedule.read_s + 5 * self.schedule.step_s:
            raise Violation("too long a move", f"{request_id}: {took_s:.2f} s")

    def on_drained(self, replica: SimReplica) -> None:
        """Assert that a replica did not drain for long once there was another one."""
        since = max(replica.drains_from, self.healthy_from(*replica.kind))
        if replica in self._crowded or not self._is_quiet(since) or since == inf:
            return
        took_s = max(0.0, self.loop.now - since)
        self.outcome.num_judged["drains"] += 1
        self.outcome.longest_drain_s = max(self.outcome.longest_drain_s, took_s)
        # What is being read when it is told to leave has to be read once more.
        leaves_s = HEARD_S + self.schedule.prefill_s + 2 * self.schedule.read_s
        if took_s > leaves_s + EMPTY_S:
            text = f"{replica.pool} {replica.replica_id}: {took_s:.2f} s"
            raise Violation("too long a drain", text)

    # --- what connections tell --------------------------------------------------------------------

    def new_peer(self, connection: SimConnection) -> bytes:
        peer = b"%d" % len(self.connections)
        self.connections[peer] = connection
        return peer

    def leader_at(self, inbox: str) -> SimLeader:
        pool, replica, epoch, dp_rank = inbox.split("/")
        return self._groups[pool, int(replica), int(epoch)].leaders[int(dp_rank)]

    def connections_to(self, leader: SimLeader) -> list[SimConnection]:
        return [each for each in self.connections.values() if each.rank is leader]

    def on_close(self, connection: SimConnection) -> None:
        """The ingress closes a connection that it does not know to have ended."""
        group = connection.rank.group
        if connection.ingress.is_closed or group.replica.core.state == "stopping":
            return
        if (group.pool, group.replica.number, group.epoch + 1) not in self._groups:
            raise Violation("connection not kept", connection.rank.name)

    def on_submit(self, connection: SimConnection, attempt: str) -> None:
        request_id, replica = _request_of(attempt), connection.rank.group.replica
        if replica.shape.weights != connection.ingress.weights:
            raise Violation("sent to other weights", f"{attempt}: {connection.rank.name}")
        if self.schedule.routing == "cost":
            self._check_queue(connection, attempt)
        way = self._ways.setdefault(request_id, [])
        self._check_attempt(attempt, way)
        late_from = max(self._progress_at[request_id], self._lost_by(way))
        pause_s = max(0.0, self.loop.now - max(late_from, self.healthy_from(*replica.kind)))
        if self._num_deaths[request_id] >= SHARED_DEATHS:
            pause_s = 0.0  # it may have waited for another one's trial
        self.outcome.longest_pause_s = max(self.outcome.longest_pause_s, pause_s)
        if pause_s > MAX_PAUSE_S:
            raise Violation("too long a pause", f"{attempt}: {pause_s:.2f} s until {replica.pool}")
        if self.must_know(replica) and not self._is_last(replica):
            raise Violation("sent to one that drains", f"{attempt}: {connection.rank.name}")
        if attempt != self._attempts.get(request_id):
            way.clear()
            self._moved.pop(request_id, None)
        elif not self.has_room(connection):
            self._crowded.add(way[-1].rank.group.replica)
        if not self.has_room(connection):
            for each in self.connections_to(connection.rank):
                for crowded in each.directory_leader._running:
                    self._moved.pop(_request_of(crowded), None)
        way.append(connection)
        self._attempts[request_id] = attempt
        self._progress_at[request_id] = self.loop.now

    def _check_queue(self, connection: SimConnection, attempt: str) -> None:
        """Assert that a leader that has just got a request has, as far as its ingress knows, at
        most 1.5 times the mean queue of its pool, and a prompt."""
        leader, pool = connection.directory_leader, connection.rank.group.pool
        taken = leader.load.queued[attempt]
        able = connection.ingress.directory._able(pool)
        readers = [each for each in able if each.can_read(taken.stage)]
        offers = [each.offer(taken.stage) for each in readers or able]
        queues_s = [each.queued_tokens * min(each.token_s.values(), default=inf) for each in offers]
        token_s = min(leader.report.token_s.values(), default=inf)
        if token_s == inf or inf in queues_s or any(each.is_old for each in offers):
            return  # of some nothing was heard yet, or not lately
        if pool == "decode" and taken.stage.handoff is None:
            # Steps that only decode tell nothing of a prompt.
            num_tokens = min(taken.stage.num_tokens, self.schedule.budget)
            if any(max(each.token_s) < num_tokens.bit_length() for each in offers):
                return
        queue_s = leader.load.queued_tokens * token_s
        mean_s = (sum(queues_s) - taken.uncached_tokens * token_s) / len(queues_s)
        self.outcome.num_judged["queues"] += len(queues_s) > 1
        if queue_s > 1.5 * mean_s + taken.stage.num_tokens * token_s + 1e-9:
            text = f"{attempt}: {queue_s:.3f} s, {mean_s:.3f} s on average"
            raise Violation("too long a queue", f"{text}, at {connection.rank.name}")

    def _check_attempt(self, attempt: str, way: list[SimConnection]) -> None:
        """Assert that a request goes on under the same attempt until some of it is lost."""
        if not way:
            return
        last = self._attempts[_request_of(attempt)]
        end = way[-1].ends[last]
        if attempt == last:
            if end not in GOES_ON:
                raise Violation("goes on after a loss", f"{attempt}: {end}")
            return
        self.outcome.num_resubmitted += 1
        if end not in LOST_ENDS and all(connection.is_open for connection in way):
            raise Violation("begun again for nothing", f"{attempt}: {end}")

    def _is_last(self, replica: SimReplica) -> bool:
        """Return whether others have come in place of all with its weights, so that it takes what
        comes to the ingress that is replaced."""
        others = {each.pool for each in self.replicas if each.shape.weights > replica.shape.weights}
        pools = {shape.pool for shape in self.schedule.groups}
        return others == pools and self.healthy_from(*replica.kind) == inf

    def must_know(self, replica: SimReplica, late_s: float = 0.0) -> bool:
        """Return whether an ingress must have heard that a replica drains, so long ago."""
        known_by = max(replica.drains_from, self.board.trouble_until) + HEARD_S + late_s
        if replica.group.struck:  # a rank that is stopped holds a report up
            known_by += STATS_TIMEOUT_S
        return self.loop.now > known_by

    def on_leave(self, connection: SimConnection) -> None:
        """The ingress tells a leader to let go of what it runs."""
        replica = connection.rank.group.replica
        others = [each for each in self.replicas if each.kind == replica.kind]
        if all(self.must_know(each) for each in others if each is not replica):
            raise Violation("told to leave for nobody", connection.rank.name)
        if not self.has_room(connection):
            self._crowded.add(replica)

    def on_token(self, connection: SimConnection, output: EngineOutput) -> None:
        """A request has a token where it stays."""
        replica = connection.rank.group.replica
        since = max(replica.drains_from, replica.troubled_until, self.healthy_from(*replica.kind))
        late_s = STATS_TIMEOUT_S if replica.group.struck else 0.0
        if self.must_know(replica) and self.loop.now > since + HEARD_S + LEAVE_S + late_s:
            raise Violation("stays", f"{output.request_id} at {connection.rank.name}")

    def _lost_by(self, way: list[SimConnection]) -> float:
        """Return by when the ingress must know that an attempt is lost."""
        times = [connection.rank.group.found_by(connection.rank) for connection in way]
        # One that is cut ends with the next frame, and one that drained when it lets go of what
        # nobody could ask for, or had room for: a read waits till then.
        was_lost, crowded = self.calls_lost_until > 0.0, self._crowded
        at_ease = (
            each
            for each in way
            if each.is_cut
            or each.rank.group.replica in crowded
            or (was_lost and each.rank.group.replica.drains_from < inf)
        )
        times += [each.ended_at for each in at_ease if each.ended_at < inf]
        return max(times, default=0.0)

    def on_deaths(self, attempts: list[str]) -> None:
        self._num_deaths.update(map(_request_of, attempts))

    def on_stage_end(self, connection: SimConnection, output: EngineOutput) -> None:
        """An engine has said that a stage has ended, or that the KV for it is lost."""
        request_id, pool = _request_of(output.request_id), connection.rank.group.pool
        has_kv = output.finish_reason == FinishReason.HANDOFF
        if output.finish_reason == FinishReason.MOVED or (has_kv and pool != "prefill"):
            self.outcome.moves[pool] += 1
            self.outcome.num_moves_with_kv += has_kv
            num_tokens = output.position + len(output.token_ids)
            # Where all leave without KV at once, some are computed after others.
            if has_kv or not self._has_new_blocks:
                self._moved[request_id] = self.loop.now, num_tokens
        if output.finish_reason == FinishReason.KV_LOST:
            holder = self._ways[request_id][-2]
            self.outcome.num_lost_moves += holder.rank.group.pool == pool
            late_from = max(holder.ended_at, self._progress_at[request_id])
            healthy_from = self.healthy_from(*holder.rank.group.replica.kind)
            if self.loop.now - max(late_from, healthy_from) > MAX_PAUSE_S:
                text = f"{output.request_id}: {self.loop.now - late_from:.2f} s: {output.error}"
                raise Violation("waits for lost KV", text)
        self._progress_at[request_id] = self.loop.now

    def healthy_from(self, pool: str, weights: int) -> float:
        """Return since when a replica has been healthy."""
        found = [each.healthy_from for each in self.replicas if each.kind == (pool, weights)]
        return min(found, default=inf)

    # --- ways between processes -------------------------------------------------------------------

    def rank_at(self, address: str) -> SimRank:
        """Return the rank whose KV is read there, dead or alive."""
        *group, index = place_of(address)
        return self._groups[tuple(group)].ranks[index]  # type: ignore[index]

    def send_kv(self, sender: str, receiver: str, call: Callable[..., Any], *args: Any) -> bool:
        """Send something between a reader and a holder; return whether it is not lost."""
        at = self.arrival((sender, receiver), self.schedule.kv_delay_s)
        is_lost = self.loop.now < self.calls_lost_until
        if not is_lost:
            self.loop.at(at, call, *args)
        return not is_lost

    def lose_calls(self, duration_s: float) -> None:
        self.calls_lost_until = self.loop.now + duration_s
        # If a release is lost, its KV is held until then; if an answer is, its reader waits for it.
        self.on_trouble(self.calls_lost_until + max(self.schedule.lease_s, ANSWER_TIMEOUT_S))

    def arrival(self, way: Any, mean_s: float = 0.001, *, not_before: float = 0.0) -> float:
        """Return when a frame arrives; those between two do in order."""
        late_s = mean_s * min(-log(1.0 - self.rng.random()), LONGEST_DELAY)
        at = max(self.loop.now + late_s, not_before, self._arrives_at.get(way, 0.0))
        self._arrives_at[way] = at
        return at

    # --- what groups tell -------------------------------------------------------------------------

    def on_group(self, group: SimGroup) -> None:
        self._groups[group.pool, group.replica.number, group.epoch] = group

    def on_outputs(self, epoch: int, outputs: list[EngineOutput]) -> None:
        """A leader sends a step's outputs."""
        self._note(self.loop.now, epoch, sum(len(output.token_ids) for output in outputs))
        self.outcome.num_handoffs += sum(output.handoff is not None for output in outputs)

    def on_step(self, agreed: StepAgreement) -> None:
        self.outcome.num_steps += agreed.has_work
        self._note(self.loop.now, agreed.step, max(agreed.num_scheduled_tokens), agreed.epoch)

    def on_strike(self, fault: Fault) -> None:
        self._drop(fault)
        self.outcome.struck.append(fault.name)

    def _drop(self, fault: Fault) -> None:
        self._faults.remove(fault)
        self.fault = self._faults[0] if self._faults else None

    def on_group_end(self, group: SimGroup, reason: str) -> None:
        self.outcome.ends.append(reason)
        for leader in group.leaders:
            self.outcome.num_preemptions += leader.scheduler.stats().num_preemptions
        if group.replica.core.state == "stopping":
            return
        fatal = self._fatal(group)
        if not fatal:
            self.loop.fail(Violation("named without a fault", reason))
        elif not any(_is_named(fault, group.places, reason) for fault in fatal):
            where = [f"{fault.kind} of rank {fault.rank} {fault.phase.name}" for fault in fatal]
            self.loop.fail(Violation("wrong rank named", f"{reason}; struck {where}"))

    def _fatal(self, group: SimGroup) -> list[Fault]:
        return [fault for fault in group.struck if fault.kind in FATAL]

    def _note(self, *values: float) -> None:
        self.outcome.trace = hash((self.outcome.trace, *values))


def _is_named(fault: Fault, places: Sequence[RankPlace], reason: str) -> bool:
    """Tell whether a group's end is what a fault must look like, of any rank that it may name."""
    names = [f"rank dp={at.dp_rank} tp={at.tp_rank} epoch={at.epoch}" for at in places]
    is_rank_right = any(reason.startswith(names[i]) for i in _suspects(fault, len(places)))
    return is_rank_right and any(text in reason for text in NAMED[fault.kind])


def _suspects(fault: Fault, num_ranks: int) -> Iterable[int]:
    if fault.kind in LOST:
        return fault.rank, fault.peer
    if fault.kind == "altered plan":
        return (fault.peer,)
    # Nobody can tell who of a collective has not entered it, and of two votes which one is wrong.
    is_in_collective = fault.kind == "stall" and fault.phase is Phase.RUNNING
    return (
        range(num_ranks)
        if is_in_collective or fault.kind in ("told to stop", "diverge")
        else (fault.rank,)
    )


def _request_of(attempt: str) -> str:
    request_id, _, _ = attempt.rpartition(".")
    return request_id


def _request(arrival: Arrival) -> GenerateRequest:
    sampling = Sampling(0.0, 0, 1.0, 0.0, 0, arrival.max_tokens, arrival.stop, -1, -1, None, None)
    return GenerateRequest(arrival.request_id, arrival.prompt, [], sampling, b"")


@contextmanager
def _quiet() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("lockstep", "ray.serve")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
