"""Say why a forward is not one graph, or not one for all sizes, where, and what to write instead.
Reading a value of a tensor is refused here even if torch can trace it, because each read waits for
the device, in the middle of what is to be captured."""

from __future__ import annotations

import ast
import inspect
import linecache
import logging
import os
import re
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from traceback import FrameSummary
from types import MethodType
from typing import Any

import torch
from torch import fx

from compile.pieces.plan import TOKEN_ARGUMENT, Guard
from compile.pieces.split import example_value, is_symbolic, placeholders
from compile.pieces.stitch import NUM_TOKENS

logger = logging.getLogger(__name__)

MAX_UNROLLED = 64
"""How often one line of one module may occur in a graph before it is called an unrolled loop.
Each time is code to compile; 64 covers intended loops over heads and experts."""

_OPAQUE = "hide it in an op (compile.custom_op.direct_register_custom_op)"
_VALUE = "compute it before the forward and pass it as a tensor, or " + _OPAQUE
_ANY_SIZE = "write it for any number of tokens, or " + _OPAQUE


@dataclass(frozen=True)
class Cause:
    """A reason for a break: `pattern` is searched in the line of source and in torch's message."""

    what: str
    pattern: str
    remedy: str
    ops: tuple[str, ...] = ()
    """Refused even if torch can trace them: their result, or its shape, waits for the device."""


CAUSES = (
    Cause("print", r"`print`|\bprint\(", "remove it, or log around the forward"),
    Cause("breakpoint", r"`breakpoint`|\bbreakpoint\(", "run with level 0 to debug"),
    Cause("a call of a logger", r"\blogg(er|ing)\b", "log around the forward"),
    Cause(
        "a range over a value", r"\brange\(.*(\.item\(\)|int\()", "loop inside an op: " + _OPAQUE
    ),
    Cause(
        "a branch on a value",
        r"[Dd]ata-dependent branching",
        "use torch.where, or decide before the forward",
    ),
    Cause("tolist", r"\.tolist\(", _VALUE, ("tolist",)),
    Cause("item", r"\.item\(|_local_scalar_dense", _VALUE, ("item", "_local_scalar_dense")),
    Cause("int or float of a tensor", r"\b(int|float|bool)\(", _VALUE),
    Cause(
        "nonzero",
        r"nonzero|masked_select|\bunique\(",
        "use torch.where with three arguments",
        ("nonzero", "masked_select", "unique", "unique_consecutive", "bincount"),
    ),
    Cause("a branch on a size", r"[Dd]ata-dependent|specializ", _ANY_SIZE),
    Cause("a native call", r"ctypes|pybind|nanobind|C/C\+\+|builtin", _OPAQUE),
)
"""In the order in which they are looked for."""

_TORCH = os.path.dirname(torch.__file__)
_STDLIB = sysconfig.get_paths()["stdlib"]

_BREAKS = {
    "Unsupported",
    "UserError",
    "InternalTorchDynamoError",
    "GuardOnDataDependentSymNode",
    "ConstraintViolationError",
    "FailOnRecompileLimitHit",
}
"""What torch raises by name: some of these classes moved between its versions."""


class GraphBreakError(RuntimeError):
    """A forward is not one graph that stays on the device."""


class SpecialisedError(GraphBreakError):
    """Tracing took the number of tokens for a constant."""


class TraceError(RuntimeError):
    """A forward was traced, but cannot be run from what was traced."""


def explained(error: Exception, forward: MethodType) -> GraphBreakError | None:
    """Say in one line what Dynamo broke on; None for errors of other kinds."""
    if type(error).__name__ not in _BREAKS:
        return None
    frame = _user_frame(getattr(error, "real_stack", None) or _frames(str(error)))
    line = "" if frame is None else _source(frame)
    where = forward.__qualname__ if frame is None else f"{frame.filename}:{frame.lineno}"
    cause = _cause(line) or _cause(str(error).split("from user code")[0])
    return GraphBreakError(_break(cause or _unknown(str(error)), where, line))


def _break(cause: Cause, where: str, line: str) -> str:
    found = f"{cause.what} at {where}" + (f" `{line}`" if line else "")
    return f"forward: wanted one graph, found {found}; to change: {cause.remedy}"


def _cause(text: str) -> Cause | None:
    return next((cause for cause in CAUSES if re.search(cause.pattern, text)), None)


def _unknown(message: str) -> Cause:
    """Return the cause that torch's message is about, in torch's words."""
    context = re.search(r"Developer debug context: (.*)", message)
    what = context[1].strip() if context else message.strip().split("\n")[0]
    return Cause(what or "a graph break", "", "move it out of the forward, or " + _OPAQUE)


def _frames(text: str) -> list[FrameSummary]:
    found = re.findall(r'File "(.+)", line (\d+), in (.+)', text)
    return [FrameSummary(file, int(line), name) for file, line, name in found]


def _user_frame(frames: Sequence[FrameSummary]) -> FrameSummary | None:
    """Return the innermost frame outside of torch and Python's own library."""
    ours = [frame for frame in frames if not _is_library(frame.filename)]
    chosen = ours or list(frames)
    return chosen[-1] if chosen else None


def _is_library(file: str) -> bool:
    return file.startswith(_TORCH) or (file.startswith(_STDLIB) and "site-packages" not in file)


def _source(frame: FrameSummary) -> str:
    return (frame.line or linecache.getline(frame.filename, frame.lineno or 0)).strip()


def check_stays_on_device(graph: fx.GraphModule) -> None:
    """Raise GraphBreakError at the first line that reads values, or shapes that depend on them."""
    for node in graph.graph.nodes:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        name = str(name).split(".")[0]
        cause = next((cause for cause in CAUSES if name in cause.ops), None)
        if node.op in ("call_method", "call_function") and cause is not None:
            where, line = traced_at(node)
            raise GraphBreakError(_break(_cause(line) or cause, where, line))


def traced_at(node: fx.Node) -> tuple[str, str]:
    """Return `file:line` and the source of the line that a node was traced from."""
    frame = _user_frame(_frames(node.stack_trace or ""))
    if frame is None:
        return "an unknown line", ""
    return f"{frame.filename}:{frame.lineno}", _source(frame)


def find_token_symbol(graph: fx.GraphModule) -> torch.SymInt:
    """Return the size of `input_ids`; SpecialisedError: tracing took it for a constant."""
    for node in placeholders(graph):
        value = example_value(node)
        if node.name.strip("_").removeprefix("l_") == TOKEN_ARGUMENT and value is not None:
            size: Any = value.shape[0]
            if is_symbolic(size):
                symbol: torch.SymInt = size
                return symbol
            found = f"{size} taken for granted{_specialised_at(value)}"
            raise SpecialisedError(
                f"forward: wanted any number of tokens, found {found}; to change: {_ANY_SIZE}"
            )
    names = ", ".join(node.name for node in placeholders(graph)[:8])
    wanted = f"an argument {TOKEN_ARGUMENT} that it uses"
    raise GraphBreakError(f"forward: wanted {wanted}, found the graph inputs {names}")


def _specialised_at(value: Any) -> str:
    env = value.fake_mode.shape_env
    stacks = getattr(env, "specialization_stacks", {}).values()
    frames = [frame for stack in stacks if (frame := _user_frame(stack)) is not None]
    return f" at {frames[0].filename}:{frames[0].lineno} `{_source(frames[0])}`" if frames else ""


def unify_token_symbols(graph: fx.GraphModule, symbol: torch.SymInt) -> None:
    """Make all symbolic sizes of the graph's inputs, which the caller checked are equal, one."""
    first = None
    for node in placeholders(graph):
        value = example_value(node)
        for size in value.shape if isinstance(value, torch.Tensor) else (value,):
            if isinstance(size, torch.SymInt) and size.node.expr != symbol.node.expr:
                torch._check(size == symbol)
        if isinstance(value, torch.SymInt):
            if first is not None:
                node.replace_all_uses_with(first)
            first = first or node
    graph.recompile()


def shape_guards(symbol: torch.SymInt) -> tuple[Guard, ...]:
    """Return the conditions on the number of tokens, beyond the symbol's own, of the trace."""
    from torch.utils._sympy.printers import PythonPrinter

    env, own = symbol.node.shape_env, symbol.node.expr
    found = []
    for guard in env.guards:
        condition = env.replace(guard.expr)
        if condition.free_symbols == {own}:
            renamed = condition.xreplace({own: type(own)(NUM_TOKENS, integer=True, positive=True)})
            asked_at = getattr(guard.sloc, "maybe_user_loc", None) or guard.sloc
            found.append(Guard(PythonPrinter().doprint(renamed), str(asked_at)))
    return tuple(dict.fromkeys(found))


def warn_unrolled(graph: fx.GraphModule) -> None:
    """Warn once for each line that one module repeats more than MAX_UNROLLED times, without nodes
    of child modules between its rounds."""
    times: Counter[tuple[str, str, str]] = Counter()
    rounds: dict[tuple[str, str, str], int] = {}
    num_child_nodes: Counter[str] = Counter()
    found: dict[tuple[str, str], None] = {}
    for node in graph.graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        # The paths of the modules that it was traced in, outermost first.
        stack = node.meta.get("nn_module_stack") or {}
        *ancestors, module = ["", *(str(path) for path, _ in stack.values())]
        num_child_nodes.update(ancestors)
        where, source = traced_at(node)
        key = (module, where, str(node.target))
        if rounds.get(key) != num_child_nodes[module]:
            times[key], rounds[key] = 0, num_child_nodes[module]
        times[key] += 1
        if times[key] > MAX_UNROLLED:
            found[where, source] = None
    for where, source in found:
        logger.warning(
            "forward: wanted loops over layers alone, found `%s` at %s more than %d times in the "
            "graph; to change: %s",
            source,
            where,
            MAX_UNROLLED,
            _OPAQUE,
        )


def recompile_hazards(function: Callable[..., Any]) -> list[str]:
    """Return what in a function's source makes one graph for each value of an integer, each as
    `FILE:LINE: wanted ..., found ...`."""
    try:
        lines, first = inspect.getsourcelines(function)
    except OSError:
        return []
    tree = ast.parse(textwrap.dedent("".join(lines)))
    file = inspect.getsourcefile(function) or "<string>"
    found = [
        (first + node.lineno - 1, *hazard)
        for node in ast.walk(tree)
        if isinstance(node, (ast.expr, ast.stmt)) and (hazard := _hazard(node))
    ]
    return [f"{file}:{n}: wanted {better}, found {pattern}" for n, pattern, better in sorted(found)]


def _hazard(node: ast.AST) -> tuple[str, str] | None:
    match node:
        case ast.Call(func=ast.Attribute(attr="bit_length")):
            return "bit_length()", "next_pow2 of compile.pieces.shapes"
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=[_]):
            better = f"torch.sym_{name} of two at a time, or a value given to the forward"
            return f"{name}() of a list", better
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test):
            kind = "loop" if isinstance(node, ast.While) else "branch"
            better = "torch.where, or the decision made outside of the forward"
            return (f"a {kind} on a size", better) if _asks_for_a_size(test) else None
    return None


def _asks_for_a_size(test: ast.expr) -> bool:
    comparisons = (part for part in ast.walk(test) if isinstance(part, ast.Compare))
    return any(_is_size(part) for comparison in comparisons for part in ast.walk(comparison))


def _is_size(node: ast.AST) -> bool:
    match node:
        case (
            ast.Attribute(attr="shape")
            | ast.Call(func=ast.Attribute(attr="size" | "numel" | "stride"))
        ):
            return True
    return False
