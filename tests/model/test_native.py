"""Building the C++ kernels: once, safely, and never a reason not to start."""

from __future__ import annotations

import ctypes
import logging
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from compile.environment import cache_root
from compile.machine import PrivateDirectoryError
from model.kernels.cpu import native
from model.quantization import WeightFormat

KERNELS = native.Library("kernels", torch.float32)

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")


@pytest.fixture
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and a library that is looked for again."""
    monkeypatch.setenv("LOCKSTEP_CACHE_ROOT", str(tmp_path / "cache"))
    for cached in (native.native_library, native.native_function, native._prepared):
        cached.cache_clear()
    yield
    for cached in (native.native_library, native.native_function, native._prepared):
        cached.cache_clear()


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A build of two kernels, unoptimised; for tests of how one is kept, not of what is in it."""
    sources = tmp_path_factory.mktemp("sources")
    for source in [*native.SOURCES.glob("*.h"), *native.SOURCES.glob("r*.cpp")]:
        shutil.copy(source, sources)
    kernels = [path.stem for path in sources.glob("*.cpp")]
    assert len(kernels) == 2
    flags = ["-O0" if flag == "-O3" else flag for flag in native.FLAGS]
    assert flags != native.FLAGS
    monkeypatch.setattr(native, "SOURCES", sources)
    monkeypatch.setitem(native.PARTS, "kernels", kernels)
    monkeypatch.setattr(native, "FLAGS", flags)


def compilations(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    commands: list[list[str]] = []
    run = native._run

    def counted(command: list[str]) -> str:
        commands.append(command)
        return run(command)

    monkeypatch.setattr(native, "_run", counted)
    return commands


@pytest.mark.usefixtures("_quick")
def test_the_library_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = compilations(monkeypatch)
    first = native.build_library(tmp_path, KERNELS)
    assert any("-c" in command for command in commands)
    commands.clear()
    assert native.build_library(tmp_path, KERNELS) == first
    assert not any("-c" in command for command in commands)
    assert {path.name for path in tmp_path.iterdir()} == {first.name, f"{first.stem}.lock"}


@pytest.mark.usefixtures("_quick")
def test_of_those_that_build_at_once_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = compilations(monkeypatch)
    with ThreadPoolExecutor(3) as threads:
        paths = {*threads.map(native.build_library, [tmp_path] * 3, [KERNELS] * 3)}
    assert len(paths) == 1
    assert sum("-c" in command for command in commands) == len(KERNELS.sources)


@pytest.mark.usefixtures("_quick")
def test_a_model_has_what_it_calls_built_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE_ROOT", str(tmp_path))
    (native.SOURCES / "quantized_linear.cpp").write_text("int product() { return 1; }")
    (native.SOURCES / "communicator.cpp").write_text("int sum() { return 1; }")
    for name in native.PARTS["drawing"]:
        (native.SOURCES / f"{name}.cpp").write_text(f"int {name}() {{ return 1; }}")
    monkeypatch.setitem(native.PARTS, "fp8_caches", ["rope_and_write_kv"])
    kernels = native._key("g++", KERNELS)

    def built(
        held: WeightFormat = "none",
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype = torch.float32,
        *,
        has_peers: bool = False,
    ) -> set[str]:
        """Return what is built that was not before."""
        before = {*(tmp_path / native.DIRECTORY).glob("*.so")}
        native.fetch_libraries(
            None, native.libraries_for(dtype, kv_dtype, held, has_peers=has_peers)
        )
        found = {*(tmp_path / native.DIRECTORY).glob("*.so")} - before
        return {path.name.rpartition("-")[0] for path in found}

    assert built(dtype=torch.float16) == {"drawing-float32"}, "torch functions compute the rest"
    assert built() == {"kernels-float32"}
    assert built("fp8") == built("nvfp4") == set()
    assert built("int4") == {"integers-float32"}
    assert built("int8") == set()
    assert built("int8", torch.bfloat16) == {"kernels-bfloat16", "integers-bfloat16"}
    assert built(kv_dtype=torch.float8_e4m3fn) == {"fp8_caches-float32"}
    assert built(has_peers=True) == {"communicator"}
    (native.SOURCES / "quantized_linear.cpp").write_text("int product() { return 2; }")
    assert native._key("g++", KERNELS) == kernels, "an edit of one leaves the others as they are"
    assert built("int8") == {"integers-float32"}


class Exchange:
    """Hands out what was published first."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes | None] = {}

    def claim(self, key: str) -> bytes | None:
        return self.kept.get(key)

    def publish(self, key: str, data: bytes | None) -> None:
        self.kept[key] = data


@pytest.mark.feature("P12")
@pytest.mark.usefixtures("_quick")
def test_nodes_with_one_processor_build_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange, commands = Exchange(), compilations(monkeypatch)
    first = native.build_library(tmp_path / "first", KERNELS, exchange)
    num_built = len(commands)
    second = native.build_library(tmp_path / "second", KERNELS, exchange)
    assert [command[1:] for command in commands[num_built:]] == [["--version"]]
    assert second.read_bytes() == first.read_bytes()
    # What arrives damaged is built, and handed out again.
    exchange.kept[first.name] = first.read_bytes()[:-1]
    third = native.build_library(tmp_path / "third", KERNELS, exchange)
    assert exchange.kept[first.name] == third.read_bytes()
    ctypes.CDLL(str(third))


@pytest.mark.usefixtures("_quick")
def test_a_build_that_fails_keeps_no_other_node_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = Exchange()
    monkeypatch.setattr(native, "FLAGS", ["--no-such-flag"])
    with pytest.raises(native.NativeError):
        native.build_library(tmp_path, KERNELS, exchange)
    assert list(exchange.kept.values()) == [None]


@pytest.mark.parametrize("part", ["flags", "processor", "source"])
def test_what_decides_the_code_decides_the_key(
    part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = native._key("g++ 12", KERNELS)
    assert before == native._key("g++ 12", KERNELS) != native._key("g++ 13", KERNELS)
    if part == "flags":
        monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-g"])
    elif part == "processor":
        monkeypatch.setattr(native, "processor", lambda: "another")
    else:
        for source in native.SOURCES.iterdir():
            (tmp_path / source.name).write_bytes(source.read_bytes() + b"\n")
        monkeypatch.setattr(native, "SOURCES", tmp_path)
    assert native._key("g++ 12", KERNELS) != before


@pytest.mark.usefixtures("_quick")
def test_a_damaged_library_is_built_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One that is cut off would kill its process with a bus error, at every start."""
    path = native.build_library(tmp_path, KERNELS)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with caplog.at_level(logging.WARNING):
        assert native.build_library(tmp_path, KERNELS) == path
    assert "wanted its checksum" in caplog.text
    ctypes.CDLL(str(path))


@pytest.mark.usefixtures("_fresh")
@pytest.mark.parametrize(
    ("compiler", "flags", "found"),
    [
        ("no-such-compiler", [], "C++ compiler: wanted no-such-compiler, found none"),
        ("g++", ["--no-such-flag"], "wanted a build, found g++: error: .*no-such-flag.*"),
    ],
)
def test_without_a_build_one_line_says_so(
    compiler: str,
    flags: list[str],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native, "FLAGS", flags)
    with caplog.at_level(logging.WARNING):
        for name in ("paged_decode", "rms_norm"):
            assert native.native_function(name, torch.float32) is None
    [record] = caplog.records
    wanted = f"C++ kernels are off, torch functions stand in for kernels-float32: .*{found}"
    assert re.fullmatch(wanted.replace("++", r"\+\+"), record.getMessage())


def test_a_directory_that_others_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PrivateDirectoryError, match="a directory that only its owner writes"):
        native.build_library(tmp_path, KERNELS)


def test_the_library_brings_no_second_openmp() -> None:
    library = native.build_library(cache_root() / "native", KERNELS).read_bytes()
    assert b"GOMP_parallel" in library
    assert b"libgomp" not in library
    assert b"libomp" not in library
