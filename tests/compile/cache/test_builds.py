"""Native builds are counted where they happen: C++ by Inductor, Triton wherever it compiles."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from compile.cache import builds
from compile.counters import counter

TRITON = """
import os, sys
os.environ["TRITON_CACHE_DIR"] = sys.argv[2]
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from compile.cache import builds
from compile.graphs.capture import LateCompilation, seal
from compile.counters import counter

sys.path.insert(0, os.path.dirname(sys.argv[1]))
import kernel
source = lambda: ASTSource(fn=kernel.scale, signature={"x": "*fp32"}, constexprs={})
builds.install_for_kernels()
found = []
for _ in range(2):
    triton.compile(source(), target=GPUTarget("cuda", 90, 32))
    found.append(counter.num_triton_builds)
print(found)
seal("strict")
triton.compile(source(), target=GPUTarget("cuda", 90, 32))
try:
    triton.compile(source(), target=GPUTarget("cuda", 80, 32))
except LateCompilation as error:
    print(error)
"""
KERNEL = """
import triton
import triton.language as tl

@triton.jit
def scale(x):
    tl.store(x, tl.load(x) * 2)
"""


def test_a_run_of_the_cpp_compiler_counts(tmp_path: Path) -> None:
    for _ in range(2):
        builds.install()
    builder = importlib.import_module("torch._inductor.cpp_builder")
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    command = f"g++ -c {tmp_path / 'one.cpp'} -o {tmp_path / 'one.o'}"
    with counter.expect(num_cpp_builds=1):
        builder.run_compile_cmd(command, str(tmp_path))
    assert (tmp_path / "one.o").exists()


def test_a_kernel_that_inductor_orders_counts_and_what_an_artifact_once_counted_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.async_compile import AsyncCompile

    # Interpreted, a kernel is missed like any other, and needs no device.
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with builds.inductor_builds():
        with counter.expect(num_triton_builds=1):
            AsyncCompile().triton("kernel", "kernel = print\n")
        # Loading adds what Inductor counted when the artifact was compiled.
        with counter.expect(num_triton_builds=0):
            counters["inductor"]["async_compile_cache_miss"] += 5
            counters["inductor"]["async_compile_cache_hit"] += 3


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, found none here"
)
def test_a_triton_kernel_counts_when_it_is_built_and_is_late_behind_the_seal(
    tmp_path: Path,
) -> None:
    (tmp_path / "kernel.py").write_text(KERNEL)
    command = [sys.executable, "-c", TRITON, str(tmp_path / "kernel.py"), str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    counted, late = done.stdout.strip().splitlines()
    assert counted == "[1, 1]", done.stderr
    assert "compilation: wanted none after the process was sealed" in late and "scale" in late
