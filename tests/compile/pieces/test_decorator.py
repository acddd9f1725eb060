"""A decorated module is traced at most once; every call runs the same written function."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import fx, nn

from compile.cache.index import CompileCache
from compile.config import CUDAGraphMode
from compile.counters import counter
from compile.graphs.capture import LateCompilation, seal, unseal
from compile.pieces.decorator import ForwardError, compile_as_is, support_torch_compile
from compile.pieces.diagnose import GraphBreakError, TraceError
from compile.pieces.piecewise import PiecewiseBackend
from compile.pieces.plan import ForwardPlan

# --- the class --------------------------------------------------------------------------------


@pytest.mark.feature("I01")
@pytest.mark.parametrize(("level", "compiles"), [(0, False), (1, False), (2, True), (3, True)])
def test_levels_0_and_1_leave_the_forward_as_it_is(toys: Any, level: int, compiles: bool) -> None:
    toy = toys.build(level=level)
    with counter.expect(num_graphs_seen=int(compiles)):
        toys.check(toy, 3, 5)


@pytest.mark.feature("I01")
def test_decorating_twice_is_an_error(toys: Any) -> None:
    class Once(toys.Plain):  # type: ignore[misc]
        pass

    class Derived(support_torch_compile(Once)):  # type: ignore[misc]
        pass

    for decorated in (Once, Derived):
        with pytest.raises(TypeError, match="wanted a class that is not decorated"):
            support_torch_compile(decorated)


@pytest.mark.feature("I01")
def test_the_decorator_takes_arguments_and_keeps_the_class(toys: Any) -> None:
    class Plain(toys.Plain):  # type: ignore[misc]
        """Says something."""

    found = support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": -1})(Plain)
    assert found is Plain and found.__doc__ == "Says something."
    toy = toys.build(found)
    toys.check(toy, 4)
    assert toy.compiled_forward.plan.symbolic_dims == ((0,), (0,))


# --- dimensions -------------------------------------------------------------------------------


class Unannotated(nn.Module):
    def forward(self, input_ids, scale: float = 1.0):  # type: ignore[no-untyped-def]
        return input_ids


@pytest.mark.feature("I02")
def test_no_dimension_and_an_unknown_argument_are_errors() -> None:
    with pytest.raises(ValueError, match=r"Unannotated\.forward: wanted an argument annotated"):
        support_torch_compile(Unannotated)
    with pytest.raises(ValueError, match=r"wanted arguments of Unannotated.*, found 'nobody'"):
        support_torch_compile(Unannotated, dynamic_arg_dims={"nobody": 0})


@pytest.mark.feature("I02")
def test_a_dimension_counted_from_the_end_stays_symbolic(toys: Any) -> None:
    class Rows(nn.Module):
        """Positions come as three rows, tokens last."""

        def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            return input_ids * 2 + positions.sum(0)

    made = support_torch_compile(Rows, dynamic_arg_dims={"input_ids": 0, "positions": -1})
    module = toys.build(made)
    with counter.expect(num_graphs_seen=1):
        for n in (4, 1, 9):
            ids, rows = torch.arange(n), torch.arange(3 * n).view(3, n)
            assert torch.equal(module(ids, rows), ids * 2 + rows.sum(0))


@pytest.mark.feature("I02")
def test_a_dimension_that_an_argument_lacks_is_refused(toys: Any) -> None:
    class Flat(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids * 2

    module = toys.build(support_torch_compile(Flat, dynamic_arg_dims={"input_ids": 1}))
    with pytest.raises(ForwardError, match="wanted a dimension of input_ids, which has 1, found 1"):
        module(torch.arange(4))


# --- calls ------------------------------------------------------------------------------------


@pytest.mark.feature("I03", "J04")
def test_no_batch_compiles_after_the_first_call(toys: Any) -> None:
    toy = toys.build(compile_sizes=(1, 4, 16))
    toy(*toys.inputs(16))
    rng = random.Random(0)
    sizes = [*range(1, 65), *(rng.randint(1, 512) for _ in range(40))]
    rng.shuffle(sizes)
    with counter.expect(num_graphs_seen=0, num_backend_compilations=0, num_dropped_guards=0):
        toys.check(toy, *sizes)


@pytest.mark.feature("J07")
def test_a_decision_on_data_is_refused_inside_of_a_forward_and_taken_when_made_before(
    toys: Any,
) -> None:
    class Inside(nn.Module):
        def forward(self, input_ids: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
            return input_ids * 2 if data.sum() >= 4 else input_ids + 1

    class Before(nn.Module):
        def forward(self, input_ids: torch.Tensor, is_large: torch.Tensor) -> torch.Tensor:
            return torch.where(is_large, input_ids * 2, input_ids + 1)

    ids, only = torch.arange(5), {"input_ids": 0}
    inside = toys.build(support_torch_compile(dynamic_arg_dims=only)(Inside))
    remedy = "a branch on a value.*use torch.where, or decide before the forward"
    with pytest.raises(GraphBreakError, match=remedy):
        inside(ids, torch.tensor([2, 2]))
    before = toys.build(support_torch_compile(dynamic_arg_dims=only)(Before))
    with counter.expect(num_graphs_seen=1):
        for data in ([1, 2], [2, 2], [5, 0]):
            is_large = torch.tensor(data).sum() >= 4
            assert torch.equal(before(ids, is_large), ids * 2 if is_large else ids + 1)


class Choosy(nn.Module):
    """Takes tokens, and embeddings or none; each annotation of a tensor means one."""

    def forward(
        self,
        input_ids: torch.Tensor,
        embeds: Optional[torch.Tensor] = None,  # noqa: UP045
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = input_ids.float()
        if embeds is not None:
            x = x + embeds
        if positions is not None:
            x = x * positions
        return x


support_torch_compile(Choosy)


def test_arguments_that_were_none_stay_none(toys: Any) -> None:
    module = toys.build(Choosy)
    ids, positions = toys.inputs(4)
    expected = ids.float() * positions
    for _ in range(2):
        assert torch.equal(module(ids, None, positions), expected)
        assert torch.equal(module(ids, positions=positions), expected)
    # Two tensors in a row would fit by number and mean something else.
    for wrong in ((ids, positions), (ids,), (ids, positions, positions)):
        with pytest.raises(ForwardError, match="wanted the arguments input_ids, positions as trac"):
            module(*wrong)


def test_an_argument_that_is_no_tensor_is_refused(toys: Any) -> None:
    class Scaled(nn.Module):
        def forward(self, input_ids: torch.Tensor, scale: float) -> torch.Tensor:
            return input_ids * scale

    module = toys.build(support_torch_compile(Scaled))
    with pytest.raises(ForwardError, match=r"Scaled.forward\(scale\): wanted a tensor or None"):
        module(torch.arange(4), 2.0)


def test_arguments_of_different_lengths_are_refused_when_traced(toys: Any) -> None:
    toy = toys.build()
    ids, positions = toys.inputs(6)
    with pytest.raises(ForwardError, match="wanted one number of tokens in all arguments, found"):
        toy(ids, positions[:5])
    assert torch.equal(toy(ids, positions), toys.expected(toy, 6))


def test_the_callers_tensors_are_not_marked(toys: Any) -> None:
    given = toys.inputs(6)
    toys.build()(*given)
    for tensor in given:
        assert not [name for name in vars(tensor) if "dynamo" in name]


def test_the_same_tensor_for_both_arguments_does_not_merge_them(toys: Any) -> None:
    toy = toys.build()
    ids = torch.arange(6)
    toy(ids, ids)
    toys.check(toy, 5)


@pytest.mark.parametrize("inference", [True, False])
def test_inference_mode_may_differ_from_call_to_call(toys: Any, inference: bool) -> None:
    toy = toys.build()
    for mode in (inference, not inference):
        with torch.inference_mode(mode):
            toys.check(toy, 5)


def test_tuples_and_lists_of_results_keep_their_order(toys: Any) -> None:
    class Several(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            a, b = input_ids + 1, input_ids * 2
            return b, (a, b), a

    module = toys.build(support_torch_compile(Several))
    ids = torch.arange(5)
    for _ in range(2):
        b, (a, b_again), a_again = module(ids)
        assert torch.equal(a, ids + 1) and torch.equal(b, ids * 2)
        assert a is a_again and b is b_again


@pytest.mark.parametrize("what", ["an argument", "a dictionary"])
def test_results_that_the_graph_does_not_compute_are_refused(toys: Any, what: str) -> None:
    class Returns(nn.Module):
        def forward(self, input_ids: torch.Tensor) -> Any:
            return {"x": input_ids + 1} if what == "a dictionary" else (input_ids + 1, input_ids)

    module = toys.build(support_torch_compile(Returns))
    with pytest.raises(TraceError, match="wanted a tensor or a tuple of tensors that it computes"):
        module(torch.arange(4))


# --- side effects -----------------------------------------------------------------------------


class Stateful(nn.Module):
    """Has state that a forward may change."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"steps": 0}
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))


@support_torch_compile
class Counting(Stateful):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.seen["steps"] = self.seen["steps"] + 1
        return input_ids + 1


@support_torch_compile
class Summing(Stateful):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.total = self.total + input_ids.sum()
        return input_ids + 1


STEPS = 0


@support_torch_compile
class Assigning(Stateful):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        global STEPS
        STEPS = STEPS + 1
        return input_ids + 1


@support_torch_compile
class Writing(Stateful):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.total.add_(input_ids.sum())
        return input_ids + 1


@pytest.mark.feature("I04")
@pytest.mark.parametrize("made", [Counting, Summing])
@pytest.mark.parametrize("mode", [CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL])
def test_changing_state_is_refused_while_graphs_are_on(
    toys: Any, made: Any, mode: CUDAGraphMode
) -> None:
    module = toys.build(made, cudagraph_mode=mode)
    wanted = r"wanted a forward that changes no Python state .*found .*a call of update"
    with pytest.raises(TraceError, match=wanted):
        module(torch.arange(4))
    assert module.seen == {"steps": 0} and module.total == 0


@pytest.mark.feature("I04")
@pytest.mark.parametrize("config", [{}, {"cudagraph_mode": "FULL", "use_cudagraph": False}])
def test_changing_state_works_while_graphs_are_off(
    toys: Any, config: dict[str, Any], cache_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        module = toys.build(Summing, cache_dir=str(cache_dir), **config)
        with counter.expect(num_graphs_seen=1):
            for n in (4, 1, 9, 4):
                ids = torch.arange(n)
                assert torch.equal(module(ids), ids + 1)
        assert module.total == sum(sum(range(n)) for n in (4, 1, 9, 4))
    assert "not kept in the cache, because it has side effects: a call of update" in caplog.text


def test_assigning_to_a_global_is_seen_outside(toys: Any) -> None:
    before = STEPS
    module = toys.build(Assigning, cudagraph_mode=CUDAGraphMode.NONE)
    assert torch.equal(module(torch.arange(4)), torch.arange(4) + 1)
    assert before + 1 == STEPS


def test_writing_into_a_buffer_is_part_of_the_graph(toys: Any) -> None:
    module = toys.build(Writing, cudagraph_mode=CUDAGraphMode.FULL)
    for n in (4, 3):
        module(torch.arange(n))
    assert module.total == 6 + 3
    # Dynamo leaves the graph among the globals.
    assert not [name for name, value in globals().items() if isinstance(value, fx.GraphModule)]


# --- warm starts ------------------------------------------------------------------------------


@pytest.fixture
def warm(toys: Any, cache_dir: Path) -> dict[str, Any]:
    """Fields of a scope whose cache holds the plan and the artifacts of a toy."""
    fields = {"cache_dir": str(cache_dir), "compile_sizes": (4,)}
    toys.build(**fields)(*toys.inputs(6))
    return fields


@pytest.mark.feature("F05")
def test_a_later_start_loads_its_pieces_and_neither_traces_nor_compiles(
    toys: Any, warm: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    run = PiecewiseBackend.__call__

    def note(self: Any, *args: Any) -> Any:
        calls.append(self.index)
        return run(self, *args)

    monkeypatch.setattr(PiecewiseBackend, "__call__", note)
    toy = toys.build(**warm)
    with counter.expect(
        num_graphs_seen=0,
        num_backend_compilations=0,
        num_dropped_guards=0,
        num_compiled_artifacts_loaded=3 * 2,
    ):
        toys.check(toy, 6)
    # As often as in a rank that traces, so that ranks meet that meet inside a forward.
    assert calls == [0, 1, 2, 3]
    calls.clear()
    toys.build()(*toys.inputs(6))
    assert calls == [0, 1, 2, 3]
    with torch.no_grad():  # its weights are those of its own module
        toy.layers[0].o.weight.add_(1)
    toys.check(toy, 6, 1, 4)


@pytest.mark.parametrize(
    "spoil",
    {
        "cut short": lambda text: text[:100],
        "another forward": lambda text: text.replace("Toy.forward", "Other.forward"),
        "other weights": lambda text: text.replace("torch.float32 [8, 8]", "torch.float32 [8, 9]"),
        "other arguments": lambda text: text.replace("torch.int64 of 1", "torch.int32 of 1"),
        "another key": lambda text: text.replace(ForwardPlan.from_json(text).pieces[1].key, "0"),
        "another version": lambda text: text.replace('"version": 1', '"version": 0'),
        "no plan": lambda _: "[]",
    }.values(),
)
def test_a_plan_that_is_of_no_use_is_traced_again(
    toys: Any,
    warm: dict[str, Any],
    spoil: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    load = CompileCache.load_plan
    monkeypatch.setattr(CompileCache, "load_plan", lambda self: spoil(load(self) or ""))
    with counter.expect(num_graphs_seen=1):
        toy = toys.build(**warm)
        toys.check(toy, 6)
    assert "traced again, because its plan is of no use" in caplog.text
    monkeypatch.undo()


@pytest.mark.feature("F04")
def test_sizes_that_are_compiled_lazily_need_the_graph_and_so_a_trace(
    toys: Any, warm: dict[str, Any], asked: list[Any]
) -> None:
    toy = toys.build(**{**warm, "compile_sizes": (5,)}, compile_lazily=True)
    with counter.expect(num_graphs_seen=1):
        toys.check(toy, 5, 5, 5)
    assert [call.shape for call in asked] == [None] * 4 + [5] * 4


# --- level 1 ----------------------------------------------------------------------------------


@pytest.mark.feature("A02")
def test_level_1_still_evaluates_guards(toys: Any) -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flag = True

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids + 1 if self.flag else input_ids - 1

    module = Flagged()
    run = compile_as_is(module)
    assert run(torch.arange(3)).tolist() == [1, 2, 3]
    seal("strict")
    module.flag = False
    with pytest.raises(LateCompilation, match="Flagged, traced again as a guard failed"):
        run(torch.arange(3))
    unseal()
    assert run(torch.arange(3)).tolist() == [-1, 0, 1]
