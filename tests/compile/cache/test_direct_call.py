"""Passing by torch's layers around a compiled piece changes nothing but the time it takes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx

from compile.cache.inductor import DirectCall, InductorAdaptor


def plain(x: Any, y: Any) -> Any:
    return x * 2 + y, torch.sin(x)


def with_input(x: Any, y: Any) -> Any:
    return x, x + y


def with_view(x: Any, y: Any) -> Any:
    return x.view(2, 4), y * 3


def with_change(x: Any, y: Any) -> Any:
    y.add_(1)
    return (x + y,)


def shared(outputs: Any, inputs: list[torch.Tensor]) -> list[bool]:
    """Tell of each output whether it lies in an input's memory."""
    memory = {t.untyped_storage().data_ptr() for t in inputs}
    return [t.untyped_storage().data_ptr() in memory for t in outputs]


Compile = Callable[[Callable[..., Any]], DirectCall]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Compile]:
    """Return a function that compiles another once, and returns it uncalled."""
    made: dict[Callable[..., Any], Any] = {}

    def compile_once(fn: Callable[..., Any]) -> DirectCall:
        if fn not in made:
            graph = fx.symbolic_trace(fn)
            for node in graph.graph.nodes:
                node.type = None
            graph.recompile()
            found, _ = InductorAdaptor().compile(graph, [torch.ones(8), torch.ones(8)], {})
            assert isinstance(found, DirectCall)
            made[fn] = found.compiled
        return DirectCall(made[fn])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield compile_once


@pytest.mark.parametrize("fn", [plain, with_input, with_view, with_change])
def test_every_call_returns_what_the_layers_return(
    compiled: Compile, fn: Callable[..., Any]
) -> None:
    piece = compiled(fn)
    numbers = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for _ in range(4):
            x, y = torch.randn(8, generator=numbers), torch.randn(8, generator=numbers)
            ours, theirs = [x.clone(), y.clone()], [x.clone(), y.clone()]
            found, wanted = piece(*ours), fn(*theirs)
            for one, other in zip([*found, *ours], [*wanted, *theirs], strict=True):
                torch.testing.assert_close(one, other)
            # What shares memory with an input goes on sharing it.
            assert shared(found, ours) == shared(wanted, theirs)


def test_a_plain_piece_is_called_directly_from_its_second_call_on(compiled: Compile) -> None:
    piece = compiled(plain)
    layers: list[int] = []
    original = piece.compiled
    piece.compiled = lambda *args: (layers.append(1), original(*args))[1]
    x, y = torch.ones(8), torch.ones(8)
    piece(x, y)  # gradients may be wanted here, so nothing is watched
    with torch.inference_mode():
        for _ in range(3):
            piece(x, y)
        assert len(layers) == 2
        with torch.profiler.profile() as profile:
            piece(x, y)
        assert any("CompiledFxGraph" in event.name for event in profile.events())
    piece(x, y)
    assert len(layers) == 4


def test_what_comes_back_otherwise_than_it_was_generated_keeps_its_layers(
    compiled: Compile,
) -> None:
    piece = compiled(plain)
    original = piece.compiled
    piece.compiled = lambda *args: [t + 1 for t in original(*args)]
    with torch.inference_mode():
        for _ in range(3):
            [first, _] = piece(torch.ones(8), torch.ones(8))
            assert first.eq(4).all()


def no_layers(*args: Any) -> Any:
    raise AssertionError("a direct call passed the layers")


def test_threads_watch_their_own_calls_alone(compiled: Compile) -> None:
    pieces = [compiled(plain) for _ in range(2)]
    meeting = threading.Barrier(2)
    for piece in pieces:
        original = piece.compiled

        def met(*args: Any, run: Callable[..., Any] = original) -> Any:
            meeting.wait(timeout=30)  # both are inside, as ranks are that meet in a collective
            found = run(*args)
            meeting.wait(timeout=30)
            return found

        piece.compiled = met

    def run(piece: DirectCall) -> None:
        with torch.inference_mode():
            piece(torch.ones(8), torch.ones(8))

    threads = [threading.Thread(target=run, args=(piece,)) for piece in pieces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for piece in pieces:
        piece.compiled = no_layers
        run(piece)
