"""What runs and judges rows: processes for ranks, and a compile cache that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def rank_processes() -> Iterator[Any]:
    from parity_run import RankProcesses

    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A family is compiled once, whatever the mode."""
    return str(tmp_path_factory.mktemp("compile-cache"))


@pytest.fixture
def judge(make_oracle: Callable[[str], Any], rank_processes: Any, cache_dir: str) -> Any:
    """(row): run a row and judge it."""
    from parity_judge import check
    from parity_rows import Row
    from parity_run import run_row

    def judge(row: Row) -> None:
        made = make_oracle(row.shape)
        if row.has_adapters:
            made.write_adapters()
        oracle = replace(made, has_fp8_kv=row.has_fp8_kv)
        if row.held != "none":
            oracle = oracle.with_integers(row.held, row.tp)
        drawn = None
        if not all(request.is_greedy for request in row.requests(oracle)):
            drawn = run_row(row.alone(), oracle, rank_processes, cache_dir).tokens
        check(run_row(row, oracle, rank_processes, cache_dir), drawn)

    return judge
