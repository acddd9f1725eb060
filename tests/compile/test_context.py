"""A forward context is seen inside its forward, on its thread, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compile.context import (
    ForwardContext,
    SpecDecodeMetadata,
    current_context,
    forward_context,
    get_forward_context,
    resumed_context,
)


def on_new_thread(body: Callable[[], object]) -> None:
    """Run the body on a thread without a history and raise what it raises."""
    with ThreadPoolExecutor(1) as threads:
        threads.submit(body).result()


@pytest.mark.feature("L02")
def test_reading_a_context_that_was_never_set_is_an_assertion_error() -> None:
    with pytest.raises(AssertionError, match="forward context: wanted one"):
        on_new_thread(get_forward_context)


@pytest.mark.feature("L02")
def test_another_thread_sees_nothing_of_it() -> None:
    def other() -> None:
        with pytest.raises(AssertionError):
            get_forward_context()
        with forward_context(ForwardContext(attn_metadata="theirs")):
            assert get_forward_context().attn_metadata == "theirs"

    with forward_context(ForwardContext(attn_metadata="ours")):
        on_new_thread(other)
        assert get_forward_context().attn_metadata == "ours"


def test_a_replay_leaves_a_thread_that_had_no_context_without_one() -> None:
    def replay() -> None:
        with resumed_context(ForwardContext(attn_metadata="earlier")):
            pass
        assert current_context() is None

    on_new_thread(replay)


@pytest.mark.feature("L02")
def test_a_nested_context_restores_the_outer_one_even_after_an_error() -> None:
    outer, inner = ForwardContext(attn_metadata="outer"), ForwardContext(attn_metadata="inner")
    with forward_context(outer):
        with pytest.raises(RuntimeError, match="inside"), forward_context(inner):
            raise RuntimeError("inside")
        assert get_forward_context() is outer
    assert get_forward_context() == ForwardContext()
    with pytest.raises(RuntimeError, match="inside"), forward_context(inner):
        raise RuntimeError("inside")
    assert get_forward_context() == ForwardContext()


DRAFTED = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), max_size=4)
"""Of one sequence: what each draft token is, and what was drawn in its place."""


@pytest.mark.feature("D04")
@given(st.lists(st.tuples(DRAFTED, st.integers(0, 3)), min_size=1, max_size=6))
def test_a_draft_holds_up_to_the_first_token_that_was_not_drawn(
    sequences: list[tuple[list[tuple[int, int]], int]],
) -> None:
    """Before each sequence that draws stand so many tokens of another one's chunk."""
    ids, places, drawn, targets, bonus, wanted = ([] for _ in range(6))
    known, behind = {}, {}
    for pairs, num_others in sequences:
        ids += [7] * num_others
        if num_others:
            known[len(ids) - 1] = 5
            behind |= dict.fromkeys(range(len(ids) - num_others, len(ids) - 1), 7)
        right = [drafted == token for drafted, token in pairs]
        wanted.append(len(ids) + [*right, False].index(False))
        targets += range(len(drawn), len(drawn) + len(pairs))
        places += range(len(ids), len(ids) + 1 + len(pairs))
        ids += [9, *(drafted for drafted, _ in pairs)]
        drawn += [*(token for _, token in pairs), 3]
        bonus.append(len(drawn) - 1)
    behind |= known | dict(zip(places, drawn, strict=True))
    numbers = [len(pairs) for pairs, _ in sequences]
    metadata = SpecDecodeMetadata(
        num_draft_tokens=torch.tensor(numbers),
        cu_num_draft_tokens=torch.tensor(numbers).cumsum(0),
        draft_token_ids=torch.tensor([d for pairs, _ in sequences for d, _ in pairs]).long(),
        target_logits_indices=torch.tensor(targets).long(),
        bonus_logits_indices=torch.tensor(bonus),
        logits_indices=torch.tensor(places),
        known_indices=torch.tensor([*known]).long(),
        known_token_ids=torch.tensor([*known.values()]).long(),
    )
    assert metadata.last_accepted(torch.tensor(drawn)).tolist() == wanted
    found = metadata.token_ids_behind(torch.tensor([*ids, 0]), torch.tensor(drawn)).tolist()
    assert {place: found[place] for place in range(len(ids))} == behind
