"""Numbered changes of a prefix cache: whoever follows them knows what is cached."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import sim_engine as sim
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.engine import prefix_index
from cluster.engine.blocks import BlockManager, prompt_prefixes
from cluster.engine.prefix_index import PrefixFeed, PrefixIndex
from cluster.engine.sequence import Sequence

# A block that is cached or evicted, or news that go one hop on, or are lost there.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("cached"), st.integers(0, 4)),
        st.tuples(st.just("evicted"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["to board", "to ingress", "new board", "new ingress"])),
    ),
    max_size=80,
)


def known(index: PrefixIndex) -> set[int]:
    return {*index._added}


def go_on(source: PrefixFeed | PrefixIndex, target: PrefixIndex) -> None:
    if (update := source.since(target.number)) is not None:
        target.apply(update)


@pytest.mark.feature("P08")
@given(EVENTS, st.integers(1, 4))
@example([("cached", 0), ("cached", 1), ("to board",), ("evicted", 0), ("evicted", 1)], 1)
def test_board_and_ingress_know_what_is_cached_whatever_they_missed(
    events: list[tuple[Any, ...]], max_removed: int
) -> None:
    feed, board, ingress, cached = PrefixFeed(), PrefixIndex(), PrefixIndex(), set[int]()
    with mock.patch.object(prefix_index, "MAX_REMOVED", max_removed):
        for what, *of in events:
            match what:
                case "cached":
                    if of[0] not in cached:
                        cached.add(of[0])
                        feed.changes.append((of[0].to_bytes(16, "little"), True))
                case "evicted":
                    if of[0] in cached:
                        cached.remove(of[0])
                        feed.changes.append((of[0].to_bytes(16, "little"), False))
                case "to board":
                    go_on(feed, board)
                    assert known(board) == cached
                case "to ingress":
                    go_on(board, ingress)
                    assert known(ingress) == known(board)
                case "new board":
                    board = PrefixIndex()
                case "new ingress":
                    ingress = PrefixIndex()
        go_on(feed, board)
        go_on(board, ingress)
    assert known(board) == known(ingress) == cached


@pytest.mark.feature("P08")
def test_only_what_changed_is_told_and_a_gap_is_never_taken_for_news() -> None:
    feed, board = PrefixFeed(), PrefixIndex()
    feed.changes += [(bytes([i]) * 16, True) for i in range(100)]
    whole = feed.since(0)
    assert whole is not None and (whole.since, len(whole.added)) == (0, 800)
    board.apply(whole)
    assert feed.since(board.number) is None
    feed.changes += [(bytes([200]) * 16, True), (bytes([7]) * 16, False)]
    update = feed.since(board.number)
    assert update is not None and (len(update.added), len(update.removed)) == (8, 8)
    late = PrefixIndex()
    late.apply(update)
    assert (len(late), late.number) == (0, 0), "it has missed what came before"
    board.apply(update)
    board.apply(update)  # sent again
    assert len(board) == 100
    go_on(board, late)
    assert known(late) == known(board)


def test_what_nobody_asks_for_is_bounded() -> None:
    with mock.patch.object(prefix_index, "MAX_PREFIXES", 8):
        feed, board = PrefixFeed(), PrefixIndex()
        feed.changes += [(bytes([i]) * 16, True) for i in range(4)]
        go_on(feed, board)
        # An eviction is lost: what was known before may not be there any more.
        feed.changes.append((bytes([0]) * 16, False))
        feed.changes += [(bytes([i]) * 16, True) for i in range(10, 18)]
        go_on(feed, board)
        assert known(board) == {prefix_index.prefix_of(bytes([i]) * 16) for i in range(10, 18)}
        feed.changes.append((bytes([99]) * 16, True))
        go_on(feed, board)
        assert len(board) == 8


@pytest.mark.feature("P08")
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.sampled_from([b"", b"salt"]),
    st.integers(0, 1),
)
def test_an_ingress_hashes_a_prompt_as_the_engine_that_caches_it(
    prompt: list[int], salt: bytes, num_behind: int
) -> None:
    feed, index = PrefixFeed(), PrefixIndex()
    blocks = BlockManager(
        16, 4, enable_prefix_caching=True, changes=feed.changes, num_behind=num_behind
    )
    request = sim.make_request("r", prompt, cache_salt=salt)
    seq = Sequence(request, max_model_len=100)
    assert blocks.allocate(seq, seq.num_tokens) is not None
    seq.num_computed_tokens = seq.num_tokens
    blocks.commit(seq)
    go_on(feed, index)
    prefixes = prompt_prefixes(request, 4, num_behind)
    # As many as a sequence finds: its last token is always computed.
    assert len(prefixes) == len(blocks.match(seq)) and {*prefixes} <= known(index)
    others = prompt_prefixes(sim.make_request("r", prompt, cache_salt=b"other"), 4, num_behind)
    assert not {*others} & known(index)
    # Whoever takes the blocks evicts what was cached.
    blocks.free(seq)
    assert blocks.allocate(Sequence(request, max_model_len=100), 16 * 4) is not None
    go_on(feed, index)
    assert not known(index)
