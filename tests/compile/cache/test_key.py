"""The key of compiled code: what changes code changes it, and nothing else does."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compile.cache import key
from compile.cache.key import (
    TRACED_FILES,
    describe,
    hash_factors,
    key_factors,
    sources_hash,
    traced_factor,
    traced_names,
)
from compile.config import KEYED_FIELDS, CompilationConfig, CUDAGraphMode, DynamicShapes
from compile.passes.fuse_add_rms_norm import FuseAddRMSNorm
from compile.scope import CompileScope

CONFIG = CompilationConfig(level=3, splitting_ops=("lockstep::attention",), compile_sizes=(4,))
SCOPE = CompileScope(CONFIG, key_factors={"model": "2 layers", "dtype": "float32", "tp": "1"})

CHANGES_CODE: dict[str, Any] = {
    "level": 2,
    "splitting_ops": ("lockstep::other",),
    "use_inductor": False,
    "inductor_compile_config": {"max_autotune": True},
    "dynamic_shapes": DynamicShapes.UNBACKED,
    "evaluate_guards": True,
    "passes": (),
    "max_num_streams": 2,
    "enable_userbuffers": True,
}
CHANGES_NO_CODE: dict[str, Any] = {
    "compiler": "inductor_standalone",
    "use_cudagraph": False,
    "cudagraph_capture_sizes": (1, 2),
    "cuda_graph_sizes": (64,),
    "cudagraph_mode": CUDAGraphMode.NONE,
    "cudagraph_copy_inputs": True,
    "compile_sizes": (8,),
    "compile_ranges": ((1, 8),),
    "compile_lazily": True,
    "debug_dump_path": "/elsewhere",
    "cache_dir": "/elsewhere",
    "share_artifacts": False,
    "compile_cache_save_format": "unpacked",
    "capture_num_tokens": (16,),
    "enable_padding": False,
    "num_warmups_full": 5,
    "num_warmups_piecewise": 5,
    "graph_pool": "per_bucket",
    "poison_graph_pool": True,
    "reserve_graph_memory": True,
    "capture_logits": True,
    "sealed": "strict",
    "serve_while_compiling": "off",
    "graph_bs": (1, 2),
}


def name(scope: CompileScope = SCOPE, compiler: str = "eager", state: str = "state") -> str:
    return hash_factors(key_factors(scope, compiler, state))


def test_a_pass_that_changes_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may live outside of this package, whose sources are in the key."""
    scope = replace(SCOPE, config=replace(CONFIG, passes=("fuse_add_rms_norm",)))
    before = name(scope)
    assert before == name(scope)
    monkeypatch.setattr(FuseAddRMSNorm, "uuid", lambda self: "another")
    assert name(scope) != before


def test_each_field_of_the_configuration_is_sorted_into_one_list() -> None:
    sorted_in = [*KEYED_FIELDS, *CHANGES_NO_CODE]
    assert sorted(sorted_in) == sorted({field.name for field in fields(CompilationConfig)})
    assert len(sorted_in) == len(set(sorted_in))


@pytest.mark.feature("G02")
@pytest.mark.parametrize("field", KEYED_FIELDS)
def test_a_field_that_changes_code_changes_the_key(field: str) -> None:
    changed = replace(SCOPE, config=replace(CONFIG, **{field: CHANGES_CODE[field]}))
    assert name(changed) != name()


@pytest.mark.feature("G02")
@pytest.mark.parametrize("field", CHANGES_NO_CODE)
def test_a_field_that_changes_no_code_keeps_the_key(field: str) -> None:
    # Together with what each needs to be legal.
    base = replace(CONFIG, compile_sizes=None)
    value = CHANGES_NO_CODE[field]
    assert value != getattr(base, field)
    changed = replace(SCOPE, config=replace(base, **{field: value}))
    assert name(changed) == name(replace(SCOPE, config=base))


@pytest.mark.feature("G02")
@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setattr(torch, "__version__", "2.99.0"),
        lambda patch: patch.setattr(torch.version, "git_version", "another"),
        lambda patch: patch.setattr(torch, "get_num_threads", lambda: 99),
        lambda patch: patch.setattr(key, "processor", lambda: "another"),
        lambda patch: patch.setattr(key, "compiler_version", lambda: "another"),
        lambda patch: patch.setattr(key, "device", lambda: "cuda sm_90"),
        lambda patch: patch.setattr(key, "python", lambda: "another"),
        lambda patch: patch.setattr(key, "OWN_SOURCES", "another"),
        lambda patch: patch.setenv("ATEN_CPU_CAPABILITY", "default"),
    ],
)
def test_the_machine_and_what_compiles_change_the_key(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[pytest.MonkeyPatch], None]
) -> None:
    before = name()
    change(monkeypatch)
    assert name() != before


@pytest.mark.feature("G02")
def test_what_the_caller_and_the_compiler_add_changes_the_key_and_places_and_order_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changed = [replace(SCOPE, key_factors={**SCOPE.key_factors, f: "x"}) for f in SCOPE.key_factors]
    names = [*map(name, changed), name(compiler="inductor"), name(state="another"), name()]
    assert len(set(names)) == len(names)
    assert name(replace(SCOPE, tp_rank=1, dp_rank=3)) == name()
    one, two = (
        replace(CONFIG, inductor_compile_config=dict(pairs))
        for pairs in ([("a", 1), ("b", [2, None])], [("b", [2, None]), ("a", 1)])
    )
    assert name(replace(SCOPE, config=one)) == name(replace(SCOPE, config=two))
    for variable in ("MASTER_PORT", "CUDA_VISIBLE_DEVICES", "RANK", "HOME"):
        monkeypatch.setenv(variable, "7")
    assert name() == names[-1]
    with pytest.raises(ValueError, match="key_factors: wanted names of their own, found torch"):
        name(replace(SCOPE, key_factors={"torch": "mine"}))


def test_sources_count_with_their_names_and_places(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("1")
    (tmp_path / "below").mkdir()
    first = sources_hash(tmp_path)
    (tmp_path / "below" / "b.py").write_text("2")
    second = sources_hash(tmp_path)
    (tmp_path / "below" / "b.py").rename(tmp_path / "b.py")
    third = sources_hash(tmp_path)
    (tmp_path / "a.py").write_text("3")
    assert len({first, second, third, sources_hash(tmp_path)}) == 4


@pytest.fixture
def helper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that a forward may have gone through."""
    path = tmp_path / "traced_helper.py"
    path.write_text("def f(x): return x\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("traced_helper")
    yield path
    sys.modules.pop("traced_helper", None)


@pytest.mark.feature("G03")
def test_code_without_a_file_and_unreadable_files_are_skipped(tmp_path: Path) -> None:
    assert traced_names(["<string>", "<frozen os>", str(tmp_path / "gone.py"), str(tmp_path)]) == []
    script = tmp_path / "script.py"
    script.write_text("")
    assert traced_names([str(script), str(script)]) == [str(script)]


@pytest.mark.feature("G03")
def test_traced_files_count_by_module_and_content_and_not_by_place(
    helper: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = traced_names([str(helper)])
    assert names == ["traced_helper"]
    before = traced_factor(names)
    moved = tmp_path / "moved" / helper.name
    moved.parent.mkdir()
    helper.rename(moved)
    monkeypatch.setattr(sys, "path", [str(moved.parent), *sys.path])
    del sys.modules["traced_helper"]
    importlib.invalidate_caches()
    assert traced_factor(names) == before
    moved.write_text("def f(x): return x + 1\n")
    assert traced_factor(names) != before
    moved.unlink()
    assert traced_factor(names) == "traced_helper missing"


def test_of_a_long_factor_only_the_words_that_changed_are_told() -> None:
    flags = [f"flag{number}" for number in range(40)]
    changed = [*flags[:20], "other", *flags[21:]]
    assert describe("processor", " ".join(flags), " ".join(changed)) == "processor: flag20 -> other"
    assert describe("torch", "2.11", "2.13") == "torch: 2.11 -> 2.13"


def test_of_traced_files_the_names_that_changed_are_told() -> None:
    old, new = "model.a 1\nmodel.b 2\nmodel.c 3", "model.a 1\nmodel.b 4\nmodel.d 5"
    assert describe(TRACED_FILES, old, new) == (
        "traced files: model.b changed, model.c no longer traced, model.d newly traced"
    )
