"""Passes run by name and in order, their matches are counted, and caches know what they do."""

from __future__ import annotations

import operator
import sys
from pathlib import Path

import pytest
import torch

from compile.counters import counter
from compile.errors import FieldError
from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm, add_rms_norm
from compile.passes.graph_pass import source_hash
from compile.passes.manager import PASSES, PassManager


class Swap:
    """Replaces additions by products, or by what it is told."""

    def __init__(self, name: str = "swap", replacement: object = operator.mul) -> None:
        self.name = name
        self.replacement = replacement

    def uuid(self) -> str:
        return source_hash(sys.modules[__name__], config=repr(self.replacement))

    def __call__(self, graph: torch.fx.Graph) -> int:
        found = graph.find_nodes(op="call_function", target=operator.add)
        for node in found:
            node.target = self.replacement
        return len(found)


def traced() -> torch.fx.GraphModule:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) + y

    return torch.fx.symbolic_trace(function)


def test_passes_run_in_their_order_on_a_graph_without_a_compiler() -> None:
    module = traced()
    first, second = Swap("first", operator.sub), Swap("second")
    manager = PassManager([first, second])
    with counter.expect(num_pass_matches=2):
        assert manager.apply(module) == 2
    assert module(torch.tensor(7), torch.tensor(2)).item() == 3


def test_an_unknown_name_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(FieldError) as caught:
        PassManager.from_names(["fuse_add_rms_norm", "fuse_all"])
    known = ", ".join(sorted(PASSES))
    assert str(caught.value) == f"compilation.passes: wanted names out of {known}, found 'fuse_all'"


def test_an_error_names_the_pass_that_raised_it() -> None:
    class Broken(Swap):
        def __call__(self, graph: torch.fx.Graph) -> int:
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside") as caught:
        PassManager([Broken("broken")]).apply(traced())
    assert caught.value.__notes__ == ["in graph pass 'broken'; compilation.passes turns it off"]


# --- identity -----------------------------------------------------------------------------------


def test_a_managers_uuid_follows_its_passes_and_their_order() -> None:
    first, second = Swap("first", operator.sub), Swap("second")
    uuids = [
        PassManager(passes).uuid()
        for passes in ([], [first], [second], [first, second], [second, first])
    ]
    assert len(set(uuids)) == len(uuids)
    assert PassManager([Swap("first", operator.sub)]).uuid() == PassManager([first]).uuid()


class Fuse(FuseAddRMSNorm):
    """A version of a pass."""

    def __init__(self, version: str) -> None:
        self.version = version

    def uuid(self) -> str:
        return super().uuid() + self.version


def test_inductors_caches_know_what_the_passes_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, residual, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    counts = []
    for version in ("1", "1", "2"):
        torch._dynamo.reset()
        manager, before = PassManager([Fuse(version)]), counter.num_pass_matches
        compiled = torch.compile(
            lambda *args: add_rms_norm(*args, 1e-5), options=manager.inductor_config()
        )
        with torch.inference_mode():
            found = compiled(x, residual, weight)
        assert torch.equal(found[1], x + residual)
        counts.append(counter.num_pass_matches - before)
    # The second one finds the first one's code and has nothing to rewrite; the third one does not.
    assert counts == [1, 0, 1]
