"""The feature report tells the truth about every way in which a test can end."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGIN = Path(__file__).with_name("feature_report.py")
TABLE = "A01\tFirst\nA02\tSecond\nB01\tThird\n"
HEAD = """
import pytest
A01, A02, B01 = map(pytest.mark.feature, ("A01", "A02", "B01"))

@pytest.fixture
def broken_setup():
    raise RuntimeError("setup")

@pytest.fixture
def broken_teardown():
    yield
    raise RuntimeError("teardown")

@pytest.fixture
def no():
    pytest.skip('now')

"""
ONE, OTHER = "test_it.py::test_a", "test_it.py::test_b"
ALL_MISSING = {row: ("missing", "") for row in ("A01", "A02", "B01")}


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a table of three rows and the report's plugin."""
    tests = pytester.mkdir("tests")
    (tests / "features.txt").write_text(TABLE, encoding="utf-8")
    options = "addopts = --strict-markers -p no:cacheprovider\nmarkers = quick: selected\n"
    pytester.makeini(f"[pytest]\n{options}")
    pytester.makeconftest(PLUGIN.read_text(encoding="utf-8"))
    return pytester


def run(project: pytest.Pytester, body: str, *args: str) -> pytest.RunResult:
    project.makepyfile(test_it=HEAD + body)
    return project.runpytest_inprocess("--feature-report", *args)


def rows(result: pytest.RunResult) -> dict[str, tuple[str, str]]:
    """Return (status, tests) by id, for the lines that have the form of a row."""
    fields = (line.split("\t") for line in result.outlines if line.count("\t") == 2)
    return {row: (status, tests) for row, status, tests in fields}


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("@A02\ndef test_a(): pass", {"A02": ("working", ONE)}),
        (
            "@pytest.mark.feature('A01', 'B01')\ndef test_a(): pass",
            {"A01": ("working", ONE), "B01": ("working", ONE)},
        ),
        (
            "pytestmark = A01\n@A02\nclass TestGroup:\n"
            "    @pytest.mark.parametrize('x', [0, pytest.param(1, marks=B01)])\n"
            "    def test_a(self, x): pass",
            dict.fromkeys(ALL_MISSING, ("working", "test_it.py::TestGroup::test_a")),
        ),
        (
            "@A01\n@pytest.mark.parametrize('x', [0, 1, 2])\ndef test_a(x): assert x != 1",
            {"A01": ("failing", f"{ONE},{ONE}[1]")},
        ),
        (
            "@A01\ndef test_a(): pass\n@A01\n@pytest.mark.skip\ndef test_b(): pass",
            {"A01": ("working", f"{ONE},{OTHER}")},
        ),
        ("@A01\n@pytest.mark.skip\ndef test_a(): pass", {"A01": ("missing", ONE)}),
        ("@A01\ndef test_a(): pytest.skip('now')", {"A01": ("missing", ONE)}),
        ("@A01\ndef test_a(no): pass", {"A01": ("missing", ONE)}),
    ],
)
def test_a_row_works_if_all_of_its_tests_that_ran_passed(
    project: pytest.Pytester, body: str, wanted: dict[str, tuple[str, str]]
) -> None:
    """Cases that passed share an entry; rows are in the order of the table."""
    result = run(project, body)
    assert list(rows(result).items()) == list({**ALL_MISSING, **wanted}.items())
    is_failing = any(status == "failing" for status, _ in wanted.values())
    assert result.ret == (pytest.ExitCode.TESTS_FAILED if is_failing else pytest.ExitCode.OK)


@pytest.mark.parametrize("args", [("-k", "test_a"), ("-m", "quick")])
def test_a_test_that_is_not_selected_did_not_run(
    project: pytest.Pytester, args: tuple[str, str]
) -> None:
    body = "@A01\n@pytest.mark.quick\ndef test_a(): pass\n@A02\ndef test_b(): assert False"
    result = run(project, body, *args)
    assert rows(result) == {**ALL_MISSING, "A01": ("working", ONE)}
    assert result.ret == pytest.ExitCode.OK


@pytest.mark.parametrize(
    "body",
    [
        "def test_b(): assert False",
        "def test_b(broken_setup): pass",
        "def test_b(broken_teardown): pass",
        "@pytest.mark.xfail\ndef test_b(): assert False",
        "@pytest.mark.xfail(run=False)\ndef test_b(): pass",
        "@pytest.mark.xfail(strict=False)\ndef test_b(): pass",
        "@pytest.mark.xfail(strict=True)\ndef test_b(): pass",
    ],
    ids=["call", "setup", "teardown", "xfail", "xfail-not-run", "xpass", "strict-xpass"],
)
def test_one_test_that_does_not_pass_makes_its_row_failing(
    project: pytest.Pytester, body: str
) -> None:
    result = run(project, f"pytestmark = A01\ndef test_a(): pass\n{body}\n")
    assert rows(result)["A01"] == ("failing", f"{ONE},{OTHER}")


def test_a_test_without_a_row_that_fails_is_no_row_and_fails_the_run(
    project: pytest.Pytester,
) -> None:
    result = run(project, "@A01\ndef test_a(): pass\ndef test_unmarked(): assert False\n")
    assert rows(result)["A01"] == ("working", ONE)
    assert result.ret == pytest.ExitCode.TESTS_FAILED


def test_a_test_cut_short_by_an_interrupt_does_not_make_its_row_work(
    project: pytest.Pytester,
) -> None:
    project.makepyfile(test_it=f"{HEAD}@A01\ndef test_a(): raise KeyboardInterrupt\n")
    result = project.runpytest_subprocess("--feature-report")
    assert rows(result)["A01"] == ("failing", ONE)
    assert result.ret == pytest.ExitCode.INTERRUPTED


def test_runs_that_share_a_file_of_results_make_one_table(project: pytest.Pytester) -> None:
    kept = ("--feature-results", "results.json")
    run(project, "@A01\ndef test_a(): pass\n", *kept)
    broken = "@A02\ndef test_b(): assert False\n"
    found = rows(run(project, broken, *kept))
    assert found == {**ALL_MISSING, "A01": ("working", ONE), "A02": ("failing", OTHER)}
    mended = "@A02\ndef test_b(): pass\n"
    assert rows(run(project, mended, *kept))["A02"] == ("working", OTHER)
    assert rows(run(project, mended))["A01"] == ("missing", "")


@pytest.mark.parametrize("flag", [(), ("--feature-report",)], ids=["plain", "report"])
@pytest.mark.parametrize(
    ("mark", "found"),
    [
        ("feature('Z99')", "'Z99'"),
        ("feature('A01', 'a01')", "'a01'"),
        ("feature(1)", "1"),
        ("feature()", "0 ids"),
        ("feature('A01', why='x')", "1 keywords"),
    ],
)
def test_a_wrong_mark_is_a_collection_error_that_names_the_test(
    project: pytest.Pytester, mark: str, found: str, flag: tuple[str, ...]
) -> None:
    project.makepyfile(
        test_bad=f"import pytest\nclass TestX:\n  @pytest.mark.{mark}\n  def test_a(self): pass\n",
        test_good="def test_b(): pass\n",
    )
    result = project.runpytest_inprocess(*flag)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        [f"*feature: wanted ids of *{found}* on test_bad.py::TestX::test_a"]
    )


@pytest.mark.parametrize(
    ("table", "found"),
    [
        ("A01\tOne\nA01\tAgain\n", "*features.txt:2: *'A01*Again'"),
        ("A01 One\n", "*features.txt:1: *'A01 One'"),
        (None, "*wanted the table *features.txt, found No such file*"),
    ],
    ids=["twice", "no-tab", "none"],
)
def test_a_wrong_table_is_a_usage_error_that_names_the_line(
    project: pytest.Pytester, table: str | None, found: str
) -> None:
    path = project.path / "tests" / "features.txt"
    if table is None:
        path.unlink()
    else:
        path.write_text(table, encoding="utf-8")
    result = run(project, "def test_a(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([found])


def test_nothing_is_printed_without_the_option(project: pytest.Pytester) -> None:
    project.makepyfile(test_it="def test_a(): pass\n")
    result = project.runpytest_inprocess()
    assert rows(result) == {}
    result.stdout.no_fnmatch_line("*feature report*")
