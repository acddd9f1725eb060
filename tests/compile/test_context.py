"""A forward context is seen inside its forward, on its thread, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from compile.context import (
    ForwardContext,
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
