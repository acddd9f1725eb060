"""Build the C++ kernels of this package once, and load them.

1. Templates for all dtypes take twice as long to build as those for one, and a model uses one. So
   there is a library for each part of the sources and each dtype, built when it is first wanted.
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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from compile.environment import cache_root, cxx
from compile.file_lock import file_lock
from compile.graphs.boundary import active
from compile.machine import PrivateDirectoryError, make_private, processor
from compile.scope import ArtifactExchange
from model.kernels.paged_attention import FP8
from model.quantization import WeightFormat

DIRECTORY = "native"
"""Below the cache's root."""
SOURCES = Path(__file__).parent / "cpp"
Part = Literal["kernels", "fp8_caches", "integers", "drawing", "communicator"]
PARTS: dict[Part, tuple[str, ...]] = {
    "kernels": (
        "paged_prefill",
        "packed_linear",
        "paged_decode",
        "latent_decode",
        "rope_and_write_kv",
        "rms_norm",
        "silu_and_mul",
    ),
    "fp8_caches": ("paged_prefill", "paged_decode", "rope_and_write_kv"),
    "integers": ("quantized_linear",),
    "drawing": ("draw", "penalise"),
    "communicator": ("communicator",),
}
"""The sources of each part, those first that take longest to build: what every model uses,
attention to caches of e4m3, products with packed integers, penalties and drawing, and sums of ranks
that share memory."""
DTYPES = {torch.float32: "float", torch.bfloat16: "bf16"}
"""That kernels are built for, as C++ names them."""
CODE = ["-O3", "-march=native", "-std=gnu++17", "-fno-math-errno", "-fno-trapping-math"]
FLAGS = [*CODE, "-fPIC", "-fopenmp", "-Wno-psabi"]
BUILD_TIMEOUT_S = 600.0
"""A build takes seconds alone; on a machine that starts many ranks at once much longer."""
DIGEST_BYTES = 32

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_int64
_Signature = tuple[list[type], type | None]
_PRODUCT: _Signature = ([_POINTER] * 5 + [_SIZE] * 3, None)
_SIGNATURES: dict[str, _Signature] = {
    "packed_linear": _PRODUCT,
    "quantized_linear": _PRODUCT,
    "draw": ([_POINTER] * 9, None),
    "penalise": ([_POINTER] * 9, None),
    "pack_linear": ([_POINTER] * 3 + [_SIZE] * 2, None),
    "packed_linear_takes": ([_SIZE], ctypes.c_bool),
    "packed_linear_tile": ([], _SIZE),
    "quantized_linear_tile": ([], _SIZE),
}
"""Of the functions that `run` does not call: a step knows most sizes of products beforehand."""
_KERNEL: _Signature = ([_POINTER, _POINTER, ctypes.c_float], ctypes.c_bool)

logger = logging.getLogger(__name__)


class NativeError(RuntimeError):
    """The kernels are not available. The message is one line: `FIELD: wanted ..., found ...`."""


_FAILURES = (NativeError, PrivateDirectoryError, OSError, subprocess.SubprocessError)


class Library(NamedTuple):
    """A part of the sources, compiled for activations of a dtype. The communicator has none: its
    sums are built for all, because ranks share memory before they have tensors."""

    part: Part
    dtype: torch.dtype | None

    @property
    def name(self) -> str:
        return self.part if self.dtype is None else f"{self.part}-{dtype_name(self.dtype)}"

    @property
    def sources(self) -> list[Path]:
        return [SOURCES / f"{stem}.cpp" for stem in PARTS[self.part]]

    @property
    def flags(self) -> list[str]:
        of_dtype = [] if self.dtype is None else [f"-DDTYPE={DTYPES[self.dtype]}"]
        return [*FLAGS, *of_dtype, *(["-DCACHE=fp8"] if self.part == "fp8_caches" else [])]


DRAWING = Library("drawing", torch.float32)
"""Logits are float32, whatever the model computes in."""
COMMUNICATOR = Library("communicator", None)


@functools.cache
def native_library(library: Library) -> ctypes.CDLL | None:
    """Return a library, built if need be; None, and a line in the log, where that fails."""
    try:
        # Torch's OpenMP is loaded with torch; the library finds it by name.
        return ctypes.CDLL(str(build_library(cache_root() / DIRECTORY, library)))
    except _FAILURES as error:
        message = str(error).splitlines()[0]
        logger.warning(
            "C++ kernels are off, torch functions stand in for %s: %s", library.name, message
        )
        return None


def libraries_for(
    dtype: torch.dtype, kv_dtype: torch.dtype, held: WeightFormat, *, has_peers: bool
) -> list[Library]:
    """Return the libraries that a rank uses whose model computes in `dtype` with weights held so,
    and which has peers to share memory with, or none."""
    parts: dict[Part, bool] = {
        "kernels": True,
        "fp8_caches": kv_dtype == FP8,
        "integers": held in ("int8", "w8a8", "int4"),
    }
    found = [Library(part, dtype) for part, is_used in parts.items() if is_used]
    return [*(found if dtype in DTYPES else []), DRAWING, *[COMMUNICATOR] * has_peers]


def fetch_libraries(exchange: ArtifactExchange | None, libraries: Sequence[Library]) -> None:
    """Have libraries ready, from another node if that has built them; failures are logged once
    kernels are wanted."""

    def fetch(library: Library) -> None:
        with suppress(*_FAILURES):
            build_library(cache_root() / DIRECTORY, library, exchange)

    if libraries:
        with ThreadPoolExecutor(len(libraries)) as pool:
            list(pool.map(fetch, libraries))


def build_library(
    directory: Path, library: Library, exchange: ArtifactExchange | None = None
) -> Path:
    """Return a library in `directory`. If it is missing it is made, or taken from whoever has made
    it already; raises one of `_FAILURES`."""
    compiler = shutil.which(cxx())
    if compiler is None:
        raise NativeError(f"C++ compiler: wanted {cxx()}, found none")
    version = _run([compiler, "--version"]).splitlines()[0]
    make_private(directory)
    path = directory / f"{library.name}-{_key(version, library)}.so"
    # All ranks of a node want it at once.
    with file_lock(path.with_suffix(".lock"), BUILD_TIMEOUT_S):
        if not (path.exists() and _is_whole(path.read_bytes(), str(path))):
            _write(path, _built_anywhere(compiler, path, exchange, library))
    return path


def _write(path: Path, data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        written = Path(scratch) / path.name
        written.write_bytes(data)
        os.replace(written, path)


def _built_anywhere(
    compiler: str, path: Path, exchange: ArtifactExchange | None, library: Library
) -> bytes:
    """Return the library of whoever has built it, which may be this process."""
    data = None if exchange is None else exchange.claim(path.name)
    if data is not None and _is_whole(data, "C++ kernels of another node"):
        return data
    data = None
    try:
        data = _built(compiler, path.parent, library)
        logger.info("built C++ kernels: %s", path)
    finally:
        if exchange is not None:
            exchange.publish(path.name, data)
    return data


def _built(compiler: str, directory: Path, library: Library) -> bytes:
    """Build a library, and return it with a checksum at its end, where no loader reads."""
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        linked = Path(scratch) / "library.so"
        objects = [str(linked.with_name(f"{source.stem}.o")) for source in library.sources]
        commands = [
            [compiler, *library.flags, "-c", str(source), "-o", made]
            for source, made in zip(library.sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(_run, commands))
        _run([compiler, "-shared", *objects, "-o", str(linked)])
        data = linked.read_bytes()
    return data + _digest(data)


def _is_whole(data: bytes, name: str) -> bool:
    """Return whether a library is as it was built: loading a cut one would kill a process."""
    if data[-DIGEST_BYTES:] == _digest(data[:-DIGEST_BYTES]):
        return True
    logger.warning("%s: wanted its checksum at its end, found another; built again", name)
    return False


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _key(version: str, library: Library) -> str:
    parts = [version, *library.flags, platform.machine(), processor()]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in (*sorted(SOURCES.glob("*.h")), *library.sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    if done.returncode:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[0]
        raise NativeError(f"{' '.join(command[:2])}: wanted a build, found {reason}")
    return done.stdout


@functools.cache
def native_function(name: str, dtype: torch.dtype, part: Part = "kernels") -> Any:
    """Return a function of a part for activations of `dtype`; None where there is none."""
    library = native_library(Library(part, dtype)) if dtype in DTYPES else None
    if library is None:
        return None
    found = getattr(library, name)
    found.argtypes, found.restype = _SIGNATURES.get(name, _KERNEL)
    return found


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
    taken: set[torch.dtype] = {first, torch.int32, torch.int64}
    part: Part = "kernels"
    (last, shape, _), has_fp8 = kinds[-1], any(dtype == FP8 for dtype, *_ in kinds)
    if has_fp8 and last == torch.float32 and len(shape) == 2:
        taken, part = taken | {FP8, torch.float32}, "fp8_caches"
    kernel = native_function(name, first, part)
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
