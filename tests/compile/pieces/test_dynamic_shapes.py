"""The number of tokens stays open in all three modes, and what closes it is named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from compile.config import DynamicShapes
from compile.counters import counter
from compile.pieces.decorator import support_torch_compile
from compile.pieces.diagnose import GraphBreakError, SpecialisedError, recompile_hazards
from compile.pieces.plan import GuardError
from compile.pieces.shapes import next_pow2

MODES = list(DynamicShapes)


def module_of(forward: Any) -> Any:
    """A decorated module class with this forward."""

    class Made(nn.Module):
        pass

    Made.forward = forward  # type: ignore[method-assign]
    return support_torch_compile(Made)


def branching(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    if input_ids.shape[0] > 16:
        return input_ids - positions
    return input_ids + positions


def constant(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return (input_ids + positions).view(8, -1).sum(0) if len(input_ids) == 8 else input_ids


def plain(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return input_ids * 2 + positions


@pytest.mark.feature("J01", "J03")
@pytest.mark.parametrize(
    ("mode", "first"),
    [(mode, n) for mode in MODES for n in (8, 1) if (mode, n) != (DynamicShapes.BACKED, 1)],
)
def test_one_graph_serves_every_number_of_tokens(
    toys: Any, mode: DynamicShapes, first: int
) -> None:
    toy = toys.build(dynamic_shapes=mode)
    with counter.expect(num_graphs_seen=1):
        toys.check(toy, first, 8, 1, 2, 33)


@pytest.mark.feature("J03")
def test_backed_symbols_are_traced_with_two_tokens_or_more(
    toys: Any, caplog: pytest.LogCaptureFixture
) -> None:
    toy = toys.build(dynamic_shapes=DynamicShapes.BACKED)
    with counter.expect(num_graphs_seen=0):
        toys.check(toy, 1)
    assert "too few tokens to trace with: 1" in caplog.text
    with counter.expect(num_graphs_seen=1):
        toys.check(toy, 2, 1, 9)


@pytest.mark.feature("J01")
@pytest.mark.parametrize("mode", MODES)
def test_dropped_guards_are_counted(toys: Any, mode: DynamicShapes) -> None:
    toy = toys.build(dynamic_shapes=mode)
    before = counter.num_dropped_guards
    toy(*toys.inputs(4))
    assert counter.num_dropped_guards > before
    assert toy.compiled_forward.plan.guards == ()


@pytest.mark.feature("J01")
@pytest.mark.parametrize("mode", [DynamicShapes.BACKED, DynamicShapes.BACKED_SIZE_OBLIVIOUS])
def test_backed_symbols_list_what_was_taken_for_granted(
    toys: Any, mode: DynamicShapes, caplog: pytest.LogCaptureFixture
) -> None:
    module = toys.build(module_of(branching), dynamic_shapes=mode)
    module(*toys.inputs(8))
    (guard,) = module.compiled_forward.plan.guards
    assert guard.holds(16) and not guard.holds(17)
    assert "if input_ids.shape[0] > 16" in guard.where and "test_dynamic_shapes.py" in guard.where
    assert "traced for" in caplog.text and "alone" in caplog.text


def bits(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return input_ids * (1 << (input_ids.shape[0] - 1).bit_length()) + positions


def power(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return input_ids * next_pow2(input_ids.shape[0]) + positions


def listed(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return input_ids * max([input_ids.shape[0], 5]) + positions


def paired(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return input_ids * torch.sym_max(input_ids.shape[0], 5) + positions


@pytest.mark.feature("J05")
@pytest.mark.parametrize(
    ("hazard", "named", "remedy"),
    [
        (
            branching,
            "wanted torch.where, or the decision made outside of the forward, found",
            plain,
        ),
        (bits, "wanted next_pow2 of compile.pieces.shapes, found bit_length()", power),
        (listed, "wanted torch.sym_max of two at a time, or", paired),
    ],
)
def test_what_the_warning_names_is_one_graph_for_every_size(
    toys: Any, caplog: pytest.LogCaptureFixture, hazard: Any, named: str, remedy: Any
) -> None:
    with contextlib.suppress(SpecialisedError):
        toys.build(module_of(hazard))(*toys.inputs(8))
    assert f"{__file__}:{hazard.__code__.co_firstlineno + 1}: {named}" in caplog.text
    caplog.clear()
    module = toys.build(module_of(remedy))
    with counter.expect(num_graphs_seen=1):
        toys.check(module, 8, 2, 3, 5, 33)
    assert "found" not in caplog.text and "traced for" not in caplog.text


def halving(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    while input_ids.shape[0] > 1:
        input_ids = input_ids[: input_ids.shape[0] // 2]
    return input_ids


@pytest.mark.feature("J05")
def test_a_loop_on_a_size_is_named_too() -> None:
    (hazard,) = recompile_hazards(halving)
    assert hazard.startswith(
        f"{__file__}:{halving.__code__.co_firstlineno + 1}: wanted torch.where"
    )
    assert hazard.endswith(", found a loop on a size")


@pytest.mark.feature("J05")
def test_next_pow2_is_exact() -> None:
    power = 1
    for n in range(2**20 + 1):
        if n > power:
            power *= 2
        assert next_pow2(n) == power
    for k in range(2, 62):
        assert [next_pow2(2**k + i) for i in (-1, 0, 1)] == [2**k, 2**k, 2 ** (k + 1)]
    assert [next_pow2(n) for n in (2**62 - 1, 2**62, 2**62 + 1)] == [2**62, 2**62, 2**63]
    assert [next_pow2(n) for n in (-5, 0, 1)] == [1, 1, 1]


@pytest.mark.feature("J01")
def test_an_unbacked_symbol_refuses_to_be_asked(toys: Any) -> None:
    module = toys.build(module_of(branching), dynamic_shapes=DynamicShapes.UNBACKED)
    found = r"found a branch on a size at .*test_dynamic_shapes\.py:\d+ `if input_ids.shape\[0\]"
    with pytest.raises(GraphBreakError, match=found):
        module(*toys.inputs(8))


@pytest.mark.feature("J02")
@pytest.mark.parametrize("mode", [DynamicShapes.BACKED, DynamicShapes.BACKED_SIZE_OBLIVIOUS])
def test_a_number_of_tokens_taken_for_a_constant_is_an_error_with_its_line(
    toys: Any, mode: DynamicShapes
) -> None:
    module = toys.build(module_of(constant), dynamic_shapes=mode)
    found = r"wanted any number of tokens, found 8 taken for granted at .*test_dynamic_shapes\.py"
    with pytest.raises(SpecialisedError, match=found):
        module(*toys.inputs(8))


@pytest.mark.feature("J02")
def test_evaluated_guards_report_the_step_that_breaks_one(toys: Any) -> None:
    module = toys.build(module_of(branching), evaluate_guards=True)
    toys.check(module, 8, 1, 2, 16)
    with pytest.raises(GuardError, match=r"num_tokens: wanted .*16.* asked when traced, found 17"):
        module(*toys.inputs(17))


@pytest.mark.feature("J02")
def test_evaluated_guards_survive_a_warm_start_and_are_told_again(
    toys: Any, cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, fields = module_of(branching), {"cache_dir": str(cache_dir), "evaluate_guards": True}
    toys.build(made, **fields)(*toys.inputs(8))
    told = [record.getMessage() for record in caplog.records if "alone, as" in record.getMessage()]
    assert told
    warm = toys.build(made, **fields)
    with counter.expect(num_graphs_seen=0):
        warm(*toys.inputs(3))
        with pytest.raises(GuardError):
            warm(*toys.inputs(17))
    again = [record.getMessage() for record in caplog.records if "alone, as" in record.getMessage()]
    assert again == 2 * told


@pytest.mark.feature("E11")
def test_a_forward_without_input_ids_is_refused_by_name(toys: Any) -> None:
    def renamed(self: Any, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return tokens + positions

    module = toys.build(module_of(renamed))
    found = "wanted an argument input_ids that it uses, found the graph inputs .*l_tokens_"
    with pytest.raises(GraphBreakError, match=found):
        module(*toys.inputs(4))


@pytest.mark.feature("E09")
@pytest.mark.parametrize("mode", MODES)
def test_arguments_that_never_meet_share_the_symbol_all_the_same(
    toys: Any, mode: DynamicShapes, asked: list[Any]
) -> None:
    def apart(self: Any, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        rows = positions.shape[0]
        return input_ids * 2, positions.view(rows, 1) * torch.ones(rows, 2, dtype=torch.int64)

    module = toys.build(module_of(apart), dynamic_shapes=mode)
    for n in (6, 3):
        for a, b in zip(module(*toys.inputs(n)), toys.expected(module, n), strict=True):
            assert torch.equal(a, b)
    [call] = asked
    sizes = [s for v in call.inputs for s in (v.shape if isinstance(v, torch.Tensor) else [v])]
    assert len({str(size) for size in sizes}) == 1
