"""A schedule: what happens in one simulation, drawn from a seed.

The one thing to know: the same seed gives the same schedule on every machine; nothing here or in
the simulation asks for a clock, an address or the order of a set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from cluster.engine.watchdog import Phase

VOCAB = 97
LONGEST = 48
"""Tokens of a sequence, prompt and output."""
MIN_STEPS = 40
"""Agreed steps with work; requests keep coming until there were as many."""
WATCHDOG_S = 4.0
SHORT_S = 1.5
"""Whoever stands still for less is named by neither clock."""
FATAL = ("kill", "stop", "stall", "diverge", "drain")
HARMLESS = ("pause", "slow", "held link")
FAILED_START = "failed start"
"""A rank of the group that is rebuilt dies while it loads: only after what was fatal."""
MAX_FATAL = 2
"""The router gives a request up at its third loss."""
PHASES = (Phase.PLANNING, Phase.BUILDING, Phase.RUNNING, Phase.BOOKING)


@dataclass(frozen=True)
class Fault:
    """Something goes wrong on one rank when it comes to `step` of its epoch, in `phase`."""

    kind: str
    rank: int
    step: int
    phase: Phase
    delay_s: float
    """Between that and a signal, so that it strikes anywhere in a step."""
    duration_s: float
    peer: int
    """To whom a rank's vote is altered, or its link is held."""
    vote_field: str


@dataclass(frozen=True)
class Arrival:
    """One client's request."""

    request_id: str
    at: float
    prompt: list[int]
    max_tokens: int
    stop: tuple[int, ...]
    abort_after_s: float | None
    """None: the client stays to the end."""


@dataclass(frozen=True)
class Schedule:
    """One simulation. Invariant: faults strike one after the other, each at most once."""

    seed: int
    num_ranks: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    budget: int
    is_caching: bool
    routing: str
    delay_s: float
    """What a frame between leaders takes on average."""
    arrivals: list[Arrival]
    faults: list[Fault]
    features: list[str] = field(default_factory=list)
    """What of it the report counts."""


def draw_schedule(seed: int) -> Schedule:
    """Return the schedule of a seed."""
    rng = random.Random(seed)
    num_ranks = rng.choice((2, 2, 2, 3, 3, 4))
    block_size = rng.choice((2, 4, 8))
    per_sequence = -(-LONGEST // block_size)
    is_full = rng.random() < 0.4
    num_blocks = per_sequence + rng.randrange(3) if is_full else 5 * per_sequence
    num_requests = rng.randint(8, 10)
    has_aborts = rng.random() < 0.4
    arrivals = [draw_arrival(rng, i, num_requests, has_aborts) for i in range(num_requests)]
    faults = _draw_faults(rng, num_ranks)
    features = ["full pool"] * is_full + ["aborts"] * any(
        arrival.abort_after_s is not None for arrival in arrivals
    )
    return Schedule(
        seed=seed,
        num_ranks=num_ranks,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=rng.choice((3, 4, 8)),
        budget=rng.choice((8, 12, 32)),
        is_caching=rng.random() < 0.5,
        routing=rng.choice(("round_robin", "least_requests", "least_tokens")),
        delay_s=rng.choice((0.00005, 0.0005, 0.005)),
        arrivals=arrivals,
        faults=faults,
        features=features + [fault.kind for fault in faults],
    )


def draw_arrival(rng: random.Random, i: int, num_requests: int, has_aborts: bool) -> Arrival:
    """Return the i-th request; some share the head of their prompt."""
    shared = [rng.randrange(4)] * rng.choice((0, 0, 8, 16))
    is_late = rng.random() < 0.2
    return Arrival(
        request_id=f"r{i}",
        at=rng.random() * (1.0 if is_late else 0.1),
        prompt=shared + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 16))],
        max_tokens=rng.randint(4, 16),
        stop=tuple(rng.sample(range(VOCAB), rng.choice((0, 0, 3)))),
        abort_after_s=rng.random() * 0.5 if has_aborts and rng.random() < 0.4 else None,
    )


def _draw_faults(rng: random.Random, num_ranks: int) -> list[Fault]:
    num_fatal = rng.choice((0, 1, 1, 1, MAX_FATAL))
    num_harmless = rng.choice((0, 0, 1, 2)) if num_fatal else rng.choice((1, 2))
    kinds = [rng.choice(FATAL) for _ in range(num_fatal)]
    kinds += [rng.choice(HARMLESS) for _ in range(num_harmless)]
    rng.shuffle(kinds)
    if (fatal := [i for i, kind in enumerate(kinds) if kind in FATAL]) and rng.random() < 0.2:
        kinds.insert(rng.choice(fatal) + 1, FAILED_START)
    return [_draw_fault(rng, kind, num_ranks) for kind in kinds]


def _draw_fault(rng: random.Random, kind: str, num_ranks: int) -> Fault:
    rank, peer = rng.sample(range(num_ranks), 2)
    return Fault(
        kind=kind,
        rank=rank,
        step=rng.randint(2, 14),
        phase=rng.choice(PHASES),
        delay_s=rng.choice((0.0, 0.001, 0.02)) * rng.random(),
        duration_s=0.1 + (SHORT_S - 0.1) * rng.random(),
        peer=peer,
        vote_field=rng.choice(("num_tokens", "epoch", "step")),
    )
