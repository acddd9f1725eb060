"""`pytest --feature-report`: which rows of `tests/features.txt` have passing tests.

A test names the rows it shows with `@pytest.mark.feature("A01", "A02")`. After the run each row
prints one line, `ID<TAB>working|failing|missing<TAB>tests`. Cases of one parametrized test that
passed share one entry. A row works when at least one of its tests ran and every one that ran passed
its setup, call and teardown. A skipped test did not run; one that is expected to fail, or
unexpectedly passed, did not pass. The exit code stays pytest's.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

TABLE = Path("tests", "features.txt")
"""Relative to pytest's root directory: one `ID<TAB>title` a line."""
PROPERTY = "feature"
"""The user property that carries a test's ids; it travels with its reports."""
PHASES = frozenset({"setup", "call", "teardown"})


class Status(Enum):
    """What the run showed about a row, or about one test."""

    WORKING = "working"
    """Ran, and passed in every phase."""
    FAILING = "failing"
    """Ran, and something did not pass."""
    MISSING = "missing"
    """Did not run: no test is marked, selected or left unskipped."""


class FeatureError(Exception):
    """A mark or the table holds what cannot be used."""


@functools.cache
def read_table(path: Path) -> dict[str, str]:
    """Return the titles by id, in the order of the table.

    Raises:
        FeatureError: the file is missing, a line has no tab, or an id occurs twice.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise FeatureError(f"feature: wanted the table {path}, found {error.strerror}") from error
    titles: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        row, tab, title = line.partition("\t")
        if not tab or not row or row in titles:
            wanted = "a new id, a tab and a title"
            raise FeatureError(f"{path}:{number}: wanted {wanted}, found {line!r}")
        titles[row] = title
    return titles


def marked_rows(item: pytest.Item) -> list[str]:
    """Return the ids that the test's marks name, each once.

    Raises:
        FeatureError: a mark names no id or one that is not in the table; names the test.
    """
    rows: dict[str, None] = {}
    for mark in item.iter_markers("feature"):
        table = read_table(item.config.rootpath / TABLE)
        wanted = f"wanted ids of {TABLE}"
        if not mark.args or mark.kwargs:
            found = f"{len(mark.args)} ids and {len(mark.kwargs)} keywords"
            raise FeatureError(f"feature: {wanted}, found {found} on {item.nodeid}")
        for row in mark.args:
            if row not in table:
                raise FeatureError(f"feature: {wanted}, found {row!r} on {item.nodeid}")
            rows[row] = None
    return list(rows)


@dataclass
class Result:
    """One test's phases as they are reported."""

    passed: set[str] = field(default_factory=set)
    is_failed: bool = False
    is_skipped: bool = False

    def add(self, report: pytest.TestReport) -> None:
        """Take in one phase. An expected failure counts as a failure, whatever came of it."""
        if report.failed or hasattr(report, "wasxfail"):
            self.is_failed = True
        elif report.skipped:
            self.is_skipped = True
        else:
            self.passed.add(report.when)

    @classmethod
    def of(cls, status: Status) -> Result:
        """Return what has a status."""
        passed = set(PHASES) if status is Status.WORKING else set()
        return cls(passed, status is Status.FAILING, status is Status.MISSING)

    @property
    def status(self) -> Status:
        """A test that was cut short between two phases did not pass."""
        if self.is_failed:
            return Status.FAILING
        if self.is_skipped:
            return Status.MISSING
        return Status.WORKING if self.passed >= PHASES else Status.FAILING


class FeatureReport:
    """Collects the results of marked tests and prints the table.

    With a file, results of earlier runs that are kept there count too, and are kept on: one table
    for several runs, each of other tests.
    """

    def __init__(self, titles: dict[str, str], kept: Path | None = None) -> None:
        self._results: dict[str, dict[str, Result]] = {row: {} for row in titles}
        self._kept = kept
        if kept is not None and kept.exists():
            for row, tests in json.loads(kept.read_text(encoding="utf-8")).items():
                self._results[row] = {test: Result.of(Status(was)) for test, was in tests.items()}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for row in (value for name, value in report.user_properties if name == PROPERTY):
            tests = self._results[str(row)]
            if report.when == "setup" or report.nodeid not in tests:
                tests[report.nodeid] = Result()
            tests[report.nodeid].add(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        rows = {row: _status(tests.values()) for row, tests in self._results.items()}
        found = list(rows.values())
        counts = ", ".join(f"{found.count(status)} {status.value}" for status in Status)
        terminalreporter.write_sep("=", f"feature report: {counts}")
        for row, status in rows.items():
            terminalreporter.write_line(f"{row}\t{status.value}\t{_tests(self._results[row])}")
        if self._kept is not None:
            kept = {
                row: {test: result.status.value for test, result in tests.items()}
                for row, tests in self._results.items()
            }
            self._kept.write_text(json.dumps(kept), encoding="utf-8")


def _tests(results: dict[str, Result]) -> str:
    """Name each test function once, without its parameters, and in full what did not pass."""
    names = (
        test if result.status is Status.FAILING else test.partition("[")[0]
        for test, result in results.items()
    )
    return ",".join(dict.fromkeys(names))


def _status(results: Iterable[Result]) -> Status:
    found = {result.status for result in results}
    if Status.FAILING in found:
        return Status.FAILING
    return Status.WORKING if Status.WORKING in found else Status.MISSING


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lockstep")
    group.addoption(
        "--feature-report",
        action="store_true",
        help="after the run print ID, working|failing|missing and tests of each feature row",
    )
    group.addoption(
        "--feature-results",
        type=Path,
        metavar="FILE",
        help="with --feature-report: also count the results that earlier runs left in FILE",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "feature(ID, ...): the feature rows that this test shows")
    if config.getoption("--feature-report"):
        try:
            titles = read_table(config.rootpath / TABLE)
        except FeatureError as error:
            raise pytest.UsageError(str(error)) from error
        config.pluginmanager.register(
            FeatureReport(titles, config.getoption("--feature-results")), "lockstep-feature-report"
        )


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    """Attach each test's ids to it; an unknown id is an error of the module's collection."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item):
            try:
                rows = marked_rows(item)
            except FeatureError as error:
                raise pytest.Collector.CollectError(str(error)) from error
            item.user_properties.extend((PROPERTY, row) for row in rows)
    return made
