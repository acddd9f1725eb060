"""The paged pool and its prefix cache (T01)."""

from __future__ import annotations

import pytest
import sim_engine as sim
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_check import check_blocks

from cluster.engine.blocks import BlockManager
from cluster.engine.sequence import Sequence


@pytest.fixture
def blocks() -> BlockManager:
    return BlockManager(num_blocks=8, block_size=4, enable_prefix_caching=True)


def make_sequence(tokens: list[int]) -> Sequence:
    return Sequence(sim.make_request("r", tokens), max_model_len=100)


def compute(blocks: BlockManager, seq: Sequence) -> None:
    """Give a new sequence its blocks as a scheduler does, and compute all of it."""
    blocks.acquire(seq, blocks.match(seq))
    assert blocks.allocate(seq, seq.num_tokens) is not None
    seq.num_computed_tokens = seq.num_tokens
    blocks.commit(seq)


@pytest.mark.feature("T01")
def test_equal_heads_share_blocks_and_those_of_another_salt_none() -> None:
    blocks = BlockManager(num_blocks=16, block_size=4, enable_prefix_caching=True)
    sequences = [
        Sequence(sim.make_request("r", list(range(10)), cache_salt=salt), max_model_len=100)
        for salt in (b"", b"1", b"2", b"1")
    ]
    for seq in sequences:
        compute(blocks, seq)
    tables = [seq.block_table[:2] for seq in sequences]
    assert tables[1] == tables[3]
    assert len({block for table in tables for block in table}) == 6
    assert (blocks.prefix_queries, blocks.prefix_hits) == (40, 8)
    check_blocks(blocks, sequences)


@pytest.mark.feature("T01", "T05")
def test_a_block_whose_kv_follows_from_the_token_behind_is_found_before_that_token() -> None:
    blocks = BlockManager(16, 4, enable_prefix_caching=True, num_behind=1)
    seq = make_sequence(list(range(12)))
    compute(blocks, seq)
    assert seq.num_committed_blocks == 2  # what comes behind the third is not known
    for length, num_found in ((8, 1), (9, 2), (12, 2)):
        assert blocks.match(make_sequence(list(range(length)))) == seq.block_table[:num_found]
    assert blocks.match(make_sequence([*range(8), 50, 51])) == seq.block_table[:1]
    seq.token_ids.append(60)
    blocks.commit(seq)
    assert blocks.match(make_sequence([*range(12), 60, 61])) == seq.block_table
    assert blocks.match(make_sequence([*range(12), 61, 61])) == seq.block_table[:2]


def test_the_tail_is_evicted_before_the_head(blocks: BlockManager) -> None:
    seq = make_sequence(list(range(16)))
    compute(blocks, seq)
    head = seq.block_table[:3]
    blocks.free(seq)
    blocks.allocate(make_sequence([50]), 5 * 4)  # four were never used, the fifth was cached
    assert blocks.match(make_sequence(list(range(17)))) == head


def test_the_least_recently_freed_sequence_is_evicted_first(blocks: BlockManager) -> None:
    old, new = make_sequence([1] * 16), make_sequence([2] * 16)
    compute(blocks, old)
    compute(blocks, new)
    blocks.free(old)
    blocks.free(new)
    blocks.allocate(make_sequence([50]), 16)
    assert blocks.match(make_sequence([1] * 17)) == []
    assert len(blocks.match(make_sequence([2] * 17))) == 4


def test_a_hit_that_nobody_holds_is_not_counted_as_room(blocks: BlockManager) -> None:
    seq = make_sequence(list(range(16)))
    compute(blocks, seq)
    blocks.free(seq)
    same = make_sequence(list(range(36)))
    cached = blocks.match(same)
    assert len(cached) == 4 and blocks.num_saved(cached) == 0
    blocks.acquire(make_sequence(list(range(16))), cached)
    assert blocks.num_saved(cached) == 4


@settings(max_examples=300, deadline=None, print_blob=True, database=None)
@given(data=st.data())
def test_a_generation_counts_how_often_a_block_got_new_content(data: st.DataObject) -> None:
    blocks = BlockManager(num_blocks=6, block_size=2, enable_prefix_caching=True)
    held: list[Sequence] = []
    generations = [0] * 7
    for _ in range(data.draw(st.integers(1, 20))):
        if held and data.draw(st.booleans()):
            blocks.free(held.pop(data.draw(st.integers(0, len(held) - 1))))
        seq = make_sequence([data.draw(st.integers(0, 1))] * data.draw(st.integers(1, 9)))
        cached = blocks.match(seq)
        needed = blocks.num_blocks_for(seq.num_tokens) - blocks.num_saved(cached)
        if needed <= blocks.num_free_blocks:
            compute(blocks, seq)
            held.append(seq)
            assert seq.block_table[: len(cached)] == cached
            for block in seq.block_table[len(cached) :]:
                generations[block] += 1
        check_blocks(blocks, held)
        assert blocks.generations == generations
