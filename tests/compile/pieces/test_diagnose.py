"""What keeps a forward from being one graph is named: the call, file, line and a remedy."""

from __future__ import annotations

import builtins
import ctypes
import inspect
import logging
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from compile.counters import counter
from compile.pieces.decorator import compile_as_is, support_torch_compile
from compile.pieces.diagnose import GraphBreakError

logger = logging.getLogger(__name__)
libc = ctypes.CDLL(None)


@pytest.fixture(autouse=True)
def _python_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray replaces `print` in a process that it is started in; then its lock breaks the graph."""
    ray_progress = sys.modules.get("ray.experimental.tqdm_ray")
    if ray_progress is not None:
        monkeypatch.setattr(builtins, "print", ray_progress._print)


# One toy for each row; the line that ends in `# here` is the one to be named.


def prints(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    print(y)  # here
    return y


def breakpoints(x: torch.Tensor) -> torch.Tensor:
    breakpoint()  # here
    return x + 1


def logs(x: torch.Tensor) -> torch.Tensor:
    logger.info("a step of %d", x.shape[0])  # here
    return x + 1


def calls_native_code(x: torch.Tensor) -> torch.Tensor:
    return x + libc.abs(-3)  # here


def nonzeros(x: torch.Tensor) -> torch.Tensor:
    return x[x.nonzero()].sum() + x  # here


def lists(x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.tolist())  # here


def items(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()  # here


def ints(x: torch.Tensor) -> torch.Tensor:
    return x * int(x[0])  # here


def branches_on_a_value(x: torch.Tensor) -> torch.Tensor:
    if x.sum() > 0:  # here
        return x
    return -x


def ranges_over_a_value(x: torch.Tensor) -> torch.Tensor:
    for _ in range(x[0].item()):  # here
        x = x + 1
    return x


def ranges_over_a_size(x: torch.Tensor) -> torch.Tensor:
    for _ in range(x.shape[0]):  # here
        x = x + 1
    return x


BREAKS: list[tuple[Callable[..., Any], str, str]] = [
    (prints, "print", "remove it"),
    (breakpoints, "breakpoint", "level 0"),
    (logs, "a call of a logger", "log around the forward"),
    (calls_native_code, "a native call", "hide it in an op"),
    (nonzeros, "nonzero", "torch.where with three arguments"),
    (lists, "tolist", "compute it before the forward"),
    (items, "item", "compute it before the forward"),
    (ints, "int or float of a tensor", "compute it before the forward"),
    (branches_on_a_value, "a branch on a value", "torch.where, or decide before"),
    (ranges_over_a_value, "a range over a value", "loop inside an op"),
    (ranges_over_a_size, "5 taken for granted", "any number of tokens"),
]


def module_of(toy: Callable[..., Any]) -> Any:
    class Made(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return toy(input_ids)

    return support_torch_compile(Made)


def line_of(toy: Callable[..., Any]) -> tuple[int, str]:
    lines, first = inspect.getsourcelines(toy)
    number = next(i for i, line in enumerate(lines) if "# here" in line)
    return first + number, lines[number].strip()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.feature("J06", "A07")
@pytest.mark.parametrize(
    ("toy", "what", "remedy"), BREAKS, ids=[toy.__name__ for toy, *_ in BREAKS]
)
def test_a_break_is_one_line_with_its_place_and_a_remedy(
    toys: Any, toy: Callable[..., Any], what: str, remedy: str
) -> None:
    module = toys.build(lambda: module_of(toy)())
    with pytest.raises(GraphBreakError) as error:
        module(torch.arange(5))
    number, source = line_of(toy)
    message = str(error.value)
    assert "\n" not in message
    assert re.fullmatch(r"forward: wanted .*, found .* at .*; to change: .*", message)
    assert f"found {what} at {__file__}:{number} `{source}`" in message
    assert remedy in message.split("to change: ")[1]


@pytest.mark.feature("A02", "A07")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_no_part_of_a_broken_forward_is_compiled(toys: Any, level: int) -> None:
    module = toys.build(lambda: module_of(prints)(), level=level)
    run = compile_as_is(module) if level == 1 else module
    with (
        counter.expect(num_backend_compilations=0),
        pytest.raises(GraphBreakError, match="found print at"),
    ):
        run(torch.arange(5))


def test_an_error_of_the_forward_itself_is_not_called_a_break(toys: Any) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8) @ torch.ones(3, 3)

    module = toys.build(lambda: module_of(wrong)())
    with pytest.raises(Exception, match=r"shape|size|dtype") as error:
        module(torch.arange(8))
    assert error.type is not GraphBreakError


@pytest.fixture
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes time by the round."""
    monkeypatch.setattr("compile.pieces.diagnose.MAX_UNROLLED", 8)


def looped(rounds: int) -> Callable[..., Any]:
    def loop(x: torch.Tensor) -> torch.Tensor:
        for i in range(rounds):
            x = x * 2 + i  # here
        return x

    return loop


@pytest.mark.feature("J08")
@pytest.mark.usefixtures("_few_rounds")
def test_a_long_loop_warns_with_its_line(toys: Any, caplog: pytest.LogCaptureFixture) -> None:
    toy = looped(9)
    toys.build(lambda: module_of(looped(8))())(torch.arange(3))
    toys.build(lambda: module_of(toy)())(torch.arange(3))
    messages = [record.getMessage() for record in caplog.records]
    (warning,) = [message for message in messages if "loops over layers alone" in message]
    number, source = line_of(toy)
    assert f"found `{source}` at {__file__}:{number} more than 8 times" in warning


@pytest.mark.feature("J08")
@pytest.mark.usefixtures("_few_rounds")
def test_a_loop_over_layers_does_not_warn(toys: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Deep(toys.Plain):  # type: ignore[misc]
        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids) + positions.unsqueeze(-1)
            for layer in self.layers:
                x = x + layer(x) * 0.1
            return x

    toy = toys.build(lambda: support_torch_compile(Deep)(12))
    toy(*toys.inputs(3))
    assert "more than" not in caplog.text
