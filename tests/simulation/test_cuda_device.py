"""The engine and the KV block store on the simulated CUDA device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from cuda_bugs import BUGS
from cuda_device import NotSimulated, Order
from cuda_torch import simulated
from cuda_work import (
    Case,
    Oracle,
    all_ways,
    checkpoint,
    drawn_cases,
    found_by,
    serve,
    start,
    trace,
)

SEED = 0
NUM_RANDOM_ORDERS = 5
"""Times the factor of `--fuzz`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Serve a case of each family; with a factor of `--fuzz`, in all other ways too."""
    if "case" in metafunc.fixturenames:
        drawn = drawn_cases(SEED)
        more = all_ways() if metafunc.config.getoption("--fuzz") > 1 else []
        cases = [*drawn, *(way for way in more if way not in drawn)]
        metafunc.parametrize("case", cases, ids=str)


def test_what_is_not_modelled_raises_by_name() -> None:
    with simulated("late"), pytest.raises(NotSimulated, match="add"):
        torch.zeros(4, device="cuda").add(torch.zeros(4))


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("models"))


@pytest.mark.feature("C06", "D03", "D06", "P06", "T04", "X04")
def test_tokens_are_those_of_the_cpu_and_a_step_copies_three_times_and_waits_once(
    oracle: Oracle, case: Case, pytestconfig: pytest.Config
) -> None:
    num_random = NUM_RANDOM_ORDERS * pytestconfig.getoption("--fuzz")
    orders: list[tuple[Order, int]] = [("late", SEED), ("eager", SEED + 1)]
    orders += [("random", SEED + 2 + i) for i in range(num_random)]
    found = dict(zip(orders, serve(case, oracle, orders), strict=True))
    assert found == {order: [] for order in orders}


@pytest.fixture(scope="module")
def unplanted(oracle: Oracle) -> Callable[[Case], list[str]]:
    return cache(lambda case: found_by(case, oracle, ("late", SEED)))


@pytest.mark.feature("X04")
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_a_cpu_does_not_show_it(
    oracle: Oracle, unplanted: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    bug = BUGS[name]
    assert unplanted(bug.case) == []
    wanted = oracle.tokens(bug.case.family, SEED)
    bug.plant(monkeypatch)
    on_cpu = start(bug.case, checkpoint(oracle.root, bug.case.family), "cpu")
    assert on_cpu.generate(trace(SEED)) == wanted
    on_cpu.close()
    found = found_by(bug.case, oracle, ("late", SEED))
    assert any(bug.found in each for each in found), found
