"""Collectives of the ranks of one node through memory that they share. Through sockets they take
several times as long, because each wakes a thread on both sides."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from model.kernels.cpu.native import COMMUNICATOR, DTYPES, dtype_name, native_library

SLOT_BYTES = 1 << 20
"""What a rank puts out at once; more goes in parts."""
BUFFER_BYTES = 64 << 20
"""The largest tensor that a user buffer holds. Only what is written takes memory."""
_DONE = -1
_SUM = ([ctypes.c_void_p] * 2 + [ctypes.c_int64], ctypes.c_int64)
_SUM_SHARE = ([ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2, ctypes.c_int64)


class _Place(ctypes.Structure):
    """`Place` of communicator.cpp."""

    _fields_ = [
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("ranks", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("buffer_bytes", ctypes.c_int64),
        ("timeout_s", ctypes.c_double),
        ("exchange", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("copied_sums", ctypes.c_uint64),
    ]


def memory_bytes(
    num_ranks: int, slot_bytes: int = SLOT_BYTES, buffer_bytes: int = BUFFER_BYTES
) -> int:
    """Return how much memory the ranks share: a counter, two slots and a user buffer each. Needs
    the kernels."""
    sizes = map(ctypes.c_int64, (num_ranks, slot_bytes, buffer_bytes))
    num_bytes: int = _library().communicator_bytes(*sizes)
    return num_bytes


class ShmCommunicator:
    """One rank's end. All ranks call the same methods, in the same order, with tensors of equal
    shapes and dtypes. As with gloo, a RuntimeError ends a wait in vain; it names the rank.

    A method that returns False has done nothing, on any rank, because it does not serve such
    tensors.
    """

    def __init__(
        self,
        memory: memoryview,
        rank: int,
        num_ranks: int,
        timeout_s: float,
        slot_bytes: int = SLOT_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        """memory: `memory_bytes` of zeros, the same of all ranks. slot_bytes, buffer_bytes:
        multiples of 64."""
        self._library = _library()
        assert self._library is not None, "communicator: wanted the C++ kernels, found none"
        self._memory = torch.frombuffer(memory, dtype=torch.uint8)
        pointer = self._memory.data_ptr()
        self._place = _Place(pointer, rank, num_ranks, slot_bytes, buffer_bytes, timeout_s)
        self._at = ctypes.byref(self._place)
        names = {dtype: dtype_name(dtype) for dtype in DTYPES}
        self._sums = {dtype: self._call(f"sum_{name}", _SUM) for dtype, name in names.items()}
        self._shares = {
            dtype: self._call(f"sum_share_{name}", _SUM_SHARE) for dtype, name in names.items()
        }
        first = memory_bytes(num_ranks, slot_bytes, 0) + rank * buffer_bytes
        self._buffer = self._memory[first : first + buffer_bytes]

    def all_reduce(self, x: torch.Tensor) -> bool:
        """Overwrite `x` with the ranks' sum, which is added in float32 and in the ranks' order."""
        add = self._sums.get(x.dtype)
        if add is None or not x.is_contiguous():
            return False
        self._check("all_reduce", add(self._at, x.data_ptr(), x.numel()))
        return True

    def reduce_scatter(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Fill `out` with this rank's share of the ranks' sum of `x` [T, ...]: of the rows all
        ranks have as many, but the last ones fewer, or none. Where `x` is the user buffer, nothing
        is copied, and `gather_rows` must follow."""
        add = self._shares.get(x.dtype)
        if add is None or not x.is_contiguous():
            return False
        part = self._rows_each(x) * x[0].numel()
        found = add(self._at, x.data_ptr(), out.data_ptr(), x.numel(), part)
        self._check("reduce_scatter", found)
        return True

    def user_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Return memory of this rank that `reduce_scatter` reads in place, always the same; None:
        it has no room for such a tensor. It may be written again once a sum has been gathered."""
        size = math.prod(shape) * dtype.itemsize
        if size > len(self._buffer) or dtype not in self._shares:
            return None
        return self._buffer[:size].view(dtype).view(*shape)

    def gather_rows(self, x: torch.Tensor) -> bool:
        """Fill `x` [T, ...] with each rank's share, as `reduce_scatter` divides rows."""
        if not x.is_contiguous():
            return False
        part = self._rows_each(x) * _size(x[0]).value
        found = self._library.communicator_gather_rows(
            self._at, _pointer(x), _size(x), ctypes.c_int64(part)
        )
        self._check("gather_rows", found)
        return True

    @property
    def num_copied_sums(self) -> int:
        """How many calls of `reduce_scatter` were given what is no user buffer, and copied it."""
        return int(self._place.copied_sums)

    def broadcast(self, x: torch.Tensor) -> bool:
        """Overwrite `x` with rank 0's."""
        if not x.is_contiguous():
            return False
        found = self._library.communicator_broadcast(self._at, _pointer(x), _size(x))
        self._check("broadcast", found)
        return True

    def gather(self, x: torch.Tensor, parts: torch.Tensor, *, to_all: bool = False) -> bool:
        """Fill `parts` [ranks, *shape of x] on rank 0, or on all ranks."""
        if not x.is_contiguous():
            return False
        found = self._library.communicator_gather(
            self._at, _pointer(x), _pointer(parts), _size(x), ctypes.c_bool(to_all)
        )
        self._check("gather", found)
        return True

    def _call(self, name: str, signature: tuple[list[Any], Any]) -> Any:
        function = getattr(self._library, f"communicator_{name}")
        function.argtypes, function.restype = signature
        return function

    def _rows_each(self, x: torch.Tensor) -> int:
        return -(-len(x) // int(self._place.ranks))

    def _check(self, name: str, missing: int) -> None:
        if missing != _DONE:
            place = self._place
            wanted = (
                f"wanted all {place.ranks} ranks in {place.timeout_s:g} s, found no rank {missing}"
            )
            raise RuntimeError(f"{name} over shared memory timed out: {wanted}")


def can_share() -> bool:
    """Return whether this process has the kernels that a communicator needs."""
    return _library() is not None


@functools.cache
def _library() -> Any:
    """Return the functions of communicator.cpp; None where they cannot be built."""
    library: Any = native_library(COMMUNICATOR)
    if library is not None:
        for call in ("bytes", "broadcast", "gather", "gather_rows"):
            getattr(library, f"communicator_{call}").restype = ctypes.c_int64
    return library


def _pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def _size(x: torch.Tensor) -> ctypes.c_int64:
    return ctypes.c_int64(x.numel() * x.element_size())
