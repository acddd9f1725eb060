"""What a rank compiles with follows from its configuration and from the machine."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from local_ranks import config_of
from torch._inductor.exc import CppCompileError, InductorError

from cluster.config import Role
from cluster.engine.compile_switch import CannotCompile
from cluster.group.context import RankContext
from cluster.group.membership import GroupMembership
from cluster.rank import compiling
from cluster.rank.compiling import as_final, graph_pools, one_line, rank_scope
from compile.config import AttentionGraphSupport, CompilationConfig, CUDAGraphMode
from compile.errors import FieldError
from compile.pieces.diagnose import GraphBreakError
from compile.scope import CompileScope
from model.parallel import Shard
from model.quantization import WeightFormat


def scope_of(
    path: Path, role: Role, group: GroupMembership | None = None, **compilation: Any
) -> CompileScope:
    config = config_of(path, role=role, max_num_batched_tokens=64, **compilation)
    pools = graph_pools(config.compilation, torch.device("cpu"))
    return rank_scope(RankContext(config), group or GroupMembership(None, Shard()), pools)


@pytest.mark.feature("Q02")
@pytest.mark.parametrize(
    ("role", "mode"),
    [
        (Role.PREFILL, CUDAGraphMode.PIECEWISE),
        (Role.DECODE, CUDAGraphMode.FULL_DECODE_ONLY),
        (Role.MIXED, CUDAGraphMode.FULL_AND_PIECEWISE),
    ],
)
def test_a_rank_captures_what_its_role_replays(
    tiny_checkpoint: Path, role: Role, mode: CUDAGraphMode
) -> None:
    assert scope_of(tiny_checkpoint, role, level=3).config.cudagraph_mode is mode


@pytest.mark.feature("B08")
def test_attention_that_cannot_be_in_every_graph_lessens_the_mode_with_one_warning(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = scope_of(tiny_checkpoint, Role.MIXED, level=3, cudagraph_mode="FULL")
    assert found.config.cudagraph_mode is CUDAGraphMode.FULL and not caplog.records
    monkeypatch.setattr(compiling, "ATTENTION", AttentionGraphSupport.UNIFORM_DECODE)
    found = scope_of(tiny_checkpoint, Role.MIXED, level=3, cudagraph_mode="FULL")
    assert found.config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "paged attention on cpu" in warning and "UNIFORM_DECODE" in warning


@pytest.mark.feature("B09")
def test_without_graphs_compilation_stays(tiny_checkpoint: Path) -> None:
    found = scope_of(tiny_checkpoint, Role.DECODE, level=3, use_cudagraph=False).config
    assert (found.level, found.graph_mode) == (3, CUDAGraphMode.NONE)


def test_a_cpu_without_a_compiler_serves_eagerly_and_says_so_in_one_line(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    found = scope_of(tiny_checkpoint, Role.DECODE, level=3).config
    assert (found.level, found.cudagraph_mode) == (0, CUDAGraphMode.NONE)
    [warning] = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "level 0" in warning and "no-such-compiler" in warning
    eager_pieces = scope_of(tiny_checkpoint, Role.DECODE, level=3, use_inductor=False).config
    assert eager_pieces.level == 3


def test_what_a_machine_lacks_for_triton_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(compiling.sysconfig, "get_paths", lambda _: {"include": str(tmp_path)})
    found = compiling.missing_for_triton()
    headers = f"{tmp_path}/Python.h (Debian: python3-dev)"
    assert found == f"a C compiler, gcc or clang (Debian: gcc) and {headers}"
    (tmp_path / "Python.h").touch()
    assert compiling.missing_for_triton() == "a C compiler, gcc or clang (Debian: gcc)"
    (tmp_path / "clang").touch(mode=0o755)
    assert compiling.missing_for_triton() == ""
    # The one that is named is taken or nothing.
    monkeypatch.setenv("CC", "icx")
    assert compiling.missing_for_triton() == "a C compiler, icx (Debian: gcc)"
    (tmp_path / "icx").touch(mode=0o755)
    assert compiling.missing_for_triton() == ""


class PeersWithoutCompiler(GroupMembership):
    """A group in which another rank found no compiler."""

    def all_reduce_min(self, name: str, value: int) -> int:
        assert name == "has_compiler"
        return 0


def test_a_group_runs_eagerly_as_a_whole_where_one_rank_cannot_compile(
    tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "true")
    group = PeersWithoutCompiler(None, Shard())
    assert scope_of(tiny_checkpoint, Role.DECODE, group, level=3).config.level == 0
    assert "is found on another rank" in caplog.text
    alone = scope_of(tiny_checkpoint, Role.DECODE, level=3)
    assert alone.config.level == 3


@pytest.mark.feature("G02")
def test_neither_role_nor_rank_nor_sizes_of_graphs_are_in_the_key(tiny_checkpoint: Path) -> None:
    decode = scope_of(tiny_checkpoint, Role.DECODE, level=3, cudagraph_capture_sizes=(1, 2))
    prefill = scope_of(tiny_checkpoint, Role.PREFILL, level=3, capture_num_tokens=(64,))
    assert decode.key_factors == prefill.key_factors
    assert str(tiny_checkpoint) not in str(decode.key_factors)


@pytest.mark.feature("G02")
def test_which_gpu_a_rank_has_is_not_in_the_key(tiny_checkpoint: Path) -> None:
    """Code names the index of its device, which is the same on all ranks."""
    config = replace(config_of(tiny_checkpoint, max_num_batched_tokens=64), device="cuda")
    ranks = [RankContext(config, gpu=gpu) for gpu in ("0", "3", "GPU-0af1")]
    pools = graph_pools(CompilationConfig(), torch.device(ranks[0].device.name))
    group = GroupMembership(None, Shard())
    found = [rank_scope(rank, group, pools).key_factors for rank in ranks]
    assert found == [found[0]] * 3
    assert len({torch.device(rank.device.name) for rank in ranks}) == 1


@pytest.mark.feature("S08")
def test_what_linear_layers_hold_is_in_the_key(tiny_checkpoint: Path) -> None:
    kinds: tuple[WeightFormat, ...] = ("none", "int8", "w8a8", "int4", "fp8", "nvfp4")
    pools = graph_pools(CompilationConfig(), torch.device("cpu"))
    group = GroupMembership(None, Shard())
    factors = []
    for kind in kinds:
        config = replace(config_of(tiny_checkpoint, max_num_batched_tokens=64), quantization=kind)
        factors.append(rank_scope(RankContext(config), group, pools).key_factors)
    assert len({str(found) for found in factors}) == len(kinds)
    assert all(found.keys() == factors[0].keys() for found in factors)


@pytest.mark.feature("S10")
def test_the_room_for_adapters_is_in_the_key(tiny_checkpoint: Path) -> None:
    pools = graph_pools(CompilationConfig(), torch.device("cpu"))
    group = GroupMembership(None, Shard())

    def key(*room: int) -> str:
        plain = config_of(tiny_checkpoint, max_num_batched_tokens=64)
        config = replace(plain, max_loras=room[0], max_lora_rank=room[1])
        return str(rank_scope(RankContext(config), group, pools).key_factors)

    assert key(0, 8) == key(0, 16), "there is none"
    assert len({key(0, 8), key(1, 8), key(2, 8), key(2, 16)}) == 4


def wrapped(inner: Exception) -> Exception:
    return InductorError(inner, None)


@pytest.mark.feature("E01", "A07", "F07")
def test_what_a_machine_may_lack_for_a_moment_is_no_verdict_on_the_model() -> None:
    config_error = FieldError("compilation.splitting_ops", "an op", "lockstep::nothing")
    for error, wanted in (
        (config_error, "compilation.splitting_ops: wanted an op, found 'lockstep::nothing'"),
        (GraphBreakError("forward: wanted one graph\nmore"), None),
        (wrapped(AssertionError("target: lockstep.x\nmore")), None),
    ):
        found = as_final(error)
        assert isinstance(found, CannotCompile) and str(found) == (wanted or one_line(error))
        assert "\n" not in str(found)
    caused = config_error
    caused.__cause__ = OSError("disk full")
    for error in (
        caused,
        wrapped(OSError("no space left on device")),
        wrapped(CppCompileError(["g++"], "Killed signal terminated program cc1plus")),
        MemoryError(),
        RuntimeError("can't allocate memory"),
        FieldError("kv_memory", "at most 5 bytes", 6),
    ):
        assert as_final(error) is None
