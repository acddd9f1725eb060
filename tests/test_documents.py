"""Every link, path, module and option that a document names exists."""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from pathlib import Path

import pytest

PACKAGES = ("serve", "cluster", "model", "compile")
ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("serve", "cluster", "model", "compile", "tests", "examples")
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(p for name in FOLDERS for p in (ROOT / name).rglob("*.md"))]
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`([^`\n]+(?:\n[^`\n]+)?)`", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?<![\w/.<~*-])[\w*./-]+\.(?:py|md|ya?ml|toml|cpp|txt|patch)(?![\w*])")
FOLDER = re.compile(r"[a-z_]+(?:/[a-z_]+)*/")
SCRIPT = re.compile(r"\bpython3? (?:-m (?P<module>[\w.]+)|(?P<path>[\w./]+\.py))(?P<rest>[^\n]*)")
WRITTEN_BY_USE = {"r.txt", "computation_graph.py", "transformed_code.py"}
"""What commands and caches write."""


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def code_of(document: str) -> list[str]:
    """Return code blocks, and code within lines."""
    return [match[1] or match[0] for match in CODE.finditer(text_of(document))]


def heading_ids(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", line.lower()).replace(" ", "-") for line in headings}


def is_there(document: str, path: str) -> bool:
    """Return whether a path is there from the root, or at the end of one beside the document."""
    folder = (ROOT / document).parent
    if any(True for _ in ROOT.glob(path)) or folder == ROOT:
        return any(True for _ in ROOT.glob(path))
    return any(True for _ in folder.rglob(path))


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    broken = []
    for target in LINK.findall(text_of(document)):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        found = (ROOT / document).parent / path if path else ROOT / document
        if not found.exists() or (anchor and anchor not in heading_ids(found)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_in_code_exists(document: str) -> None:
    paths = {path for code in code_of(document) for path in FILE.findall(code)}
    paths |= {code for code in code_of(document) if FOLDER.fullmatch(code)}
    known = {path for path in paths if Path(path).name in WRITTEN_BY_USE}
    assert [path for path in sorted(paths - known) if not is_there(document, path)] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_command_exists_and_has_its_options(document: str) -> None:
    unknown = []
    for code in code_of(document):
        for match in SCRIPT.finditer(code):
            if match["module"]:
                if match["module"].partition(".")[0] not in PACKAGES:
                    continue  # pip, venv and the like
                spec = importlib.util.find_spec(match["module"])
                source = Path(spec.origin) if spec is not None and spec.origin else None
            else:
                source = ROOT / match["path"]
            if source is None or not source.is_file():
                unknown.append(match[0])
            elif ROOT in source.parents:
                text = source.read_text(encoding="utf-8")
                options = re.findall(r"(?<!\S)--[a-z][\w-]*", match["rest"])
                unknown += [f"{source.name} {name}" for name in options if name not in text]
    assert unknown == []


def test_the_readme_quotes_the_step_as_it_is() -> None:
    lines = (ROOT / "cluster" / "engine" / "engine.py").read_text(encoding="utf-8").splitlines()
    [step] = [
        node
        for engine in ast.parse("\n".join(lines)).body
        if isinstance(engine, ast.ClassDef) and engine.name == "Engine"
        for node in engine.body
        if isinstance(node, ast.FunctionDef) and node.name == "step"
    ]
    docstring, *statements = step.body
    assert isinstance(docstring, ast.Expr)
    head = lines[step.lineno - 1 : docstring.lineno - 1]
    body = lines[statements[0].lineno - 1 : step.end_lineno]
    quote = textwrap.dedent("\n".join(head + body))
    assert f"```python\n{quote}\n```" in text_of("README.md")
