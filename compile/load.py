"""Around a bound forward: artifacts loaded, pieces wrapped for graphs, inputs copied.

The one thing to know: a warm start needs this and no more, so nothing here imports Dynamo, a
compiler, or the code that splits graphs.
"""

from __future__ import annotations

from collections.abc import Sequence

from compile.piecewise import PieceShapes, PiecewiseBackend
from compile.scope import CompileScope
from compile.stitch import make_copy_and_call
from compile.toolchain import Manager, Runnable, Shape, Toolchain
from compile.trace import ForwardPlan


class BackendError(RuntimeError):
    """A compiler was used in a way that it cannot serve."""


def toolchain_of(scope: CompileScope) -> Toolchain:
    """Return the toolchain that a scope brings.

    Raises:
        BackendError: it brings none.
    """
    if scope.toolchain is None:
        wanted = "a scope with a toolchain to compile with"
        raise BackendError(f"compilation.level: wanted {wanted}, found {scope.config.level}")
    return scope.toolchain


def wrapped(scope: CompileScope, backend: Runnable, index: int) -> Runnable:
    """Return a piece as steps call it: behind a graph wrapper where some step replays pieces."""
    if not scope.config.graph_mode.requires_piecewise_compilation():
        return backend
    return toolchain_of(scope).wrap(backend, is_first=index == 0)


def kept(scope: CompileScope, op: Runnable) -> Runnable:
    """Return one call of an eager op that returns something, as steps call it."""
    if not scope.config.graph_mode.requires_piecewise_compilation():
        return op
    return toolchain_of(scope).keep_outputs(op)


def with_copies(scope: CompileScope, call: Runnable, dims: Sequence[tuple[int, ...]]) -> Runnable:
    """Return a forward behind the copy layer, where pieces are replayed and it is asked for."""
    config = scope.config
    if not (config.cudagraph_copy_inputs and config.graph_mode.requires_piecewise_compilation()):
        return call
    return make_copy_and_call(call, dims, scope.max_num_tokens)


def load_pieces(scope: CompileScope, manager: Manager, plan: ForwardPlan) -> dict[str, Runnable]:
    """Load every artifact of a plan. Returns what runs each piece, by its name in the plan.

    Raises what the manager raises where an artifact is missing or cannot be used.
    """
    shapes, num_graphs = PieceShapes.of(scope.config), len(plan.pieces)
    loaded = {}
    for piece in plan.pieces:
        runnables: dict[Shape, Runnable] = {
            shape: manager.load(piece.key, index=piece.index, shape=shape, num_graphs=num_graphs)
            for shape in shapes.all()
        }
        backend = PiecewiseBackend(
            index=piece.index,
            num_graphs=num_graphs,
            tokens=piece.tokens,
            shapes=shapes,
            compiled_runnables=runnables,
        )
        loaded[piece.name] = wrapped(scope, backend, piece.index)
    return loaded
