"""A compiled forward is found again, wherever its directory went, unless something changed."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compile import environment
from compile.cache.artifacts import read_checked, write_checked
from compile.cache.index import INDEX, CompileCache, Index


def _load_toy() -> Any:
    spec = importlib.util.spec_from_file_location(
        "compile_toy_forwards", Path(__file__).with_name("forwards.py")
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


toy = _load_toy()
NUM_DIFFERENT = 2
"""Of the toy's three pieces two compute the same."""


@pytest.fixture
def traced(tmp_path: Path) -> Path:
    """A file that the forward goes through."""
    path = tmp_path / "traced.py"
    path.write_text("scale = 2\n")
    return path


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def directories(root: Path) -> list[str]:
    return sorted(p.parent.relative_to(root).as_posix() for p in root.rglob(INDEX))


@pytest.mark.feature("G01")
def test_each_rank_and_prefix_has_a_directory_of_its_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    toy.start(toy.scope(root, tp_rank=0, dp_rank=0))
    toy.start(toy.scope(root, tp_rank=1, dp_rank=2))
    toy.start(toy.scope(root, tp_rank=1, dp_rank=2), prefix="draft")
    [shared] = {directory.split("/")[0] for directory in directories(root)}
    assert directories(root) == [
        f"{shared}/rank_0_0/backbone",
        f"{shared}/rank_1_2/backbone",
        f"{shared}/rank_1_2/draft",
    ]


@pytest.mark.feature("G01")
def test_the_root_is_the_field_else_below_the_cache_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(environment.CACHE_ROOT, str(tmp_path / "environment"))
    assert environment.root_directory() == tmp_path / "environment" / "compile"
    toy.start(toy.scope(""))
    assert files(tmp_path / "environment" / "compile")
    assert environment.root_directory(str(tmp_path / "field")) == tmp_path / "field"


@pytest.mark.feature("G10")
def test_prefixes_that_go_through_different_files_are_both_found_again(
    tmp_path: Path, traced: Path
) -> None:
    scope = toy.scope(tmp_path / "root")
    for _ in range(2):
        backbone = toy.start(scope, prefix="backbone", traced_files=[str(traced)])
        draft = toy.start(scope, prefix="draft", traced_files=[__file__])
    assert not backbone.was_traced and not draft.was_traced


@pytest.mark.parametrize("prefix", ["", "../up", "a/b", ".hidden"])
def test_a_prefix_names_one_directory(tmp_path: Path, prefix: str) -> None:
    with pytest.raises(ValueError, match="prefix: wanted the name of a directory"):
        CompileCache.open(toy.scope(tmp_path), prefix)


@pytest.mark.feature("G03")
def test_an_edited_traced_file_is_compiled_again_and_the_old_one_is_still_known(
    tmp_path: Path, traced: Path
) -> None:
    scope = toy.scope(tmp_path / "root")
    toy.start(scope, traced_files=[str(traced)])
    traced.write_text("scale = 3\n")
    edited = toy.start(scope, traced_files=[str(traced), __file__])
    assert edited.was_traced and edited.counters["num_backend_compilations"] == NUM_DIFFERENT
    traced.write_text("scale = 2\n")
    assert not toy.start(scope, traced_files=[str(traced)]).was_traced


def test_plans_for_other_sizes_are_kept_apart_and_share_pieces(tmp_path: Path) -> None:
    root = tmp_path / "root"
    toy.start(toy.scope(root))
    sized = toy.start(toy.scope(root, compile_sizes=(4,)), shapes=(None, 4))
    assert sized.was_traced
    # The pieces for any size were there; those for 4 tokens were not.
    assert sized.counters["num_compiled_artifacts_loaded"] == NUM_DIFFERENT
    assert sized.counters["num_backend_compilations"] == NUM_DIFFERENT
    for fields, shapes in (({}, (None,)), ({"compile_sizes": (4,)}, (None, 4))):
        assert not toy.start(toy.scope(root, **fields), shapes=shapes).was_traced


# --- the index --------------------------------------------------------------------------------


@pytest.mark.feature("G04")
def test_the_index_is_a_literal_with_relative_paths(tmp_path: Path) -> None:
    root = tmp_path / "root"
    toy.start(toy.scope(root, compile_sizes=(4,)), shapes=(None, 4, (5, 8)))
    [path] = root.rglob(INDEX)
    found = ast.literal_eval(path.read_text())
    places = {(shape, index, "eager") for shape in (None, 4, (5, 8)) for index in range(3)}
    assert found["version"] == 1 and set(found["entries"]) == places
    for entry in found["entries"].values():
        assert not Path(entry["artifact"]).is_absolute()
        assert (path.parent / entry["artifact"]).is_file()
    same = [found["entries"][None, index, "eager"] for index in (0, 2)]
    assert same[0] == same[1] != found["entries"][None, 1, "eager"]
    assert str(tmp_path) not in read_checked(path)


@pytest.mark.feature("G04")
@pytest.mark.parametrize("version", [2, "1"])
def test_an_unusable_index_is_logged_and_compiled_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, version: object
) -> None:
    root = tmp_path / "root"
    toy.start(toy.scope(root))
    [path] = root.rglob(INDEX)
    write_checked(path, repr({"version": version, "entries": {}, "plans": {}}))
    with caplog.at_level(logging.WARNING):
        again = toy.start(toy.scope(root))
    assert again.was_traced and again.counters["num_backend_compilations"] == NUM_DIFFERENT
    assert again.outputs == toy.eager()
    assert "compile cache: index is not used" in caplog.text
    assert not toy.start(toy.scope(root)).was_traced


def test_an_index_keeps_what_another_process_entered_meanwhile(tmp_path: Path) -> None:
    scope = toy.scope(tmp_path / "root")
    one = CompileCache.open(scope, "backbone", [__file__])
    two = CompileCache.open(scope, "backbone", [__file__])
    assert one is not None and two is not None
    one.record(None, 0, "eager", "key of 0", "a")
    two.record(None, 1, "eager", "key of 1", "b")
    assert one.find("key of 1", "eager") == "b"
    assert set(Index.read(one.directory / INDEX).entries) == {
        (None, 0, "eager"),
        (None, 1, "eager"),
    }


# --- damage, moving, switching off ------------------------------------------------------------


def _flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]


@pytest.mark.feature("G04")
@pytest.mark.parametrize("damage", [lambda c: c[: len(c) // 2], _flip, lambda _: b""])
def test_whichever_file_is_damaged_the_next_start_is_right(
    tmp_path: Path, traced: Path, damage: Any
) -> None:
    root, scope = tmp_path / "root", toy.scope(tmp_path / "root", compile_sizes=(4,))
    start = {"traced_files": [str(traced)], "shapes": (None, 4)}
    toy.start(scope, **start)
    for path in root.rglob("*"):
        # No file names its place, and no other user reads a directory.
        if path.is_file():
            assert str(root).encode() not in path.read_bytes(), path
        else:
            assert path.stat().st_mode & 0o077 == 0, path
    pristine = tmp_path / "pristine"
    shutil.copytree(root, pristine)
    damaged = [path for path in files(root) if path.stat().st_size]
    assert len(damaged) == 6, "two pieces, a plan, an index, a pointer and a key"
    for path in damaged:
        content = path.read_bytes()
        path.write_bytes(damage(content))
        assert toy.start(scope, **start).outputs == toy.eager(), path
        assert not toy.start(scope, **start).was_traced, path
        if path.parent.name != "forwards":
            assert path.read_bytes() == content, path
        shutil.rmtree(root)
        shutil.copytree(pristine, root)


@pytest.mark.feature("G07")
def test_switched_off_nothing_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = toy.scope(tmp_path / "root")
    toy.start(scope)
    before = {path: path.read_bytes() for path in files(tmp_path)}
    monkeypatch.setenv(environment.DISABLE_COMPILE_CACHE, "1")
    off = toy.start(scope)
    assert off.was_traced and off.outputs == toy.eager()
    assert off.counters["num_backend_compilations"] == NUM_DIFFERENT
    assert "num_compiled_artifacts_saved" not in off.counters
    assert {path: path.read_bytes() for path in files(tmp_path)} == before
    monkeypatch.setenv(environment.DISABLE_COMPILE_CACHE, "0")
    assert not toy.start(scope).was_traced


@pytest.mark.feature("G08")
@pytest.mark.parametrize(
    ("field", "variable", "is_unpacked"),
    [
        (None, None, False),
        (None, "binary", False),
        (None, "unpacked", True),
        ("binary", "unpacked", False),
        ("unpacked", "binary", True),
    ],
)
def test_pieces_are_unpacked_where_the_field_or_else_the_environment_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str | None,
    variable: str | None,
    is_unpacked: bool,
) -> None:
    if variable is not None:
        monkeypatch.setenv(environment.COMPILE_CACHE_SAVE_FORMAT, variable)
    scope = toy.scope(tmp_path / "root", compile_cache_save_format=field)
    toy.start(scope)
    found = [path.name for path in files(tmp_path) if path.parent.name == "pieces"]
    assert found == (
        ["piece_0_general.py", "piece_1_general.py", "piece_2_general.py"] * is_unpacked
    )
    warm = toy.start(scope)
    assert not warm.was_traced and warm.outputs == toy.eager()


# --- whose directory --------------------------------------------------------------------------


def test_a_directory_that_others_write_and_one_that_cannot_be_made_cost_the_cache_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared, in_the_way = tmp_path / "root", tmp_path / "file"
    toy.start(toy.scope(shared))
    shared.chmod(0o777)
    in_the_way.write_text("")
    for root, why in ((shared, "only its owner writes"), (in_the_way / "root", str(in_the_way))):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            started = toy.start(toy.scope(root))
        assert started.was_traced and started.outputs == toy.eager()
        assert "compile cache is off" in caplog.text and why in caplog.text


# --- why a start missed -----------------------------------------------------------------------


@pytest.mark.feature("Q08")
def test_a_miss_says_which_factor_differs_from_the_nearest_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "root"
    assert toy.start(toy.scope(root)).misses == ["nothing was compiled before"]
    far = replace(toy.scope(root, evaluate_guards=True, passes=()), key_factors={"model": "far"})
    toy.start(far)
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    with caplog.at_level(logging.INFO):
        missed = toy.start(toy.scope(root))
    [nearest] = [
        path.parent.name
        for path in root.glob("*/cache_key_factors.json")
        if json.loads(path.read_text())["model"] == "toy"
        and not json.loads(path.read_text())["ATEN_CPU_CAPABILITY"]
    ]
    assert missed.misses == [f"ATEN_CPU_CAPABILITY:  -> avx2 (since {nearest})"]
    assert missed.misses[0] in caplog.text
