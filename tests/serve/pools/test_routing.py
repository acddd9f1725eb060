"""Requests spread over data-parallel ranks: balanced, and equal ranks take turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.config import deploy_config
from serve.pools.routing import LeaderRouter, Routing

# What comes: a request of so many tokens, or the end of one that runs.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("come"), st.integers(1, 500)), st.tuples(st.just("end"), st.integers(0))
    ),
    max_size=60,
)


@pytest.mark.feature("P08")
@given(st.sampled_from(Routing), st.integers(1, 5), EVENTS)
def test_a_request_goes_to_a_least_loaded_rank_and_equal_ones_take_turns(
    routing: Routing, num_leaders: int, events: list[tuple[str, int]]
) -> None:
    router = LeaderRouter(routing, num_leaders)
    running: list[tuple[int, int]] = []
    last = num_leaders - 1
    for what, value in events:
        if what == "come":
            loads = [0] * num_leaders
            for leader, tokens in running:
                cost = {"round_robin": 0, "least_requests": 1, "least_tokens": tokens}
                loads[leader] += cost[routing.value]
            chosen = router.take(value)
            assert loads[chosen] == min(loads)
            # Whoever is passed over between the last one and this one had more to do.
            for i in range(1, (chosen - last - 1) % num_leaders + 1):
                assert loads[(last + i) % num_leaders] > loads[chosen]
            running.append((chosen, value))
            last = chosen
        elif running:
            router.give_back(*running.pop(value % len(running)))
    for leader, tokens in running:
        router.give_back(leader, tokens)
    assert router.loads == [0] * num_leaders


@pytest.mark.feature("P08")
def test_each_pool_has_a_routing_of_its_own() -> None:
    config = deploy_config({"prefill.routing": "least_tokens"})
    assert [pool.routing for pool in config.pools] == [Routing.LEAST_TOKENS, Routing.LEAST_REQUESTS]
