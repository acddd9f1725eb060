"""serve/docs/reference/ is what `examples/reference.py` writes, and leaves nothing out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from serve.arguments import DeployArgs, IngressArgs, KVArgs, PoolArgs, PrefillArgs
from serve.openai.responses import ResponsesRequest
from serve.openai.schema import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Function,
    FunctionName,
    Message,
    NamedToolChoice,
    StreamOptions,
    TextPart,
    Tool,
    ToolCall,
)
from serve.openai.tokenizing import DetokenizeRequest, TokenizeRequest

ROOT = Path(__file__).resolve().parents[2]
DESCRIBED = ("arguments", "compilation", "requests")
PAGES = ROOT / "serve" / "docs" / "reference"
STRUCTS = (
    *(DeployArgs, PoolArgs, PrefillArgs, IngressArgs, KVArgs),
    *(ChatRequest, CompletionRequest, StreamOptions, Message, TextPart, ResponsesRequest),
    *(TokenizeRequest, DetokenizeRequest),
    *(Tool, Function, NamedToolChoice, FunctionName, ToolCall, CalledFunction),
)


def reference(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "examples" / "reference.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)


def rows(page: str = "*") -> list[list[str]]:
    """Return the cells of all tables in the committed pages."""
    paths = sorted(PAGES.glob(f"{page}.md"))
    lines = [line for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in lines
        if line.startswith("| ")
    ]


def meanings() -> dict[str, list[str]]:
    """Return the last cells of the rows that begin with a name."""
    found: dict[str, list[str]] = {}
    for row in [row for page in DESCRIBED for row in rows(page)]:
        found.setdefault(row[0].strip("`"), []).append(row[-1])
    return found


def test_the_committed_pages_are_what_the_command_writes() -> None:
    checked = reference("--check")
    assert checked.returncode == 0, checked.stderr


def test_the_check_names_pages_that_are_not_up_to_date(tmp_path: Path) -> None:
    for path in PAGES.glob("*.md"):
        text = path.read_text(encoding="utf-8")
        (tmp_path / path.name).write_text(text.replace("`max_num_seqs`", "`max_seqs`"))
    (tmp_path / "old.md").write_text("# Of an earlier version\n")
    checked = reference("--check", "--folder", tmp_path)
    assert checked.returncode == 1
    assert checked.stderr.startswith(f"{tmp_path}: wanted what `python examples/reference.py`")
    assert checked.stderr.endswith("found other ['arguments.md', 'old.md']\n")


def test_every_field_of_every_struct_has_a_meaning() -> None:
    found = meanings()
    for struct in STRUCTS:
        for name in struct.__struct_fields__:
            assert all(found[name]), name
