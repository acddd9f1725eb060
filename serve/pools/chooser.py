"""Which leader of a pool gets a request: a choice among all leaders of all replicas.

`least_cost` counts in seconds. It takes what is known of each leader as it is given, asks nobody
and remembers nothing, so the same `Offer`s in any order have the same one chosen. The other ways
let equal leaders take turns, so that a burst of short requests, each of which has ended before the
next one comes, does not always meet the same leader.

`prefilled_on_decode` compares with that, in the same seconds, what it costs to compute a prompt
where it decodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from itertools import pairwise
from typing import NamedTuple

MAX_QUEUE_TIMES = 1.5
"""A leader's queue may be this many times the mean one, and one prompt more: those that share a
prefix would all wait where it is cached, beside idle leaders."""
TIE = 1.1
"""Costs that differ by no more than measured seconds do from one step to the next are equal."""
EXPECTED_OUTPUTS = 64
"""Tokens that a request gets, as far as it matters here. Nobody knows, and most say a limit that
they never reach; short answers cost little wherever they are decoded."""


class Routing(Enum):
    """How the next leader is chosen."""

    COST = "cost"
    """The fewest seconds until the request has its tokens, see `least_cost`."""
    ROUND_ROBIN = "round_robin"
    """Leaders take turns, whatever they have to do."""
    LEAST_REQUESTS = "least_requests"
    """The fewest requests that have not ended."""
    LEAST_TOKENS = "least_tokens"
    """The fewest tokens in the requests of this ingress that have not ended, as they came."""


class Why(StrEnum):
    """Why a leader was chosen, for those who look at it."""

    ONLY = "only"
    """No other one could take the request."""
    PREFIX = "prefix"
    """More of the prompt is cached there than elsewhere."""
    LOAD = "load"
    """It has less to do than others, or does it sooner."""
    EQUAL = "equal"
    """All are equal: they take turns, or the request's id decides."""
    ON_DECODE = "on_decode"
    """It decodes, and computes the prompt sooner than a prefill engine would hand it over."""


class ChosenOffer(NamedTuple):
    place: int
    """Among the offers."""
    why: Why


@dataclass(frozen=True)
class Offer:
    """What is known of one leader, and of one request there."""

    engine_id: str
    num_requests: int = 0
    """Those that have not ended, of other ingresses as well."""
    num_tokens: int = 0
    """In those of this ingress, as they came."""
    queued_tokens: int = 0
    """To be computed before any of the request's are."""
    uncached_tokens: int = 1
    """Of the request, all or fewer: they must be computed there."""
    token_s: Mapping[int, float] = field(default_factory=dict)
    """Seconds that a token takes, by the number of binary digits of its step's tokens; sizes that
    were never measured are missing."""
    used_blocks: int = 0
    missing_blocks: int = 0
    """Of those that the request needs at once, so many are not free."""
    num_beside: int = 0
    """Sequences that get no token while a prompt is computed there: those of all engines that step
    together."""
    is_old: bool = False
    """Whether `token_s` is from before a long time with nothing to do."""


class Chooser:
    """Chooses for one pool."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self._turn = 0

    def choose(
        self, offers: Sequence[Offer], request_id: str, num_tokens: int, num_outputs: int
    ) -> ChosenOffer:
        """Return which one; there is at least one. The request has so many tokens, and gets at most
        so many there."""
        if self.routing is Routing.COST:
            return least_cost(offers, request_id, num_tokens, num_outputs)
        start = self._turn % len(offers)
        self._turn += 1
        in_turn: list[int] = [*range(start, len(offers)), *range(start)]
        loads = [self._load(offer) for offer in offers]
        chosen = min(in_turn, key=loads.__getitem__)  # the first of equal ones
        return ChosenOffer(chosen, _why(offers, len(set(loads)) == 1))

    def _load(self, offer: Offer) -> int:
        match self.routing:
            case Routing.LEAST_REQUESTS:
                return offer.num_requests
            case Routing.LEAST_TOKENS:
                return offer.num_tokens
            case _:
                return 0


def least_cost(
    offers: Sequence[Offer], request_id: str, num_tokens: int, num_outputs: int
) -> ChosenOffer:
    """Return the leader where a request of so many tokens costs the fewest seconds: to work off
    what is queued and its own uncached tokens, to wait until sequences that decode have freed its
    blocks, and to decode `num_outputs` tokens, but at most `EXPECTED_OUTPUTS`, in steps of one row
    more.

    Only leaders whose queue is at most `MAX_QUEUE_TIMES` the mean one and one prompt with it are
    candidates; the one with the shortest queue always is. Of equal ones the request's id decides:
    ingresses that know the same would all take the first.
    """
    num_steps = min(num_outputs, EXPECTED_OUTPUTS)
    costs = _costs(offers, num_tokens, num_steps, _prompt_s(offers))
    equal = _equal(costs)
    chosen = _drawn(offers, equal, request_id)
    uncached = [offer.uncached_tokens for offer in offers]
    if len(offers) > 1 and min(uncached) == uncached[chosen] < max(uncached):
        return ChosenOffer(chosen, Why.PREFIX)
    return ChosenOffer(chosen, _why(offers, len(equal) == len(offers)))


def prefilled_on_decode(
    prefill: Sequence[Offer],
    decode: Sequence[Offer],
    request_id: str,
    num_tokens: int,
    num_outputs: int,
    *,
    transfer_s: float | None,
    max_step_tokens: int,
) -> ChosenOffer | None:
    """Return which of the decode leaders is to compute the request's prompt; None for none. One is
    if that costs fewer seconds than the prefill pool, the transfer and decoding after that. Beside
    the request's own, those count that its prompt takes from the sequences that decode there.

    transfer_s: from the handoff to the next token; None until one was timed, for which a prompt has
    to go to the prefill pool. max_step_tokens: of a decode engine.
    """
    num_steps = min(num_outputs, EXPECTED_OUTPUTS)
    if not decode or (prefill and (transfer_s is None or num_steps <= 1)):
        return None  # what has all its tokens from its prefill is not handed over
    prefill_s = _prompt_s(prefill)
    # Its steps are small until it has computed prompts.
    measured_s = [
        min(offer.token_s.values())
        if _has_run(offer, min(offer.uncached_tokens, max_step_tokens))
        else None
        for offer in decode
    ]
    mean_s = sum(prefill_s) / len(prefill_s) if prefill else 1.0
    prompt_s = _expected(decode, measured_s, mean_s)
    there = {
        i: cost + decode[i].num_beside * decode[i].uncached_tokens * prompt_s[i]
        for i, cost in _costs(decode, num_tokens, num_steps, prompt_s).items()
    }
    if prefill and transfer_s is not None:
        handed_over = [replace(offer, uncached_tokens=1) for offer in decode]
        elsewhere_s = min(_costs(prefill, num_tokens, 0, prefill_s).values()) + transfer_s
        elsewhere_s += min(_costs(handed_over, num_tokens, num_steps - 1, prompt_s).values())
        there = {i: cost for i, cost in there.items() if cost < elsewhere_s}
    return ChosenOffer(_drawn(decode, _equal(there), request_id), Why.ON_DECODE) if there else None


def _costs(
    offers: Sequence[Offer], num_tokens: int, num_steps: int, prompt_s: Sequence[float]
) -> dict[int, float]:
    """Return the seconds that a request costs at each leader that is a candidate."""
    measured_s = [seconds_of(offer.token_s, offer.num_requests + 1) for offer in offers]
    step_s = _expected(offers, measured_s, max(prompt_s))
    queue_s = [
        (offer.queued_tokens + offer.uncached_tokens) * token_s
        for offer, token_s in zip(offers, prompt_s, strict=True)
    ]
    mean_s = sum(
        offer.queued_tokens * token_s for offer, token_s in zip(offers, prompt_s, strict=True)
    ) / len(offers)
    costs: dict[int, float] = {}
    for i, offer in enumerate(offers):
        if queue_s[i] > MAX_QUEUE_TIMES * mean_s + num_tokens * prompt_s[i]:
            continue
        costs[i] = queue_s[i]
        if num_steps:  # else blocks become free as the queue is worked off
            share = offer.missing_blocks / max(offer.used_blocks, offer.missing_blocks, 1)
            costs[i] += step_s[i] * (num_steps + EXPECTED_OUTPUTS * share)
    return costs


def _equal(costs: Mapping[int, float]) -> list[int]:
    most = TIE * min(costs.values())
    return [i for i, cost in costs.items() if cost <= most]


def _drawn(offers: Sequence[Offer], equal: Sequence[int], request_id: str) -> int:
    return max(equal, key=lambda i: _rank(request_id, offers[i].engine_id))


def _why(offers: Sequence[Offer], are_equal: bool) -> Why:
    if len(offers) == 1:
        return Why.ONLY
    return Why.EQUAL if are_equal else Why.LOAD


def _prompt_s(offers: Sequence[Offer]) -> list[float]:
    """Return how long a token of a prompt takes at each leader: as in its best steps."""
    return _expected(offers, [min(offer.token_s.values(), default=None) for offer in offers], 1.0)


def _has_run(offer: Offer, num_tokens: int) -> bool:
    """Return whether a leader has run a step of about so many tokens."""
    return max(offer.token_s, default=0) >= num_tokens.bit_length()


def _expected(
    offers: Sequence[Offer], measured: Sequence[float | None], default: float
) -> list[float]:
    """Return what was measured at each leader. Where nothing was yet, a leader is taken to be like
    the best of the others, and where it was long ago to be no worse: one that was held up when it
    last ran would not be tried again as long as others have room."""
    known = [seconds for seconds in measured if seconds is not None]
    lately = [
        seconds
        for offer, seconds in zip(offers, measured, strict=True)
        if seconds is not None and not offer.is_old
    ]
    best = min(lately or known, default=default)
    return [
        best if seconds is None else min(seconds, best) if offer.is_old and lately else seconds
        for offer, seconds in zip(offers, measured, strict=True)
    ]


def seconds_of(token_s: Mapping[int, float], num_rows: int) -> float | None:
    """Return how long so many rows or tokens take, between what was measured of fewer and of more;
    None if nothing of so few was."""
    sizes = sorted(token_s)
    if not sizes or sizes[0] > num_rows.bit_length() + 1:
        return None
    points: list[tuple[float, float]] = []
    most_s = float("inf")
    for size in reversed(sizes):
        # As of most tokens that have so many digits. A larger one is no faster: the smaller one
        # was held up when it was measured.
        tokens = max(1.0, 0.75 * (1 << size))
        most_s = min(most_s, token_s[size] * tokens)
        points.append((tokens, most_s))
    points.reverse()
    if num_rows <= points[0][0]:
        return points[0][1]
    for (fewer, fewer_s), (more, more_s) in pairwise(points):
        if num_rows <= more:
            return fewer_s + (more_s - fewer_s) * (num_rows - fewer) / (more - fewer)
    return points[-1][1] * num_rows / points[-1][0]


def _rank(request_id: str, engine_id: str) -> bytes:
    """Rendezvous hashing (Thaler and Ravishankar, 1996): who else is equal changes nothing."""
    return hashlib.blake2b(f"{request_id}\0{engine_id}".encode(), digest_size=8).digest()
