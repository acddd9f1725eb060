"""A report is the same after JSON, and what is no report is refused in one line."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

import pytest

from compile.report import REPORT, CompileReport, PieceReport, ReportError

REPORTED = CompileReport(
    prefix="backbone",
    traced_files=("model.layers.decoder",),
    graph_breaks=("print (model.py:3)",),
    guards_kept=("num_tokens <= 64 (model.py:5)",),
    guards_dropped=("L['x'].size()[0] > 1",),
    pieces=(
        PieceReport("submod_0", 0, False, 12, "a" * 64),
        PieceReport("submod_1", 1, True, 1),
        PieceReport("submod_2", 2, False, 12, "a" * 64),
    ),
    timings_s={"dynamo": 1.5, "compile": 2.0},
    misses=("torch: 2.11 -> 2.13 (since 0123)",),
)


def test_a_report_is_the_same_after_json(tmp_path: Path) -> None:
    REPORTED.write(tmp_path)
    assert CompileReport.from_json((tmp_path / REPORT).read_text()) == REPORTED
    assert CompileReport.from_json(CompileReport("draft").to_json()) == CompileReport("draft")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "wanted JSON with a version"),
        ("[]", "wanted JSON with a version"),
        ("{}", "wanted JSON with a version"),
        ('{"version": 99}', "wanted version 1, found 99"),
        ('{"version": 1}', "wanted the fields of a report"),
        ('{"version": 1, "pieces": [{"name": "a"}]}', "wanted the fields of a report"),
        (json.dumps({"version": 1, "pieces": [], "prefix": "a", "b": 1}), "wanted the fields"),
    ],
)
def test_what_is_no_report_is_refused_in_one_line(text: str, found: str) -> None:
    with pytest.raises(ReportError, match=re.escape(found)) as caught:
        CompileReport.from_json(text)
    assert "\n" not in str(caught.value)


@pytest.mark.feature("I07")
def test_one_line_tells_the_phases_their_total_and_the_pieces(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="compile"):
        REPORTED.log()
    assert caplog.messages == [
        "torch.compile of backbone took 3.50 s (dynamo 1.50 s, compile 2.00 s): "
        "3 pieces, 2 compiled, 1 of them different"
    ]
