"""Who gets the next request: pure functions of what is known of each leader."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.pools.chooser import (
    EXPECTED_OUTPUTS,
    MAX_QUEUE_TIMES,
    Chooser,
    Offer,
    Routing,
    Why,
    prefilled_on_decode,
    seconds_of,
)

# --- by turns, requests or tokens ---

# What comes: a request of so many tokens, or the end of one that runs.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 500)), st.tuples(st.just("end"), st.integers(0))
    ),
    max_size=60,
)
BY_LOAD: dict[Routing, Callable[[Offer], int]] = {
    Routing.ROUND_ROBIN: lambda offer: 0,
    Routing.LEAST_REQUESTS: lambda offer: offer.num_requests,
    Routing.LEAST_TOKENS: lambda offer: offer.num_tokens,
}


def idle(number: int) -> list[Offer]:
    return [Offer(f"mixed/{i}/0") for i in range(number)]


def added(offer: Offer, requests: int, tokens: int) -> Offer:
    num_requests, num_tokens = offer.num_requests + requests, offer.num_tokens + tokens
    return replace(offer, num_requests=num_requests, num_tokens=num_tokens)


@pytest.mark.feature("P08")
@given(st.sampled_from([*BY_LOAD]), st.integers(1, 5), EVENTS)
def test_a_request_goes_to_a_least_loaded_leader(
    routing: Routing, num_leaders: int, events: list[tuple[str, int]]
) -> None:
    chooser, offers, load = Chooser(routing), idle(num_leaders), BY_LOAD[routing]
    running: list[tuple[int, int]] = []
    for what, value in events:
        if what == "come":
            chosen = chooser.choose(offers, "r", value, 8).place
            assert load(offers[chosen]) == min(map(load, offers))
            offers[chosen] = added(offers[chosen], 1, value)
            running.append((chosen, value))
        elif running:
            ended, tokens = running.pop(value % len(running))
            offers[ended] = added(offers[ended], -1, -tokens)


@pytest.mark.feature("P08")
@pytest.mark.parametrize("routing", BY_LOAD)
def test_equal_leaders_take_turns_however_soon_requests_end(routing: Routing) -> None:
    chooser, offers = Chooser(routing), idle(3)
    chosen = [chooser.choose(offers, str(i), 10, 8).place for i in range(7)]
    assert chosen == [0, 1, 2, 0, 1, 2, 0]


# --- by cost ---

NUM_TOKENS = 400


@st.composite
def drawn_offers(draw: st.DrawFn) -> list[Offer]:
    sizes = st.dictionaries(st.integers(1, 12), st.floats(1e-6, 1.0), max_size=4)
    return [
        Offer(
            f"prefill/{i}/0",
            num_requests=draw(st.integers(0, 300)),
            queued_tokens=draw(st.integers(0, 100_000)),
            uncached_tokens=draw(st.integers(1, NUM_TOKENS)),
            token_s=draw(sizes),
            used_blocks=draw(st.integers(0, 1000)),
            missing_blocks=draw(st.integers(0, 100)),
        )
        for i in range(draw(st.integers(1, 6)))
    ]


OUTPUTS = st.integers(0, 1000)
NAMES = st.text(max_size=8)


def chosen_of(offers: list[Offer], name: str = "r", num_outputs: int = 0) -> Offer:
    return offers[Chooser(Routing.COST).choose(offers, name, NUM_TOKENS, num_outputs).place]


@pytest.mark.feature("P08")
@given(drawn_offers(), NAMES, OUTPUTS, st.randoms())
def test_the_order_of_leaders_changes_nothing(
    offers: list[Offer], name: str, num_outputs: int, rng: st.DrawFn
) -> None:
    chosen = chosen_of(offers, name, num_outputs)
    shuffled = [*offers]
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert chosen_of(shuffled, name, num_outputs) == chosen


@pytest.mark.feature("P08")
@given(drawn_offers(), NAMES, OUTPUTS)
def test_nobody_gets_a_request_beyond_the_bound(
    offers: list[Offer], name: str, num_outputs: int
) -> None:
    """With one speed for all, the bound is one of tokens."""
    offers = [replace(offer, token_s={9: 1e-3}) for offer in offers]
    chosen = chosen_of(offers, name, num_outputs)
    mean = sum(offer.queued_tokens for offer in offers) / len(offers)
    found = chosen.queued_tokens + chosen.uncached_tokens
    assert found <= (MAX_QUEUE_TIMES * mean + NUM_TOKENS) * (1 + 1e-9)


@pytest.mark.feature("P08")
@given(drawn_offers(), NAMES, st.integers(0, 10), st.integers(1, NUM_TOKENS))
def test_what_is_cached_makes_nobody_queue_beside_an_idle_leader(
    offers: list[Offer], name: str, num_queued: int, uncached: int
) -> None:
    """A leader that has all of a prompt gets so many of it as the bound lets wait there."""
    offers = [Offer(f"prefill/{i}/0", uncached_tokens=NUM_TOKENS) for i in range(len(offers) + 1)]
    queued = num_queued * NUM_TOKENS
    offers[0] = replace(offers[0], queued_tokens=queued, uncached_tokens=uncached)
    chosen = chosen_of(offers, name)
    if queued + uncached > MAX_QUEUE_TIMES * queued / len(offers) + NUM_TOKENS:
        assert not chosen.queued_tokens


@pytest.mark.feature("P08")
@given(drawn_offers(), NAMES, OUTPUTS, st.data())
def test_more_uncached_tokens_attract_no_request(
    offers: list[Offer], name: str, num_outputs: int, data: st.DataObject
) -> None:
    chosen = chosen_of(offers, name, num_outputs)
    i = data.draw(st.integers(0, len(offers) - 1))
    more = data.draw(st.integers(offers[i].uncached_tokens, NUM_TOKENS))
    changed = [*offers]
    changed[i] = replace(offers[i], uncached_tokens=more)
    if offers[i] != chosen:
        assert chosen_of(changed, name, num_outputs) != changed[i]


@pytest.mark.feature("P08")
@given(drawn_offers(), NAMES, OUTPUTS, st.data())
def test_a_longer_queue_attracts_no_prompt(
    offers: list[Offer], name: str, num_outputs: int, data: st.DataObject
) -> None:
    """Where the mean of all stays as it is, which the bound is of."""
    i = data.draw(st.integers(0, len(offers) - 1))
    chosen = chosen_of(offers, name, num_outputs)
    alike = [replace(offer, token_s={9: 1e-3}) for offer in offers]
    chosen = chosen_of(alike, name, num_outputs)
    k = alike.index(chosen)
    if i == k:
        return
    moved = data.draw(st.integers(0, chosen.queued_tokens))
    changed = [*alike]
    changed[k] = replace(chosen, queued_tokens=chosen.queued_tokens - moved)
    changed[i] = replace(alike[i], queued_tokens=alike[i].queued_tokens + moved)
    assert chosen_of(changed, name, num_outputs) != changed[i]


@pytest.mark.feature("P08")
def test_requests_that_find_the_same_everywhere_spread_by_their_ids() -> None:
    """Ingresses that know the same do not all choose the same leader."""
    found = Counter(chosen_of(idle(4), f"r{i}").engine_id for i in range(400))
    assert len(found) == 4 and min(found.values()) > 60, found


@pytest.mark.feature("P08")
def test_seconds_count_not_tokens() -> None:
    slow = Offer("mixed/slow/0", queued_tokens=1000, uncached_tokens=400, token_s={10: 2e-3})
    fast = Offer("mixed/fast/0", queued_tokens=1600, uncached_tokens=400, token_s={10: 1e-3})
    assert chosen_of([slow, fast]) == fast
    # One that was never measured is taken to be like the others.
    new = Offer("mixed/new/0", queued_tokens=1000, uncached_tokens=400)
    assert chosen_of([fast, new]) == new


@pytest.mark.feature("P08")
def test_decoding_goes_where_steps_are_short_and_blocks_are_free() -> None:
    step_s = {1: 0.010, 4: 0.0016, 6: 0.0010}  # 10 ms for one row, 19 for 12, 48 for 48
    busy = Offer("decode/busy/0", num_requests=20, token_s=step_s, used_blocks=100)
    light = Offer("decode/light/0", num_requests=12, token_s=step_s, used_blocks=100)
    assert chosen_of([busy, light], num_outputs=100) == light
    # To wait for blocks takes longer than the steps do.
    full = replace(light, missing_blocks=100)
    assert chosen_of([busy, full], num_outputs=100) == busy
    # What is cached is worth no more than it saves.
    far = replace(busy, uncached_tokens=1, token_s={**step_s, 10: 0.5e-3})
    near = replace(light, uncached_tokens=NUM_TOKENS, token_s={**step_s, 10: 0.5e-3})
    assert chosen_of([far, near], num_outputs=1) == far
    assert chosen_of([far, near], num_outputs=EXPECTED_OUTPUTS) == near


@pytest.mark.feature("P08")
def test_a_step_that_was_held_up_once_keeps_nobody_idle() -> None:
    held_up = Offer("decode/a/0", token_s={1: 5.0, 4: 0.0016})
    other = Offer("decode/b/0", num_requests=24, token_s={1: 0.010, 4: 0.0016})
    assert chosen_of([held_up, other], num_outputs=100) == held_up


# --- why ---


@pytest.mark.feature("P08")
def test_what_was_measured_long_ago_or_never_is_as_good_as_the_best_of_the_others() -> None:
    slow = Offer("decode/a/0", token_s={1: 0.5})
    best = Offer("decode/b/0", num_requests=3, token_s={1: 0.02, 3: 0.005})
    good = Offer("decode/c/0", num_requests=3, token_s={1: 0.03, 3: 0.008})

    def tried(*offers: Offer) -> bool:
        found = {chosen_of([*offers, best, good], f"r{i}", 100).engine_id for i in range(40)}
        assert best.engine_id in found and good.engine_id not in found
        return offers[0].engine_id in found

    assert not tried(slow)
    assert tried(replace(slow, is_old=True))
    assert tried(replace(slow, token_s={}))
    # Where nobody has run lately, there is nothing better to go by.
    everyone = [replace(offer, num_requests=0, is_old=True) for offer in (slow, best)]
    assert {chosen_of(everyone, f"r{i}", 100).engine_id for i in range(40)} == {best.engine_id}


@pytest.mark.feature("R19")
def test_a_choice_says_why_it_was_made() -> None:
    def why(*offers: Offer, routing: Routing = Routing.COST) -> Why:
        return Chooser(routing).choose(offers, "r", NUM_TOKENS, 0).why

    empty = Offer("prefill/a/0", uncached_tokens=NUM_TOKENS, token_s={9: 1e-3})
    other, busy = replace(empty, engine_id="b"), replace(empty, engine_id="c", queued_tokens=4000)
    cached = replace(empty, engine_id="d", uncached_tokens=100)
    assert why(cached) == Why.ONLY
    assert why(empty, other) == Why.EQUAL
    assert why(empty, other, busy) == Why.LOAD
    assert why(empty, busy, cached) == Why.PREFIX
    assert why(empty, replace(cached, queued_tokens=4000)) == Why.LOAD
    for routing in BY_LOAD:
        assert why(empty, other, routing=routing) == Why.EQUAL
    assert why(empty, replace(other, num_requests=1), routing=Routing.LEAST_REQUESTS) == Why.LOAD


# --- prompts that are computed where they decode ---

TOKEN_S = {1: 0.010, 9: 1e-4}  # a step of one row, and a prompt
TRANSFERS = st.floats(0.0, 2.0)


def decoding(**fields: int) -> Offer:
    known = {"num_requests": 0, "uncached_tokens": NUM_TOKENS} | fields
    return Offer("decode/d/0", token_s=TOKEN_S, num_beside=known["num_requests"], **known)  # type: ignore[arg-type]


def prefilling(**fields: int) -> Offer:
    return Offer(
        "prefill/p/0",
        token_s=TOKEN_S,
        **{"uncached_tokens": NUM_TOKENS} | fields,  # type: ignore[arg-type]
    )


def is_on_decode(
    prefill: Offer, decode: Offer, transfer_s: float | None, num_outputs: int = 100
) -> bool:
    found = prefilled_on_decode(
        [prefill],
        [decode],
        "r",
        NUM_TOKENS,
        num_outputs,
        transfer_s=transfer_s,
        max_step_tokens=512,
    )
    return found is not None


@st.composite
def drawn_pools(draw: st.DrawFn) -> tuple[Offer, Offer]:
    tokens, queued = st.integers(1, NUM_TOKENS), st.integers(0, 20_000)
    prefill = prefilling(queued_tokens=draw(queued), uncached_tokens=draw(tokens))
    decode = decoding(
        num_requests=draw(st.integers(0, 100)),
        queued_tokens=draw(queued),
        uncached_tokens=draw(tokens),
        used_blocks=draw(st.integers(0, 1000)),
        missing_blocks=draw(st.integers(0, 100)),
    )
    return prefill, decode


@pytest.mark.feature("R21")
@given(drawn_pools(), TRANSFERS)
def test_a_prompt_runs_where_it_decodes_if_that_costs_less(
    offers: tuple[Offer, Offer], transfer_s: float
) -> None:
    """What both ways cost alike is left out: what is queued there, and the steps after the next."""
    prefill, decode = offers
    token_s, step_s = min(TOKEN_S.values()), seconds_of(TOKEN_S, decode.num_requests + 1)
    assert step_s is not None
    computed_s = decode.uncached_tokens * token_s
    there_s = computed_s + decode.num_beside * computed_s + step_s
    elsewhere_s = (prefill.queued_tokens + prefill.uncached_tokens + 1) * token_s + transfer_s
    if abs(there_s - elsewhere_s) > 1e-9:
        assert is_on_decode(prefill, decode, transfer_s) == (there_s < elsewhere_s)


@pytest.mark.feature("R21")
def test_short_prompts_run_on_idle_decode_leaders_and_long_ones_where_nobody_waits_for_them() -> (
    None
):
    transfer_s = 0.03
    short, long = {"uncached_tokens": 20}, {"uncached_tokens": NUM_TOKENS}
    assert is_on_decode(prefilling(**short), decoding(**short), transfer_s)
    assert is_on_decode(prefilling(**long), decoding(**long), transfer_s)  # it disturbs nobody
    assert is_on_decode(prefilling(**short), decoding(num_requests=4, **short), transfer_s)
    assert not is_on_decode(prefilling(**long), decoding(num_requests=4, **long), transfer_s)
    queue = {"queued_tokens": 10_000}  # a second
    assert is_on_decode(prefilling(**long, **queue), decoding(num_requests=4, **long), transfer_s)
    # Cached where it decodes, as an answer is that a chat goes on from.
    assert is_on_decode(prefilling(**long), decoding(num_requests=4, **short), transfer_s)


@pytest.mark.feature("R21")
@given(drawn_pools(), TRANSFERS)
def test_what_is_not_known_or_not_handed_over_keeps_to_the_prefill_pool(
    offers: tuple[Offer, Offer], transfer_s: float
) -> None:
    assert not is_on_decode(*offers, None)
    assert not is_on_decode(*offers, transfer_s, num_outputs=1)
    fields = {"transfer_s": None, "max_step_tokens": 512}
    prefill, decode = offers
    assert prefilled_on_decode([prefill], [], "r", NUM_TOKENS, 9, **fields) is None  # type: ignore[arg-type]
    found = prefilled_on_decode([], [decode], "r", NUM_TOKENS, 9, **fields)  # type: ignore[arg-type]
    assert found == (0, Why.ON_DECODE)


@pytest.mark.feature("R21")
def test_a_decode_leader_that_has_computed_no_prompts_is_taken_to_be_like_the_others() -> None:
    """The tokens of its small steps take long."""
    new = replace(decoding(uncached_tokens=200), token_s={1: 0.010, 4: 0.0016})
    assert is_on_decode(prefilling(uncached_tokens=200), new, 0.03)
    slow = replace(new, token_s={**new.token_s, 8: 0.0012})
    assert not is_on_decode(prefilling(uncached_tokens=200), slow, 0.03)
