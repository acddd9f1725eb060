"""One table decides how a step runs; nothing else may."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from compile.config import CUDAGraphMode
from compile.dispatch import BatchDescriptor, CapturedGraphs, decide

NONE, PIECEWISE, FULL, DECODE_ONLY, BOTH = CUDAGraphMode

CAPTURED = CapturedGraphs(
    NONE,
    batch_sizes=(1, 2, 4, 8),
    draft_batch_sizes=(1, 3, 4),
    query_len=3,
    token_counts=(1, 2, 4, 12, 24),
)
"""All lists on purpose different: a batch size is no token count."""

BS = {1: 1, 2: 2, 3: 4, 4: 4, 5: 8, 6: 8, 7: 8, 8: 8}
DRAFT_BS = {1: 1, 2: 3, 3: 3, 4: 4}
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


def captured(
    mode: CUDAGraphMode, *, enable_padding: bool = True, graphs: CapturedGraphs = CAPTURED
) -> CapturedGraphs:
    return dataclasses.replace(graphs, mode=mode, enable_padding=enable_padding)


Decision = tuple[CUDAGraphMode, BatchDescriptor]


def eager(num_tokens: int, num_seqs: int, is_decode: bool) -> Decision:
    return NONE, BatchDescriptor(num_tokens, num_seqs if is_decode else None, is_decode)


def expected(
    route: CUDAGraphMode, is_decode: bool, tokens: int, seqs: int, padding: bool
) -> Decision:
    """Look a step without drafts up in the tables above."""
    if route is PIECEWISE and tokens in TOKENS:
        return PIECEWISE, BatchDescriptor(TOKENS[tokens], seqs if is_decode else None, is_decode)
    if route is FULL and is_decode and seqs in BS and (padding or BS[seqs] == seqs):
        return FULL, BatchDescriptor(BS[seqs], BS[seqs], True)
    return eager(tokens, seqs, is_decode)


def expected_of_drafts(
    mode: CUDAGraphMode, tokens: int, seqs: int, query_len: int, padding: bool
) -> Decision:
    """A graph has room for two draft tokens of each sequence, however many there are."""
    if not seqs:
        return eager(0, 0, is_decode=True)
    has_size = seqs in DRAFT_BS and (padding or DRAFT_BS[seqs] == seqs)
    if ROUTES[mode][0] is FULL and has_size and query_len <= 3:
        return FULL, BatchDescriptor(3 * DRAFT_BS[seqs], DRAFT_BS[seqs], True)
    return expected(ROUTES[mode][1], False, tokens, seqs, padding)


@pytest.mark.feature("D05", "N01", "N10")
@pytest.mark.parametrize("mode", CUDAGraphMode)
@pytest.mark.parametrize("padding", [True, False])
def test_every_step_has_its_entry_in_the_table(mode: CUDAGraphMode, padding: bool) -> None:
    graphs = captured(mode, enable_padding=padding)
    for seqs, query_len in itertools.product(range(30), (1, 2, 3, 4)):
        for tokens in range(seqs, seqs * query_len + 1):
            found = decide(
                is_uniform_decode=True,
                num_tokens=tokens,
                num_seqs=seqs,
                query_len=query_len,
                captured=graphs,
            )
            if query_len == 1:
                assert found == expected(ROUTES[mode][0], True, tokens, seqs, padding)
            else:
                assert found == expected_of_drafts(mode, tokens, seqs, query_len, padding)
    for tokens in range(30):
        for seqs in {1, 2, 3, tokens} if tokens else {0}:
            assert decide(
                is_uniform_decode=False, num_tokens=tokens, num_seqs=seqs, captured=graphs
            ) == expected(ROUTES[mode][1], False, tokens, seqs, padding)


MIXED = CapturedGraphs(
    batch_sizes=(4,),
    token_counts=(8,),
    mixed=(
        BatchDescriptor(8, 2, False),
        BatchDescriptor(8, 4, False),
        BatchDescriptor(16, 4, False),
    ),
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
        captured=captured(FULL, enable_padding=padding, graphs=MIXED),
    )
    if padded is None or not (padding or exact):
        assert found == eager(tokens, seqs, is_decode=False)
    else:
        assert found == (FULL, BatchDescriptor(*padded, False))


@pytest.mark.parametrize(
    ("tokens", "seqs", "query_len"), [(3, 4, 1), (5, 4, 1), (3, 4, 2), (9, 4, 2)]
)
def test_a_decode_step_whose_numbers_disagree_is_an_error(
    tokens: int, seqs: int, query_len: int
) -> None:
    with pytest.raises(ValueError, match=rf"^num_tokens: wanted {seqs} x 1 to {query_len} in .*d"):
        decide(
            is_uniform_decode=True,
            num_tokens=tokens,
            num_seqs=seqs,
            query_len=query_len,
            captured=captured(FULL),
        )
