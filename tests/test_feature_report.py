"""The feature report tells the truth about every way in which a test can end."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGIN = Path(__file__).with_name("feature_report.py")
TABLE = "A01\tFirst\nA02\tSecond\nB01\tThird\n"

MARKED = """
import pytest

@pytest.fixture
def broken_setup():
    raise RuntimeError("setup")

@pytest.fixture
def broken_teardown():
    yield
    raise RuntimeError("teardown")

"""


@pytest.fixture
def project(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with a table of three rows and the report's plugin."""
    tests = pytester.mkdir("tests")
    (tests / "features.txt").write_text(TABLE, encoding="utf-8")
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    pytester.makeconftest(PLUGIN.read_text(encoding="utf-8"))
    return pytester


def run(project: pytest.Pytester, body: str, *args: str) -> pytest.RunResult:
    project.makepyfile(test_it=MARKED + body)
    return project.runpytest_inprocess("--feature-report", *args)


def rows(result: pytest.RunResult) -> dict[str, tuple[str, str]]:
    """Return (status, tests) by id, for the lines that have the form of a row."""
    fields = (line.split("\t") for line in result.outlines if line.count("\t") == 2)
    return {row: (status, tests) for row, status, tests in fields}


def test_every_row_is_printed_in_the_order_of_the_table(project: pytest.Pytester) -> None:
    result = run(project, "@pytest.mark.feature('A02')\ndef test_a(): pass\n")
    assert list(rows(result).items()) == [
        ("A01", ("missing", "")),
        ("A02", ("working", "test_it.py::test_a")),
        ("B01", ("missing", "")),
    ]
    assert result.ret == pytest.ExitCode.OK


def test_one_mark_may_name_several_rows(project: pytest.Pytester) -> None:
    result = run(project, "@pytest.mark.feature('A01', 'B01')\ndef test_a(): pass\n")
    assert rows(result)["A01"] == rows(result)["B01"] == ("working", "test_it.py::test_a")


def test_runs_that_share_a_file_of_results_make_one_table(project: pytest.Pytester) -> None:
    kept = ("--feature-results", "results.json")
    run(project, "@pytest.mark.feature('A01')\ndef test_a(): pass\n", *kept)
    body = "@pytest.mark.feature('A02')\ndef test_b(): assert False\n"
    assert rows(run(project, body, *kept)) == {
        "A01": ("working", "test_it.py::test_a"),
        "A02": ("failing", "test_it.py::test_b"),
        "B01": ("missing", ""),
    }
    body = "@pytest.mark.feature('A02')\ndef test_b(): pass\n"
    assert rows(run(project, body, *kept))["A02"] == ("working", "test_it.py::test_b")
    assert rows(run(project, body))["A01"] == ("missing", "")


def test_marks_of_class_module_and_parameter_count(project: pytest.Pytester) -> None:
    body = """
pytestmark = pytest.mark.feature("A01")

@pytest.mark.feature("A02")
class TestGroup:
    @pytest.mark.parametrize("x", [0, pytest.param(1, marks=pytest.mark.feature("B01"))])
    def test_a(self, x): pass
"""
    found = rows(run(project, body))
    assert set(found.values()) == {("working", "test_it.py::TestGroup::test_a")}


def test_cases_that_passed_share_an_entry_and_one_that_did_not_is_named(
    project: pytest.Pytester,
) -> None:
    body = """
pytestmark = pytest.mark.feature("A01")

@pytest.mark.parametrize("x", [0, 1, 2])
def test_a(x): assert x != 1
"""
    assert rows(run(project, body))["A01"] == (
        "failing",
        "test_it.py::test_a,test_it.py::test_a[1]",
    )


@pytest.mark.parametrize(
    "body",
    [
        "def test_a(): assert False",
        "def test_a(broken_setup): pass",
        "def test_a(broken_teardown): pass",
        "@pytest.mark.xfail\ndef test_a(): assert False",
        "@pytest.mark.xfail(run=False)\ndef test_a(): pass",
        "@pytest.mark.xfail(strict=False)\ndef test_a(): pass",
        "@pytest.mark.xfail(strict=True)\ndef test_a(): pass",
    ],
    ids=["call", "setup", "teardown", "xfail", "xfail-not-run", "xpass", "strict-xpass"],
)
def test_one_test_that_does_not_pass_makes_its_row_failing(
    project: pytest.Pytester, body: str
) -> None:
    result = run(
        project,
        f"pytestmark = pytest.mark.feature('A01')\ndef test_good(): pass\n{body}\n",
    )
    assert rows(result)["A01"] == ("failing", "test_it.py::test_good,test_it.py::test_a")


@pytest.mark.parametrize(
    "body",
    [
        "@pytest.mark.skip\ndef test_a(): pass",
        "def test_a(): pytest.skip('now')",
        "@pytest.fixture\ndef no(): pytest.skip('now')\ndef test_a(no): pass",
    ],
    ids=["mark", "call", "setup"],
)
def test_a_row_whose_tests_were_all_skipped_is_missing(project: pytest.Pytester, body: str) -> None:
    result = run(project, f"pytestmark = pytest.mark.feature('A01')\n{body}\n")
    assert rows(result)["A01"] == ("missing", "test_it.py::test_a")
    assert result.ret == pytest.ExitCode.OK


def test_a_skipped_test_takes_nothing_from_one_that_passed(project: pytest.Pytester) -> None:
    body = """
pytestmark = pytest.mark.feature("A01")
def test_a(): pass
@pytest.mark.skip
def test_b(): pass
"""
    assert rows(run(project, body))["A01"][0] == "working"


def test_the_exit_code_is_that_of_pytest(project: pytest.Pytester) -> None:
    body = "@pytest.mark.feature('A01')\ndef test_a(): pass\ndef test_unmarked(): assert False\n"
    result = run(project, body)
    assert rows(result)["A01"][0] == "working"
    assert result.ret == pytest.ExitCode.TESTS_FAILED


@pytest.mark.parametrize("selection", [("-k", "test_a"), ("-m", "quick")], ids=["-k", "-m"])
def test_rows_without_selected_tests_are_missing(
    project: pytest.Pytester, selection: tuple[str, str]
) -> None:
    project.makeini("[pytest]\nmarkers = quick: selected\n")
    body = """
@pytest.mark.quick
@pytest.mark.feature("A01")
def test_a(): pass
@pytest.mark.feature("A02")
def test_b(): assert False
"""
    result = run(project, body, *selection)
    assert rows(result)["A01"] == ("working", "test_it.py::test_a")
    assert rows(result)["A02"] == ("missing", "")
    assert result.ret == pytest.ExitCode.OK


def test_a_test_cut_short_by_an_interrupt_does_not_make_its_row_work(
    project: pytest.Pytester,
) -> None:
    body = "@pytest.mark.feature('A01')\ndef test_a(): raise KeyboardInterrupt\n"
    project.makepyfile(test_it=MARKED + body)
    result = project.runpytest_subprocess("--feature-report")
    assert rows(result)["A01"] == ("failing", "test_it.py::test_a")
    assert result.ret == pytest.ExitCode.INTERRUPTED


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
    [("A01\tOne\nA01\tAgain\n", ":2: *'A01*Again'"), ("A01 One\n", ":1: *'A01 One'")],
    ids=["twice", "no-tab"],
)
def test_a_wrong_table_is_a_usage_error_that_names_the_line(
    project: pytest.Pytester, table: str, found: str
) -> None:
    (project.path / "tests" / "features.txt").write_text(table, encoding="utf-8")
    result = run(project, "def test_a(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*features.txt{found}"])


def test_a_missing_table_is_a_usage_error(project: pytest.Pytester) -> None:
    (project.path / "tests" / "features.txt").unlink()
    result = run(project, "def test_a(): pass\n")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*wanted the table *features.txt, found No such file*"])


def test_nothing_is_printed_without_the_option(project: pytest.Pytester) -> None:
    project.makepyfile(test_it="def test_a(): pass\n")
    result = project.runpytest_inprocess()
    assert rows(result) == {}
    result.stdout.no_fnmatch_line("*feature report*")
