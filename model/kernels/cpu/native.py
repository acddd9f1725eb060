"""Build the C++ kernels of this package once, and load them.

1. There are two libraries: products with packed integers are slow to build, and few models need
   them. Each is built when it is first wanted.
2. A key names everything that decides the machine code: sources, compiler, flags, processor. The
   library of that key lies in the cache directory, or is built beside it and renamed. Nodes with
   the same key build it once, and get it from one another as they get compiled pieces.
3. Without a compiler, or if the directory belongs to another user, torch functions compute; one
   line in the log says so.

The kernels are compiled with OpenMP and linked without it, because a second runtime beside torch's
would start a second pool of threads on the same cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from compile.environment import cache_root, cxx
from compile.file_lock import file_lock
from compile.graphs.boundary import active
from compile.machine import PrivateDirectoryError, make_private, processor
from compile.scope import ArtifactExchange
from model.kernels.paged_attention import FP8
from model.quantization import WeightFormat

KERNELS, INTEGERS = "kernels", "integers"
"""The libraries: one that all models use, and one for weights that are packed integers."""
DIRECTORY = "native"
"""Below the cache's root."""
SOURCES = Path(__file__).parent / "cpp"
_OF_INTEGERS = "quantized_linear"
CODE = ["-O3", "-march=native", "-std=gnu++17", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = [*CODE, "-fPIC", "-fopenmp", "-Wno-psabi"]
BUILD_TIMEOUT_S = 600.0
"""A build takes seconds alone; on a machine that starts many ranks at once much longer."""
DIGEST_BYTES = 32

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "packed_linear": ([_POINTER] * 5 + [_SIZE] * 3, None),
    "quantized_linear": ([_POINTER] * 5 + [_SIZE] * 3, None),
    "pack_linear": ([_POINTER] * 3 + [_SIZE] * 2, None),
    "communicator_sum": ([_POINTER] * 2 + [_SIZE], ctypes.c_int64),
    "communicator_sum_share": ([_POINTER] * 3 + [_SIZE] * 2, ctypes.c_int64),
}
"""Of the kernels that `run` does not call: a step knows most sizes of products beforehand."""
_KERNEL = ([_POINTER, _POINTER, ctypes.c_float], ctypes.c_bool)

logger = logging.getLogger(__name__)


class NativeError(RuntimeError):
    """The kernels are not available. The message is one line: `FIELD: wanted ..., found ...`."""


_FAILURES = (NativeError, PrivateDirectoryError, OSError, subprocess.SubprocessError)


@functools.cache
def native_library(name: str = KERNELS) -> ctypes.CDLL | None:
    """Return a library, built if need be; None, and a line in the log, where that fails."""
    try:
        # Torch's OpenMP is loaded with torch; the library finds it by name.
        library = ctypes.CDLL(str(build_library(cache_root() / DIRECTORY, name=name)))
    except _FAILURES as error:
        message = str(error).splitlines()[0]
        what = "" if name == KERNELS else " for integers"
        logger.warning("C++ kernels%s are off, torch functions stand in: %s", what, message)
        return None
    if name == KERNELS:
        library.packed_linear_takes.restype = ctypes.c_bool
        for call in ("bytes", "broadcast", "gather", "gather_rows"):
            getattr(library, f"communicator_{call}").restype = ctypes.c_int64
    return library


def libraries_for(held: WeightFormat) -> list[str]:
    """Return the names of the libraries that a model uses whose weights are held so."""
    return [KERNELS, INTEGERS] if held in ("int8", "int4") else [KERNELS]


def fetch_libraries(exchange: ArtifactExchange | None, held: WeightFormat) -> None:
    """Have a model's libraries ready, from another node if that has built them; failures are logged
    once kernels are wanted."""

    def fetch(name: str) -> None:
        with suppress(*_FAILURES):
            build_library(cache_root() / DIRECTORY, exchange, name=name)

    names = libraries_for(held)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(fetch, names))


def build_library(
    directory: Path, exchange: ArtifactExchange | None = None, *, name: str = KERNELS
) -> Path:
    """Return a library in `directory`. If it is missing it is made, or taken from whoever has made
    it already; raises one of `_FAILURES`."""
    compiler = shutil.which(cxx())
    if compiler is None:
        raise NativeError(f"C++ compiler: wanted {cxx()}, found none")
    version = _run([compiler, "--version"]).splitlines()[0]
    make_private(directory)
    path = directory / f"{name}-{_key(version, name)}.so"
    # All ranks of a node want it at once.
    with file_lock(path.with_suffix(".lock"), BUILD_TIMEOUT_S):
        if not (path.exists() and _is_whole(path.read_bytes(), str(path))):
            _write(path, _built_anywhere(compiler, path, exchange, name))
    return path


def _write(path: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        library = Path(scratch) / path.name
        library.write_bytes(data)
        os.replace(library, path)


def _built_anywhere(
    compiler: str, path: Path, exchange: ArtifactExchange | None, name: str
) -> bytes:
    """Return the library of whoever has built it, which may be this process."""
    data = None if exchange is None else exchange.claim(path.name)
    if data is not None and _is_whole(data, "C++ kernels of another node"):
        return data
    data = None
    try:
        data = _built(compiler, path.parent, name)
        logger.info("built C++ kernels: %s", path)
    finally:
        if exchange is not None:
            exchange.publish(path.name, data)
    return data


def _sources(name: str) -> list[Path]:
    found = sorted(SOURCES.glob("*.cpp"))
    return [path for path in found if (path.stem == _OF_INTEGERS) == (name == INTEGERS)]


def _built(compiler: str, directory: Path, name: str) -> bytes:
    """Build a library, and return it with a checksum at its end, where no loader reads."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        library, sources = Path(scratch) / "kernels.so", _sources(name)
        objects = [str(library.with_name(f"{source.stem}.o")) for source in sources]
        commands = [
            [compiler, *FLAGS, "-c", str(source), "-o", made]
            for source, made in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        _run([compiler, "-shared", *objects, "-o", str(library)])
        data = library.read_bytes()
    return data + _digest(data)


def _is_whole(data: bytes, name: str) -> bool:
    """Return whether a library is as it was built: loading a cut one would kill a process."""
    if data[-DIGEST_BYTES:] == _digest(data[:-DIGEST_BYTES]):
        return True
    logger.warning("%s: wanted its checksum at its end, found another; built again", name)
    return False


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _key(version: str, name: str = KERNELS) -> str:
    parts = [version, *FLAGS, platform.machine(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in (*sorted(SOURCES.glob("*.h")), *_sources(name)):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise NativeError(f"{' '.join(command[:2])}: wanted a build, found {reason}")
    return done.stdout


@functools.cache
def native_function(name: str, dtype: torch.dtype, suffix: str = "") -> Any:
    """Return a function of the library for tensors of `dtype`; None where there is none."""
    if dtype not in (torch.float32, torch.bfloat16):
        return None
    library = native_library(INTEGERS if name == _OF_INTEGERS else KERNELS)
    if library is None:
        return None
    found = getattr(library, f"{name}_{str(dtype).removeprefix('torch.')}{suffix}")
    found.argtypes, found.restype = _SIGNATURES.get(name, _KERNEL)
    return found


def run(name: str, *tensors: torch.Tensor, scalar: float = 0.0, window: int = 0) -> bool:
    """Call a kernel on tensors of a CPU, the first of which says the floating-point dtype; return
    False, with nothing done, where none serves them.

    A graph keeps the call as it is, its number of threads included.
    """
    kinds = [(t.dtype, t.shape, t.stride()) for t in tensors]
    prepared = _prepared(name, torch.get_num_threads(), window, *kinds)
    if prepared is None:
        return False
    kernel, pack, sizes = prepared
    call = functools.partial(kernel, pack(*[t.data_ptr() for t in tensors]), sizes, scalar)
    recorder = active.recorder
    is_served: bool = call() if recorder is None else recorder.bound(call, tensors)
    return is_served


# What a step asks for is what the last one did: looking it up takes a tenth of working it out.
@functools.lru_cache(maxsize=4096)
def _prepared(
    name: str,
    num_threads: int,
    window: int,
    *kinds: tuple[torch.dtype, tuple[int, ...], tuple[int, ...]],
) -> tuple[Callable[..., bool], Callable[..., bytes], ctypes.Array[ctypes.c_int64]] | None:
    """Return a kernel, and what packs addresses and sizes as `Arguments` in C++ reads them; None
    where the kernel is not built, where dtypes differ and where a last stride is not 1. Behind
    caches of e4m3 their scales [2, Hkv] come last."""
    first = kinds[0][0]
    taken, suffix = {first, torch.int32, torch.int64}, ""
    (last, shape, _), has_fp8 = kinds[-1], any(dtype == FP8 for dtype, *_ in kinds)
    if has_fp8 and last == torch.float32 and len(shape) == 2:
        taken, suffix = taken | {FP8, torch.float32}, "_fp8"
    kernel = native_function(name, first, suffix)
    sizes = [num_threads, window]
    for dtype, shape, strides in kinds:
        if strides[-1] != 1 or dtype not in taken:
            return None
        sizes += [len(shape), *shape, *strides]
    if kernel is None:
        return None
    return kernel, struct.Struct(f"{len(kinds)}P").pack, int64_array(*sizes)


def int64_array(*values: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)
