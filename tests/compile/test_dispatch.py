"""One table decides how a step runs; nothing else may."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compile.config import CompilationConfig, CUDAGraphMode
from compile.context import BatchDescriptor
from compile.dispatch import CapturedGraphs, ForwardMode, decide

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode

CAPTURED = CapturedGraphs(graph_bs=(1, 2, 4, 8), num_tokens=(1, 2, 4, 12, 24))
"""Both lists on purpose different: a batch size is no token count."""

BS = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
TOKENS = {1: 1, 2: 2, 3: 4, 4: 4, **dict.fromkeys(range(5, 13), 12)}
TOKENS |= dict.fromkeys(range(13, 25), 24)
"""By real size the padded one; what is missing runs eagerly."""

ROUTES = {
    NONE: (NONE, NONE),
    PIECEWISE: (PIECEWISE, PIECEWISE),
    FULL: (FULL, FULL),
    DECODE_ONLY: (FULL, NONE),
    BOTH: (FULL, PIECEWISE),
}
"""By mode what decode steps and all others replay."""


def config(mode: CUDAGraphMode, *, enable_padding: bool = True) -> CompilationConfig:
    """Return a configuration of level 3, where every mode is legal."""
    return CompilationConfig(level=3, cudagraph_mode=mode, enable_padding=enable_padding)


def eager(num_tokens: int, num_seqs: int) -> ForwardMode:
    return ForwardMode(NONE, None, num_tokens, num_seqs)


def expected(
    route: CUDAGraphMode, is_decode: bool, tokens: int, seqs: int, query_len: int, padding: bool
) -> ForwardMode:
    """Look the step up in the tables above."""
    if route is PIECEWISE and tokens in TOKENS:
        padded = TOKENS[tokens]
        return ForwardMode(PIECEWISE, BatchDescriptor(padded, None, False), padded, seqs)
    if route is FULL and is_decode and seqs in BS and (padding or BS[seqs] == seqs):
        bs = BS[seqs]
        return ForwardMode(FULL, BatchDescriptor(bs * query_len, bs, True), bs * query_len, bs)
    return eager(tokens, seqs)


@pytest.mark.feature("D05", "N10")
@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("padding", [True, False])
@pytest.mark.parametrize("query_len", [1, 2, 3])
def test_every_decode_step_has_its_entry_in_the_table(
    mode: CUDAGraphMode, padding: bool, query_len: int
) -> None:
    for seqs, allowed in itertools.product(range(30), (True, False)):
        tokens = seqs * query_len
        route = ROUTES[mode][0] if allowed else NONE
        assert decide(
            is_uniform_decode=True,
            num_tokens=tokens,
            num_seqs=seqs,
            query_len=query_len,
            config=config(mode, enable_padding=padding),
            captured=CAPTURED,
            is_graph_allowed=allowed,
        ) == expected(route, True, tokens, seqs, query_len, padding)


@pytest.mark.feature("D05", "N01", "N10")
@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("padding", [True, False])
def test_every_prefill_and_mixed_step_has_its_entry_in_the_table(
    mode: CUDAGraphMode, padding: bool
) -> None:
    for tokens, allowed in itertools.product(range(30), (True, False)):
        route = ROUTES[mode][1] if allowed else NONE
        for seqs in {1, 2, 3, tokens} if tokens else {0}:
            assert decide(
                is_uniform_decode=False,
                num_tokens=tokens,
                num_seqs=seqs,
                config=config(mode, enable_padding=padding),
                captured=CAPTURED,
                is_graph_allowed=allowed,
            ) == expected(route, False, tokens, seqs, 1, padding)


def test_batches_in_turn_switch_between_whole_graphs_and_pieces() -> None:
    steps = [(False, 9, 2), (False, 6, 3), (True, 3, 3), (True, 9, 9), (False, 25, 1)]
    found = [
        decide(
            is_uniform_decode=is_decode,
            num_tokens=tokens,
            num_seqs=seqs,
            config=config(BOTH),
            captured=CAPTURED,
        ).mode
        for is_decode, tokens, seqs in steps
    ]
    assert found == [PIECEWISE, PIECEWISE, FULL, NONE, NONE]


MIXED = CapturedGraphs(
    graph_bs=(4,),
    num_tokens=(8,),
    mixed=(BatchDescriptor(8, 2), BatchDescriptor(8, 4), BatchDescriptor(16, 4)),
)


@pytest.mark.feature("D05")
@pytest.mark.parametrize(
    ("tokens", "seqs", "padded", "exact"),
    [
        (8, 2, (8, 2), True),
        (8, 4, (8, 4), True),
        (16, 4, (16, 4), True),
        (5, 2, (8, 2), False),
        (8, 3, (8, 4), False),
        (9, 1, (16, 4), False),
        (8, 5, None, False),
        (17, 1, None, False),
    ],
)
@pytest.mark.parametrize("padding", [True, False])
def test_a_mixed_step_replays_a_whole_graph_only_where_one_was_captured(
    tokens: int, seqs: int, padded: tuple[int, int] | None, exact: bool, padding: bool
) -> None:
    found = decide(
        is_uniform_decode=False,
        num_tokens=tokens,
        num_seqs=seqs,
        config=config(FULL, enable_padding=padding),
        captured=MIXED,
    )
    if padded is None or not (padding or exact):
        assert found == eager(tokens, seqs)
    else:
        assert found == ForwardMode(FULL, BatchDescriptor(*padded, False), *padded)


@pytest.mark.parametrize("mode", CUDAGraphMode)
def test_nothing_is_replayed_where_graphs_are_off(mode: CUDAGraphMode) -> None:
    off = CompilationConfig(level=3, cudagraph_mode=mode, use_cudagraph=False)
    for is_decode in (True, False):
        assert decide(
            is_uniform_decode=is_decode, num_tokens=4, num_seqs=4, config=off, captured=MIXED
        ) == eager(4, 4)


@pytest.mark.parametrize(("tokens", "seqs", "query_len"), [(3, 4, 1), (5, 4, 1), (4, 4, 2)])
def test_a_decode_step_whose_numbers_disagree_is_an_error(
    tokens: int, seqs: int, query_len: int
) -> None:
    with pytest.raises(ValueError, match=rf"^num_tokens: wanted {seqs} x {query_len} in .* found"):
        decide(
            is_uniform_decode=True,
            num_tokens=tokens,
            num_seqs=seqs,
            query_len=query_len,
            config=config(FULL),
            captured=CAPTURED,
        )


@st.composite
def captured_graphs(draw: st.DrawFn) -> CapturedGraphs:
    sizes = st.lists(st.integers(1, 40), unique=True, max_size=6).map(sorted).map(tuple)
    pairs = st.tuples(st.integers(1, 40), st.integers(1, 40))
    mixed = draw(st.lists(pairs, unique=True, max_size=4).map(sorted))
    descriptors = tuple(BatchDescriptor(*pair) for pair in mixed)
    return CapturedGraphs(draw(sizes), draw(sizes), descriptors)


@given(
    captured_graphs(),
    st.sampled_from(CUDAGraphMode),
    st.booleans(),
    st.booleans(),
    st.integers(0, 50),
    st.integers(1, 4),
    st.integers(0, 20),
)
def test_only_captured_graphs_are_replayed_and_they_hold_the_step(
    captured: CapturedGraphs,
    mode: CUDAGraphMode,
    padding: bool,
    is_decode: bool,
    seqs: int,
    query_len: int,
    more: int,
) -> None:
    tokens = seqs * query_len if is_decode else seqs + more
    found = decide(
        is_uniform_decode=is_decode,
        num_tokens=tokens,
        num_seqs=seqs,
        query_len=query_len,
        config=config(mode, enable_padding=padding),
        captured=captured,
    )
    key = found.descriptor
    assert (key is None) == (found.mode is NONE)
    assert found.num_tokens >= tokens and found.num_seqs >= seqs
    if key is None:
        assert (found.num_tokens, found.num_seqs) == (tokens, seqs)
        return
    assert key.num_tokens == found.num_tokens
    if found.mode is PIECEWISE:
        assert key == BatchDescriptor(found.num_tokens) and found.num_seqs == seqs
        assert key.num_tokens in captured.num_tokens
    elif is_decode:
        assert key.uniform_decode and key.num_tokens == found.num_seqs * query_len
        assert key.num_seqs == found.num_seqs and key.num_seqs in captured.graph_bs
    else:
        assert key in captured.mixed and key.num_seqs == found.num_seqs
