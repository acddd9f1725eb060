"""A schedule: what happens in one simulation, drawn from a seed.

The same seed gives the same schedule on every machine; nothing here or in the simulation asks for a
clock, an address or the order of a set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from cluster.engine.watchdog import Phase

VOCAB = 97
MAX_MODEL_LEN = 64
LONGEST = 48
"""Tokens of a sequence, prompt and output."""
MAX_RANKS = 8
"""Of all replicas that a schedule starts with."""
MAX_SCALED_RANKS = 9
"""Of all replicas that there may be."""
MIN_STEPS = 40
"""Agreed steps with work; requests keep coming until there were as many."""
WATCHDOG_S = 4.0
SHORT_S = 1.5
"""Whoever stands still for less is named by neither clock."""
LONG_S = 4.5
"""A read whose calls are lost is given up after five seconds, and tried again when they are not."""
LOST = ("lost link", "lost frame")
LINK = ("held link", *LOST, "diverge", "altered plan")
"""What happens to frames between two ranks of a group: it strikes when `rank` sends to `peer`."""
FATAL = ("kill", "stop", "stall", "told to stop", "diverge", "altered plan", *LOST)
CONNECTION = ("cut", "partition")
"""What happens to the connection between the ingress and the rank's leader."""
BOARD = ("silent board", "late board", "new board")
DRAIN, DRAIN_ALL, ROLLOUT, NEW_BLOCKS, NEW_WEIGHTS = DRAINS = (
    "drain",
    "drain all",
    "rollout",
    "rollout of other blocks",
    "rollout of other weights",
)
"""Serve stops the rank's replica, or all of its pool at once, or replaces the whole application."""
ROLLOUTS = ROLLOUT, NEW_BLOCKS, NEW_WEIGHTS
HARMLESS = ("pause", "slow", "held link", *BOARD)
IN_STEP = ("kill", "stop", "stall", "told to stop", "pause", "slow", *CONNECTION, *BOARD, *DRAINS)
"""What strikes when a rank is in a phase of its step; some of it also while its KV is on the way.
"""
IN_TRANSFER = ("kill", "stop", "told to stop", "pause")
LOST_CALLS = "lost calls"
"""For a while no call for KV arrives: reads fail, and leases end."""
FAILED_START = "failed start"
"""A rank of the group that is rebuilt dies while it loads: only after what was fatal."""
MAX_LOSSES = 2
"""The router gives a request up at its third loss of KV."""
MAX_DEATHS = 3
"""Of the leaders of a request: two make it a suspect, and it fails at its second failed trial."""
LATE = ("stop", "stall", *LOST)
"""What takes the watchdog seconds: reads from such a rank fail before its group ends."""
PHASES = (Phase.PLANNING, Phase.BUILDING, Phase.RUNNING, Phase.BOOKING)
VOTE_FIELDS = ("num_tokens", "epoch", "step")
PLAN_FIELDS = ("token_ids", "num_computed", "rows", "step", "agreed", "digest")


@dataclass(frozen=True)
class Shape:
    """A pool's group: ranks are counted by data-parallel, then by tensor-parallel rank."""

    pool: str
    dp_size: int
    tp_size: int
    num_replicas: int = 1
    """With which it starts."""
    weights: int = 0
    """Of which model."""
    block_times: int = 1
    """A block has so many times the tokens that the schedule says."""

    @property
    def num_ranks(self) -> int:
        """Ranks in one group."""
        return self.dp_size * self.tp_size


ALONE = Shape("mixed", 1, 1)
MIXED = [ALONE, *(Shape("mixed", dp, tp) for dp, tp in [(2, 1)] * 3 + [(3, 1)] * 2 + [(4, 1)])]
MIXED += [Shape("mixed", dp, tp) for dp, tp in [(1, 2), (2, 2), (2, 2)]]
PREFILL_AND_DECODE = [
    [Shape("prefill", prefill_dp, tp), Shape("decode", decode_dp, tp)]
    for prefill_dp, decode_dp, tp in [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2)]
]


@dataclass(frozen=True)
class Fault:
    """Something goes wrong on one rank when it comes to `step` of its epoch, in `phase`."""

    kind: str
    pool: str
    replica: int
    """Among those that the pool has then, modulo their number."""
    rank: int
    step: int
    phase: Phase
    in_transfer: bool
    """It strikes when the rank next reads KV or lets it be read, and not in a phase."""
    in_move: bool
    """That is the next rank of the pool that does so for a request that leaves who drains."""
    delay_s: float
    """Between that and a signal, so that it strikes anywhere in a step."""
    duration_s: float
    peer: int
    """To whom the rank's frame is altered, lost or late."""
    field: str
    """What of it is altered."""
    grace_s: float
    """How long Serve lets a replica drain."""
    successor: str
    """Whether another replica starts `before` that, `after` it, or not at all."""

    @property
    def name(self) -> str:
        if self.in_move:
            return f"{self.kind} in a move"
        is_both = self.in_transfer and self.kind != LOST_CALLS
        return f"{self.kind} in a transfer" if is_both else self.kind


@dataclass(frozen=True)
class Arrival:
    request_id: str
    at: float
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    abort_after_s: float | None
    """None: the client stays to the end."""


@dataclass(frozen=True)
class Scaling:
    """How the production code scales each pool."""

    least: int
    most: int
    cool_down_s: float
    ttft_target_s: float
    tpot_target_s: float


@dataclass(frozen=True)
class Schedule:
    """One simulation. Invariant: faults strike one after the other, each at most once."""

    seed: int
    groups: list[Shape]
    """One mixed pool, or a prefill and a decode pool."""
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    is_caching: bool
    routing: str
    delay_s: float
    """What a frame between ranks takes on average."""
    kv_delay_s: float
    """What a call for KV or its answer takes on average."""
    lease_s: float
    max_wait_s: float
    """How long a request waits for a leader that can take it."""
    is_mapped: bool
    """Whether KV is read from shared memory, and not asked for in calls."""
    arrivals: list[Arrival]
    faults: list[Fault]
    compile_s: float | None
    """Until a rank has what was compiled while it serves, at most; None: it starts with it."""
    is_overlapped: bool
    """Whether a step is planned while the one before runs."""
    has_device: bool
    """Whether steps run beside the process that launches them, as with CUDA."""
    step_s: float
    """What a step computes for, beside what its messages take."""
    scaling: Scaling | None = None
    """None: as many replicas as there are at the start."""

    @property
    def num_ingresses(self) -> int:
        """Two in every third group of four seeds, which halve what else goes by the seed."""
        return 2 if self.seed // 4 % 3 == 0 else 1

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a sequence in a step, at most: in half of what is not overlapped."""
        return 0 if self.is_overlapped or self.seed % 2 else 1 + self.seed // 2 % 3

    @property
    def room(self) -> int:
        """How many requests fit into one leader, whatever they are."""
        per_sequence = -(-LONGEST // self.block_size)
        return min(self.max_num_seqs, max(0, self.num_blocks // per_sequence - 1))

    @property
    def prefill_s(self) -> float:
        """What steps take at most until all that runs in one leader has its first token."""
        num_steps = -(-LONGEST // self.budget) * self.max_num_seqs + 5
        return num_steps * (self.step_s + 0.03)

    @property
    def read_s(self) -> float:
        """What the longest read takes: its calls, each twice as long as on average."""
        num_calls = -(-LONGEST // self.block_size) // 2 + 2
        return 2 * num_calls * 2 * self.kv_delay_s

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups."""
        return sum(shape.num_ranks * shape.num_replicas for shape in self.groups)


def draw_schedule(seed: int) -> Schedule:
    rng = random.Random(seed)
    lease_s = rng.choice((0.3, 3.0))
    groups = _draw_groups(rng)
    block_size = rng.choice((2, 4, 8))
    per_sequence = -(-LONGEST // block_size)
    is_full = rng.random() < 0.4
    num_requests = rng.randint(8, 10)
    has_aborts = rng.random() < 0.4
    faults = _draw_faults(rng, groups, lease_s)
    # What runs when a replica drains should not have ended before it can leave.
    has_drains = any(fault.kind in DRAINS for fault in faults)
    schedule = Schedule(
        seed=seed,
        groups=groups,
        num_blocks=per_sequence + rng.randrange(3) if is_full else 5 * per_sequence,
        block_size=block_size,
        max_num_seqs=rng.choice((3, 4, 8)),
        budget=rng.choice((8, 12, 32)),
        is_caching=rng.random() < 0.5,
        routing=rng.choice(("cost", "round_robin", "least_requests", "least_tokens")),
        delay_s=rng.choice((0.00005, 0.0005, 0.005)),
        kv_delay_s=rng.choice((0.001, 0.03)),
        lease_s=lease_s,
        max_wait_s=rng.choice((1.0, 30.0, 30.0, 30.0)),
        is_mapped=rng.random() < 0.5,
        arrivals=[
            draw_arrival(rng, i, num_requests, has_aborts=has_aborts, is_long=has_drains)
            for i in range(num_requests)
        ],
        faults=faults,
        compile_s=rng.choice((None, 0.02, 0.3, 1.0)),
        is_overlapped=rng.random() < 0.5,
        has_device=rng.random() < 0.6,
        step_s=rng.choice((0.0, 0.03, 0.1, 0.1) if has_drains else (0.0, 0.0, 0.0, 0.03)),
    )
    schedule = _with_time_to_read(schedule)
    if has_drains:
        return _with_rollout(rng, schedule) if rng.random() < 0.3 else schedule
    return _with_scaling(rng, schedule) if rng.random() < 0.1 else schedule


def _with_time_to_read(schedule: Schedule) -> Schedule:
    """Let no lease end by long steps alone: a follower reads only steps after a handoff."""
    if schedule.groups[0].tp_size > 1 and schedule.step_s + 2 * schedule.kv_delay_s > 0.06:
        return replace(schedule, lease_s=3.0)
    return schedule


def _with_rollout(rng: random.Random, schedule: Schedule) -> Schedule:
    """Let the first replica that drains do so with all others of the application."""
    faults = list(schedule.faults)
    i = next(i for i, fault in enumerate(faults) if fault.kind in DRAINS)
    successor = "after" if faults[i].successor == "after" else "before"
    # Nothing moves to other weights, and no KV to other blocks.
    kind = ROLLOUT if any(fault.in_move for fault in faults) else rng.choice(ROLLOUTS)
    faults[i] = replace(faults[i], kind=kind, successor=successor)
    return replace(schedule, faults=faults)


def _with_scaling(rng: random.Random, schedule: Schedule) -> Schedule:
    """Scale all pools, with arrivals in bursts."""
    num_ranks = sum(shape.num_ranks for shape in schedule.groups)
    most = max(2, min(3, MAX_SCALED_RANKS // num_ranks))
    scaling = Scaling(
        least=1,
        most=most,
        cool_down_s=rng.choice((0.5, 1.0, 2.0)),
        ttft_target_s=rng.choice((0.1, 1.0)),
        tpot_target_s=rng.choice((0.02, 0.1)),
    )
    groups = [
        replace(shape, num_replicas=min(shape.num_replicas, most)) for shape in schedule.groups
    ]
    arrivals, at = list[Arrival](), 0.0
    for _ in range(rng.randint(2, 4)):
        for _ in range(rng.choice((2, 6, 8))):
            arrival = draw_arrival(rng, len(arrivals), 8, has_aborts=True, is_long=True)
            arrivals.append(replace(arrival, at=at + 0.1 * rng.random()))
        at += rng.choice((0.5, 2.0, 4.0))
    scaled = replace(
        schedule,
        groups=groups,
        arrivals=arrivals,
        scaling=scaling,
        step_s=rng.choice((0.03, 0.1)),
        # Whoever waits for a replica may do so for as long as one starts.
        max_wait_s=30.0,
    )
    return _with_time_to_read(scaled)


def _draw_groups(rng: random.Random) -> list[Shape]:
    """Return one mixed pool, or a prefill and a decode pool, with their replicas."""
    groups = [rng.choice(MIXED)] if rng.random() < 0.6 else rng.choice(PREFILL_AND_DECODE)
    if groups == [ALONE]:
        return [replace(ALONE, num_replicas=rng.choice((2, 3)))]
    while True:
        drawn = [replace(shape, num_replicas=rng.choice((1, 1, 2, 3))) for shape in groups]
        if sum(shape.num_ranks * shape.num_replicas for shape in drawn) <= MAX_RANKS:
            return drawn


def draw_arrival(
    rng: random.Random, i: int, num_requests: int, *, has_aborts: bool, is_long: bool
) -> Arrival:
    """Return the i-th request; some share the head of their prompt."""
    shared = [rng.randrange(4)] * rng.choice((0, 0, 8, 16))
    is_late = rng.random() < 0.2
    at = rng.random() * (1.0 if is_late else 0.1)
    prompt = shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 16))]
    return Arrival(
        request_id=f"r{i}",
        at=at,
        prompt=prompt,
        max_tokens=rng.randint(8, LONGEST - len(prompt)) if is_long else rng.randint(4, 16),
        stop=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3)))),
        abort_after_s=rng.random() * 0.5 if has_aborts and rng.random() < 0.4 else None,
    )


def _draw_faults(rng: random.Random, groups: list[Shape], lease_s: float) -> list[Fault]:
    is_mixed = len(groups) == 1
    fatal = FATAL if is_mixed else (*FATAL, *[LOST_CALLS] * 4)
    kinds = [rng.choice(fatal) for _ in range(rng.choice((0, 1, 1, 1, 2)))]
    others = (*CONNECTION, *[DRAIN] * 5, DRAIN_ALL)
    kinds += [rng.choice(others) for _ in range(rng.choice((0, 0, 1, 1, 2)))]
    has_reads = not is_mixed or DRAIN in kinds
    harmless = (*HARMLESS, "pause", "pause") if has_reads else HARMLESS
    kinds += [rng.choice(harmless) for _ in range(rng.choice((0, 0, 1, 2) if kinds else (1, 2)))]
    most = MAX_LOSSES if has_reads else MAX_DEATHS
    while sum(_num_losses(kind, has_reads, lease_s) for kind in kinds) > most:
        kinds.pop()
    rng.shuffle(kinds)
    faults = [
        _draw_fault(rng, kind, rng.choice(groups), has_reads=not is_mixed or DRAIN in kinds[:i])
        for i, kind in enumerate(kinds)
    ]
    drains = [i for i, kind in enumerate(kinds) if kind == DRAIN]
    kind = rng.choice((*IN_TRANSFER, LOST_CALLS))
    num_losses = sum(_num_losses(each, True, lease_s) for each in [*kinds, kind])
    if drains and num_losses <= MAX_LOSSES:
        i = rng.choice(drains)
        shape = next(shape for shape in groups if shape.pool == faults[i].pool)
        kinds.insert(i + 1, kind)
        faults.insert(i + 1, _draw_fault(rng, kind, shape, in_move=True))
    if (deadly := [i for i, kind in enumerate(kinds) if kind in FATAL]) and rng.random() < 0.2:
        i = rng.choice(deadly)
        pool = faults[i].pool
        shape = next(shape for shape in groups if shape.pool == pool)
        faults.insert(i + 1, _draw_fault(rng, FAILED_START, shape))
    return faults


def _num_losses(kind: str, has_reads: bool, lease_s: float) -> int:
    """Return how often a fault may lose one request."""
    if kind in ("slow", "held link", *BOARD):
        return 1 if has_reads and lease_s < 2 * SHORT_S else 0
    # Who is stopped is lost before its peers, which may get what it ran.
    return 2 if kind == "stop" or (kind in LATE and has_reads) else 1


def _draw_fault(
    rng: random.Random,
    kind: str,
    shape: Shape,
    *,
    has_reads: bool = False,
    in_move: bool = False,
) -> Fault:
    """Return a fault in one of a pool's replicas; has_reads: some rank has read KV by then."""
    rank, peer = rng.randrange(shape.num_ranks), -1
    in_transfer = kind == LOST_CALLS or in_move
    if kind in IN_TRANSFER and has_reads:
        in_transfer = rng.random() < 0.5
    longest_s = LONG_S if kind == LOST_CALLS else SHORT_S
    if kind in (*BOARD, "partition"):
        longest_s = 2 * SHORT_S
    fields = PLAN_FIELDS if kind == "altered plan" else VOTE_FIELDS
    if kind in LINK:
        if not (links := _links(kind, shape)):
            kind = "kill" if kind in FATAL else "slow"
            return _draw_fault(rng, kind, shape, has_reads=has_reads)
        rank, peer = rng.choice(links)
    return Fault(
        kind=kind,
        pool=shape.pool,
        replica=rng.randrange(shape.num_replicas),
        rank=rank,
        step=rng.randint(2, 6 if kind in DRAINS else 14),
        phase=rng.choice(PHASES),
        in_transfer=in_transfer,
        in_move=in_move,
        delay_s=rng.choice((0.0, 0.001, 0.02)) * rng.random(),
        duration_s=0.1 + (longest_s - 0.1) * rng.random(),
        peer=peer,
        field=rng.choice(fields),
        grace_s=rng.choice((0.5, 3.0, *[35.0] * 4)),
        successor=rng.choice(("before", "before", "before", "after", "none")),
    )


def _links(kind: str, shape: Shape) -> list[tuple[int, int]]:
    """Return sender and receiver of the links that such a fault may strike."""
    leaders = range(0, shape.num_ranks, shape.tp_size)
    votes = [(a, b) for a in leaders for b in leaders if a != b]
    plans = [(a, a + i) for a in leaders for i in range(1, shape.tp_size)]
    return {"diverge": votes, "altered plan": plans}.get(kind, votes + plans)
