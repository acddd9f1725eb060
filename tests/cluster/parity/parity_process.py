"""A rank of a group as a process of its own, which plays one rank after another.

1. Its owner tells it, in pickles, a configuration and a place in a group. A leader answers with its
   endpoints; all are told where to meet, load, and answer with their inbox.
2. While the rank runs, the owner may ask for its `Report`, or have it lose handoffs.
3. It is told to end, runs to its end, and answers with its last report. Then it is free.
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from local_ranks import CREDENTIALS, REPLICA

from cluster.config import EngineConfig
from cluster.engine.drafter import Drafter
from cluster.engine.sequence import Sequence
from cluster.group.context import RankContext, RankPlace, RankStats
from cluster.group.rendezvous import LeaderEndpoints
from cluster.rank.follower import Follower
from cluster.rank.leader import Leader
from cluster.rank.mtp import MTPForward
from compile.counters import counter
from compile.dispatch import BatchDescriptor, CapturedGraphs
from compile.graphs.capture import unseal

EPOCH = 5
LOSE, REPORT, END = "lose", "report", "end"


@dataclass(frozen=True)
class Report:
    """What a rank has done."""

    stats: RankStats
    log: list[dict[str, Any]]
    """The agreements that it ran."""
    replays: dict[BatchDescriptor, int]
    """Of full graphs, those that were replayed."""
    draft_replays: tuple[dict[BatchDescriptor, int], dict[BatchDescriptor, int]]
    """Of the MTP layer's graphs, those of steps, and those of further drafts."""
    piecewise_steps: int
    captured: CapturedGraphs
    num_late: int
    """Compilations and captures after the rank was ready."""
    block_bytes: int
    lost: list[str]
    """Attempts of requests whose handoffs it was made to lose."""
    drafts: list[tuple[list[int], list[int]]]
    """What it drafted, each behind all tokens of a sequence."""


def replayed(times: Mapping[BatchDescriptor, int]) -> dict[BatchDescriptor, int]:
    return {key: num for key, num in times.items() if num}


def draft_replays(
    mtp: MTPForward | None,
) -> tuple[dict[BatchDescriptor, int], dict[BatchDescriptor, int]]:
    """Return how often each graph of steps and of further drafts was replayed."""
    if mtp is None:
        return {}, {}
    steps, further = mtp.num_replays
    return replayed(steps), replayed(further)


def num_late() -> int:
    """Return the compilations and captures of this process while it was sealed."""
    return counter.num_late_compilations + counter.num_late_captures


def report(rank: Leader | Follower, lost: list[str], num_late_before: int) -> Report:
    """Return what a rank has done since it was made, when `num_late()` was `num_late_before`."""
    forward = rank.runner.forward
    return Report(
        rank.stats(),
        rank.runner.step_stats.as_dicts(),
        replayed(forward.num_replays),
        draft_replays(forward.mtp),
        forward.num_piecewise_steps,
        forward.captured,
        num_late() - num_late_before,
        rank.runner.kv_spec.block_bytes,
        lost,
        drafts_of(rank),
    )


class RecordedDrafts:
    """A drafter, and what it drafted."""

    def __init__(self, drafter: Drafter) -> None:
        self.most, self._drafter = drafter.most, drafter
        self.drafts: list[tuple[list[int], list[int]]] = []

    def propose(self, seq: Sequence, most: int) -> list[int]:
        draft = self._drafter.propose(seq, most)
        self.drafts.append((list(seq.token_ids), draft))
        return draft


def record_drafts(leader: Leader) -> Leader:
    scheduler = leader.engine.scheduler
    if scheduler._drafter is not None:
        scheduler._drafter = RecordedDrafts(scheduler._drafter)
    return leader


def drafts_of(rank: Leader | Follower) -> list[tuple[list[int], list[int]]]:
    recorded = rank.engine.scheduler._drafter if isinstance(rank, Leader) else None
    return recorded.drafts if isinstance(recorded, RecordedDrafts) else []


def lose_first_handoffs(rank: Leader | Follower, lost: list[str]) -> None:
    """Let a prefill rank forget the handoff of each request's first attempt, and note whose."""
    # Under the server's lock: a reader that is early must not release the handoff in between.
    holder = rank.transfer.server._holder
    real_hold = holder.hold

    def hold_and_lose(request_id: str, blocks: list[int], generations: list[int]) -> int:
        handoff_id = real_hold(request_id, blocks, generations)
        if request_id.endswith(".0"):
            lost.append(request_id)
            holder.drop(handoff_id)
        return handoff_id

    holder.hold = hold_and_lose  # type: ignore[method-assign]


def tell(what: Any) -> None:
    pickle.dump(what, sys.stdout.buffer)
    sys.stdout.flush()


def hear() -> Any:
    return pickle.load(sys.stdin.buffer)


def context_of(config: EngineConfig, dp_rank: int, tp_rank: int) -> RankContext:
    engine_id = f"{config.role.value}/{REPLICA}/{dp_rank}"
    place = RankPlace(dp_rank, tp_rank, EPOCH)
    return RankContext(config, place, credentials=CREDENTIALS, engine_id=engine_id)


def load(config: EngineConfig, dp_rank: int, tp_rank: int) -> Leader | Follower:
    context = context_of(config, dp_rank, tp_rank)
    if tp_rank:
        return Follower(context, hear())
    endpoints = LeaderEndpoints(context)
    tell(endpoints.rendezvous)
    return record_drafts(Leader(context, endpoints, hear()))


def obey(rank: Leader | Follower, lost: list[str], num_late_before: int) -> None:
    """Do what the owner asks for until the end; a follower's is its leader's."""
    while (asked := hear()) != END:
        if asked == LOSE:
            lose_first_handoffs(rank, lost)
        tell(report(rank, lost, num_late_before))
    if isinstance(rank, Leader):
        rank.stop()


def main() -> None:
    while (told := hear()) is not None:
        num_late_before = num_late()
        rank, lost = load(*told), list[str]()
        tell(getattr(rank, "inbox", ""))
        obeying = threading.Thread(target=obey, args=(rank, lost, num_late_before), daemon=True)
        obeying.start()
        rank.run()
        obeying.join()
        tell(report(rank, lost, num_late_before))
        unseal()
