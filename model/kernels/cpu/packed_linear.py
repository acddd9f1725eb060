"""Linear layers over packed weights as opaque ops: plain ones on a CPU, short numbers on a GPU too.

An op's argument is a *handle*, a tensor that holds an index into this process's table of packed
weights: layers of equal shape so become equal pieces of a graph.

Who packs and multiplies is decided by the processor, the dtype and whether the C++ kernels were
built, never by a measurement, so a restart on the same machine rounds as the last run did:

1. With AVX2 and no AVX512, this module packs and the C++ kernel multiplies. oneDNN refuses
   bfloat16 there, and is slower in float32 with few rows and no faster with many.
2. Elsewhere oneDNN packs, and multiplies more than KERNEL_ROWS rows. For fewer, decode steps, the
   kernel is faster on the same packed bytes. It may touch them, because packing proves where each
   element went (`_tiles_of`); where they cannot be found, oneDNN does all. Where AMX multiplies,
   the kernel takes one row of bfloat16 only.
3. What oneDNN refuses is packed as in 1. Without the kernels such weights stay plain.
4. Integers with scales are packed here, whatever the processor, and another C++ kernel multiplies;
   where a form rounds tokens, it rounds the inputs first and multiplies integers with integers.
   Without the kernels a weight becomes float32 for each product. On a GPU a Triton kernel reads the
   same tiles (`triton/integers.py`).
5. FP8 and FP4 numbers with scales lie in the table as torch multiplies them (`scaled_linear.py`).
   Layers round their inputs first, by an op of its own, so that passes can see it.

On a GPU short numbers of all experts of a layer are one entry, because one kernel multiplies them.

What the kernel makes of a row does not depend on the rows beside it, to the bit.

Shapes: T tokens, I inputs, O outputs; a weight is [O, I]. Tiles are [O / N, I / P, N, P] with N
outputs side by side and P elements in four bytes, both dimensions padded with zeros. A weight that
oneDNN keeps transposed is one tile of all outputs, [1, I, O, 1]. Tiles of integers are int32,
[O / N, G, 1 + words, N], with G groups of inputs: a group's scales come first, in float32.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import math
import mmap
import sys
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from compile.custom_op import direct_register_custom_op
from compile.graphs.boundary import active, boundary
from model.kernels.cpu.native import int64_array, native_function
from model.kernels.scaled_linear import (
    BlockScaledWeight,
    IntegerWeight,
    ScaledWeight,
    quantize_inputs,
    scaled_weight,
)
from model.kernels.scaled_linear import scaled_linear as scaled_product
from model.kernels.sparse_mlp import Products
from model.quantization import Float8, Form, Integers

PACKED_DTYPES = (torch.bfloat16, torch.float32)
KERNEL_ROWS = 64
"""Up to here the kernel multiplies what oneDNN packed: then both reach the processor's rate."""
TILE_OUTPUTS: tuple[int, ...] = (64, 48, 32, 16)
"""Widths of the tiles between which oneDNN chooses, by dtype, instruction set and shape."""
ROWS_COMPARED = 64
OUTPUTS_AT_ONCE = 64
"""That become integers: what they take in float32 is bounded."""
GPU_TILE_OUTPUTS = 32
"""Side by side: words of 128 bytes."""
LARGEST = {8: 127.0, 4: 7.5}
"""How many steps of a scale the largest number of its inputs is, by bits. Integers of four bits go
from -8 to 7, so nothing is further than half a step from its integer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A packed weight. Invariant: `tiles`, if any, is a view of the memory of `packed`, if any."""

    out_features: int
    packed: torch.Tensor | None
    """oneDNN's; None where this module packed."""
    tiles: torch.Tensor | None
    sizes: ctypes.Array[ctypes.c_int64] | None
    kernel_rows: int
    integers: Integers | None = None
    scaled: ScaledWeight | BlockScaledWeight | None = None
    """All there is of FP8 and FP4 numbers."""

    def kernel(self, dtype: torch.dtype) -> Any:
        if self.integers is None:
            return native_function("packed_linear", dtype)
        return native_function("quantized_linear", dtype, "integers")


_table: dict[int, _Entry] = {}
_entry_at: dict[int, _Entry] = {}
"""Entries by their handles' addresses: reading an index out of its tensor is a dispatched op."""
_indices = itertools.count()


class PackedWeight:
    """Owns an entry of the table: it goes when its owner does."""

    def __init__(
        self, weight: torch.Tensor | ScaledWeight | BlockScaledWeight, form: Form | None = None
    ) -> None:
        """Pack a weight [O, I], in a form if one is given; the plain one is not kept. One that
        consists of FP8 or FP4 numbers is taken as it is. Short numbers of all experts [Xr, O, I]
        become one entry, with a handle [Xr]."""
        index = next(_indices)
        self.handle = torch.full(weight.shape[:-2], index, device=weight.device)
        packed, tiles, rows = None, None, sys.maxsize
        scaled: ScaledWeight | BlockScaledWeight | None = None
        integers = form if isinstance(form, Integers) else None
        if isinstance(weight, BlockScaledWeight):
            scaled = weight.laid_out()
        elif isinstance(weight, ScaledWeight):
            scaled = weight
        elif isinstance(form, Float8):
            scaled = scaled_weight(weight)
        elif integers is not None:
            tiles = _pack_integers(weight, integers)
            if native_function("quantized_linear", weight.dtype, "integers") is None:
                rows = 0
        elif _is_ours(weight.dtype):
            tiles = _pack(weight)
        else:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            tiles = _tiles_of(packed, weight)
            rows = _kernel_rows(tiles)
        sizes = None if tiles is None else _sizes(tiles, weight.shape, integers)
        entry = _Entry(weight.shape[-2], packed, tiles, sizes, rows, integers, scaled)
        _table[index] = _entry_at[self.handle.data_ptr()] = entry
        # It keeps the handle: as long as the address is in the table, it is the handle's.
        weakref.finalize(self, _forget, index, self.handle)

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be read, as an embedding does."""
        return _entry(self.handle).tiles is not None


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Return whether Triton kernels read short numbers."""
    return tensor.is_cuda


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether weights of this kind can be packed, and are faster then."""
    return device.type == "cpu" and dtype in PACKED_DTYPES and _packs(dtype)


@functools.cache
def _packs(dtype: torch.dtype) -> bool:
    refusal = None if _is_ours(dtype) else _refusal(dtype)
    if refusal is not None:
        logger.warning("weights of %s stay plain: %s", dtype, refusal)
    return refusal is None


@functools.cache
def _is_ours(dtype: torch.dtype) -> bool:
    """Return whether this module packs, not oneDNN."""
    if native_function("packed_linear", dtype) is None:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX2" or _refusal(dtype) is not None


@functools.cache
def _refusal(dtype: torch.dtype) -> str | None:
    """Try oneDNN: builds may lack the ops, and it refuses dtypes by processor."""
    x = torch.ones(2, 16, dtype=dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(x)
        torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError) as error:
        return str(error).splitlines()[0]
    return None


def _kernel_rows(tiles: torch.Tensor | None) -> int:
    """Return up to how many rows the kernel multiplies of a weight that oneDNN packed."""
    takes = None if tiles is None else native_function("packed_linear_takes", tiles.dtype)
    if tiles is None or takes is None:
        return 0
    is_transposed = tiles.shape[3] * tiles.itemsize < 4
    has_amx = tiles.dtype == torch.bfloat16 and torch.cpu._is_amx_tile_supported()
    if is_transposed or has_amx or not takes(tiles.shape[2]):
        return 1
    return KERNEL_ROWS


def _forget(index: int, handle: torch.Tensor) -> None:
    del _table[index], _entry_at[handle.data_ptr()]


def _entry(handle: torch.Tensor) -> _Entry:
    entry = _entry_at.get(handle.data_ptr())
    return _table[int(handle.flatten()[0])] if entry is None else entry


def _tiles_of(packed: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """Return the packed memory as tiles, if every element of `weight` lies where tiles have it."""
    per_word = 4 // weight.itemsize
    num_outputs, num_inputs = weight.shape
    size = torch.ops.mkldnn._nbytes(packed) // weight.itemsize
    memory = (ctypes.c_char * (size * weight.itemsize)).from_address(
        torch.ops.mkldnn.data_ptr(packed)
    )
    flat = torch.frombuffer(memory, dtype=weight.dtype)
    if weight.itemsize < 4 and TILE_OUTPUTS and size == weight.numel():
        plain = flat.view(num_inputs, num_outputs)
        if _is_transposed(plain, weight):
            return plain.view(1, num_inputs, num_outputs, 1)
    for outputs in TILE_OUTPUTS:
        blocks = -(-num_outputs // outputs)
        padded, rest = divmod(size, blocks * outputs)
        if rest or padded % per_word or not num_inputs <= padded < num_inputs + 64:
            continue
        tiles = flat.view(blocks, padded // per_word, outputs, per_word)
        # Block by block: a copy of the whole weight would double what loading needs.
        pairs = zip(tiles, weight.split(outputs), strict=True)
        if all(
            torch.equal(tile.transpose(0, 1).flatten(1)[: len(rows), :num_inputs], rows)
            for tile, rows in pairs
        ):
            return tiles
    return None


def _is_transposed(flat: torch.Tensor, weight: torch.Tensor) -> bool:
    pairs = zip(flat.split(ROWS_COMPARED, 1), weight.split(ROWS_COMPARED), strict=True)
    return all(torch.equal(columns.T, rows) for columns, rows in pairs)


def _pack(weight: torch.Tensor) -> torch.Tensor:
    kernel = native_function("pack_linear", weight.dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    outputs = native_function("packed_linear_tile", weight.dtype)()
    per_word = 4 // weight.itemsize
    blocks, words = -(-weight.shape[0] // outputs), -(-weight.shape[1] // per_word)
    tiles = weight.new_empty(blocks, words, outputs, per_word)
    pointers = (weight.data_ptr(), tiles.data_ptr())
    kernel(*pointers, _sizes(tiles, weight.shape), weight.stride(0), torch.get_num_threads())
    return tiles


def _pack_integers(weight: torch.Tensor, integers: Integers) -> torch.Tensor:
    *experts, num_outputs, num_inputs = weight.shape
    if is_on_gpu(weight):
        outputs = GPU_TILE_OUTPUTS
    else:
        tile = native_function("quantized_linear_tile", weight.dtype, "integers")
        outputs = 16 if tile is None else tile()
    groups, words = num_inputs // integers.group, -(-integers.group * integers.bits // 32)
    size = (*experts, -(-num_outputs // outputs), groups, 1 + words, outputs)
    if is_on_gpu(weight):
        tiles = weight.new_zeros(size, dtype=torch.int32)
    else:
        # Zeros in a mapping of their own: in the heap, what is freed below would leave gaps.
        memory = mmap.mmap(-1, 4 * math.prod(size))
        tiles = torch.frombuffer(memory, dtype=torch.int32).view(size)
    for of_expert, matrix in zip(
        tiles.view(-1, *size[-4:]), weight.reshape(-1, num_outputs, num_inputs), strict=True
    ):
        _fill_tiles(of_expert, matrix, integers)
    return tiles


def _fill_tiles(tiles: torch.Tensor, weight: torch.Tensor, integers: Integers) -> None:
    groups, words, outputs = tiles.shape[1], tiles.shape[2] - 1, tiles.shape[3]
    scales, numbers = tiles[:, :, 0].view(torch.float32), tiles[:, :, 1:]
    step = -(-OUTPUTS_AT_ONCE // outputs) * outputs
    for start in range(0, len(weight), step):
        some = slice(start // outputs, (start + step) // outputs)
        rows = weight[start : start + step].float().unflatten(1, (groups, -1))
        rows = F.pad(rows, (0, words * 32 // integers.bits - integers.group))
        rows = F.pad(rows, (0, 0, 0, 0, 0, -len(rows) % outputs))
        shared = rows.abs().amax(-1, keepdim=True) / LARGEST[integers.bits]
        rows = (rows / torch.where(shared > 0, shared, 1.0)).round_()
        most = 1 << (integers.bits - 1)
        kept = rows.clamp_(-most, most - 1).to(torch.int8)
        if integers.bits == 4:
            kept = (kept[..., 0::2] & 15) | (kept[..., 1::2] << 4)
        in_tiles = (-1, outputs)
        numbers[some] = kept.view(torch.int32).unflatten(0, in_tiles).permute(0, 2, 3, 1)
        scales[some] = shared.squeeze(-1).unflatten(0, in_tiles).transpose(1, 2)


def _widened(entry: _Entry) -> torch.Tensor:
    """Return a weight of integers as float32 [O, I]."""
    assert entry.integers is not None and entry.tiles is not None
    scales, words = entry.tiles[:, :, 0].view(torch.float32), entry.tiles[:, :, 1:]
    blocks, groups, _, outputs = words.shape
    numbers = words.permute(0, 3, 1, 2).flatten().view(torch.int8)
    if entry.integers.bits == 4:
        numbers = torch.stack(((numbers << 4) >> 4, numbers >> 4), -1).flatten(-2)
    numbers = numbers.view(blocks, outputs, groups, -1)[..., : entry.integers.group]
    weight = numbers.float() * scales.transpose(1, 2).unsqueeze(-1)
    return weight.flatten(2).flatten(0, 1)[: entry.out_features]


def _rounded_tokens(x: torch.Tensor) -> torch.Tensor:
    """Return x [T, I] as the integers of 8 bits that stand for each token, times their scale."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True) / LARGEST[8]
    return (wide / torch.where(scales > 0, scales, 1.0)).round_() * scales


def _sizes(
    tiles: torch.Tensor, shape: tuple[int, ...], integers: Integers | None = None
) -> ctypes.Array[ctypes.c_int64]:
    num_outputs, num_inputs = shape[-2:]
    if integers is not None:
        groups, words = tiles.shape[-3:-1]
        rounds = integers.rounds_tokens
        return int64_array(num_inputs, num_outputs, groups, words - 1, integers.bits, rounds)
    _, words, tile_outputs, per_word = tiles.shape
    return int64_array(num_inputs, num_outputs, tile_outputs, words * per_word, per_word)


# --- the ops ----------------------------------------------------------------------------------


def _packed_linear(
    x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, out_features: int
) -> torch.Tensor:
    """Multiply x [T, I] with the weight of `handle`. Returns [T, O]."""
    return packed_linear_into(None, x, handle, bias)


def packed_linear_into(
    out: torch.Tensor | None, x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return what `packed_linear` does, in `out` [T, O] if that is given."""
    entry = _entry(handle)
    assert entry.scaled is None
    if x.shape[0] <= entry.kernel_rows:
        return _product(x, entry, bias, out)
    # What oneDNN packed has no address: a graph's call holds the handle.
    product: torch.Tensor = _opaque_product(x, handle, bias)
    return product if out is None else out.copy_(product)


@boundary
def _opaque_product(
    x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    return _product(x, _entry(handle), bias)


def packed_products(handles: torch.Tensor) -> Products:
    """Return products with weights whose handles are int64 [Xr], for the inside of opaque ops."""
    entries = [_table[index] for index in handles.tolist()]
    return lambda rows, expert: _rounded_product(rows, entries[expert])


def _rounded_product(x: torch.Tensor, entry: _Entry) -> torch.Tensor:
    """Multiply rows, which are rounded first if the weight is FP8 or FP4."""
    if entry.scaled is None:
        return _product(x, entry, None)
    rounded = quantize_inputs(x, entry.scaled.form, entry.scaled.input_scale)
    return scaled_product(*rounded, entry.scaled, None, x.dtype)


def _scaled_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    handle: torch.Tensor,
    bias: torch.Tensor | None,
    out_features: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Multiply numbers and scales with the FP8 or FP4 weight of `handle`, as `scaled_linear.py` has
    them. Returns [T, O]."""
    scaled = _entry(handle).scaled
    assert scaled is not None
    return scaled_product(numbers, scales, scaled, bias, dtype)


def short_numbers(
    handle: torch.Tensor,
) -> IntegerWeight | ScaledWeight | BlockScaledWeight:
    """Return the short numbers of a handle, or of all experts' [Xr]."""
    entry = _entry(handle)
    if entry.scaled is not None:
        return entry.scaled
    assert entry.tiles is not None and entry.integers is not None
    return IntegerWeight(entry.tiles, entry.integers)


def _product(
    x: torch.Tensor, entry: _Entry, bias: torch.Tensor | None, out: torch.Tensor | None = None
) -> torch.Tensor:
    kernel = None
    if x.shape[0] <= entry.kernel_rows:
        kernel = entry.kernel(x.dtype)
    if kernel is None and entry.integers is not None:
        wide_x = _rounded_tokens(x) if entry.integers.rounds_tokens else x.float()
        wide = F.linear(wide_x, _widened(entry), None if bias is None else bias.float())
        return wide.to(x.dtype) if out is None else out.copy_(wide)
    if kernel is None:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, entry.packed, bias, "none", [], ""
        )
        return product if out is None else out.copy_(product)
    assert entry.tiles is not None
    x = x if x.stride(-1) == 1 else x.contiguous()
    if out is None:
        out = x.new_empty(x.shape[0], entry.out_features)
    bias_pointer = None if bias is None else bias.data_ptr()
    pointers = (x.data_ptr(), entry.tiles.data_ptr(), bias_pointer, out.data_ptr())
    sizes = (entry.sizes, x.shape[0], x.stride(0), torch.get_num_threads())
    call, recorder = functools.partial(kernel, *pointers, *sizes), active.recorder
    call() if recorder is None else recorder.bound(call, (x, entry.tiles, bias, out))
    return out


def _packed_rows(
    rows: torch.Tensor, handle: torch.Tensor, in_features: int, dtype: torch.dtype
) -> torch.Tensor:
    """Read rows [T] of the weight of `handle`. Returns [T, I]."""
    tiles = _entry(handle).tiles
    assert tiles is not None
    outputs = tiles.shape[2]
    return tiles[rows // outputs, :, rows % outputs].flatten(1)[:, :in_features].contiguous()


packed_linear = direct_register_custom_op(
    "packed_linear",
    _packed_linear,
    fake_impl=lambda x, handle, bias, n: x.new_empty(x.shape[0], n),
    dispatch_key="CPU",
    is_composite=True,
)
scaled_linear = direct_register_custom_op(
    "scaled_linear",
    _scaled_linear,
    fake_impl=lambda q, scales, handle, bias, n, dtype: q.new_empty(q.shape[0], n, dtype=dtype),
)
packed_rows = direct_register_custom_op(
    "packed_rows",
    _packed_rows,
    fake_impl=lambda rows, handle, n, dtype: rows.new_empty(rows.shape[0], n, dtype=dtype),
    is_composite=True,
)
