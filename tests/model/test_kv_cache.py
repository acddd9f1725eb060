"""The KV pool: sizes, layout, storage given by the caller."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from compile.errors import FieldError
from model.kv_cache import KVCacheSpec

SPEC = KVCacheSpec(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.bfloat16)
CPU = torch.device("cpu")


def test_a_block_is_contiguous_bytes() -> None:
    pool = SPEC.allocate(5, CPU)
    assert pool.shape == (6, 3, 2, 4, 2, 8)
    assert not pool.any()
    assert pool[3].is_contiguous()
    assert pool[3].nbytes == SPEC.block_bytes == 3 * 2 * 4 * 2 * 8 * 2


def test_pool_lives_in_given_storage() -> None:
    storage = bytearray(3 * SPEC.block_bytes)
    pool = SPEC.allocate(2, CPU, storage=memoryview(storage))
    pool[1] = 1.0
    start, stop = SPEC.block_bytes, 2 * SPEC.block_bytes
    assert storage[start:stop] == pool[1].view(torch.uint8).numpy().tobytes()
    assert not any(storage[:start]) and not any(storage[stop:])


@pytest.mark.feature("S09")
def test_fp8_blocks_are_half_of_bfloat16s_and_a_quarter_of_float32s() -> None:
    fp8, plain = (
        dataclasses.replace(SPEC, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float32)
    )
    assert 4 * fp8.block_bytes == 2 * SPEC.block_bytes == plain.block_bytes
    memory = 7 * SPEC.block_bytes
    assert fp8.num_blocks_for(memory) == 2 * SPEC.num_blocks_for(memory) == 14
    pool = fp8.allocate(5, CPU)
    assert pool.dtype == torch.float8_e4m3fn and pool[3].nbytes == fp8.block_bytes
    assert fp8.layout == "float8_e4m3fn:layers3:kv2:block4:heads2:dim8"


@pytest.mark.parametrize("size", [0, SPEC.block_bytes, 3 * SPEC.block_bytes + 1])
def test_storage_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(FieldError, match=f"kv storage: wanted {3 * SPEC.block_bytes} bytes"):
        SPEC.allocate(2, CPU, storage=memoryview(bytearray(size)))


def test_layout_differs_wherever_blocks_differ() -> None:
    assert SPEC.layout == "bfloat16:layers3:kv2:block4:heads2:dim8"
    others = [
        dataclasses.replace(SPEC, **{name: getattr(SPEC, name) * 2})
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size")
    ]
    others.append(dataclasses.replace(SPEC, dtype=torch.float16))
    others.append(dataclasses.replace(SPEC, has_values=False))
    assert len({spec.layout for spec in [SPEC, *others]}) == 7


@pytest.mark.feature("S04")
def test_what_values_are_made_of_is_kept_once() -> None:
    spec = dataclasses.replace(SPEC, num_kv_heads=1, head_dim=12, has_values=False)
    assert spec.layout == "bfloat16:layers3:kv1:block4:heads1:dim12"
    pool = spec.allocate(5, CPU)
    assert pool.shape == (6, 3, 1, 4, 1, 12)
    assert pool[3].nbytes == spec.block_bytes == 3 * 4 * 12 * 2
    views = spec.views(pool, ["a", "b", "c"])
    views["b"].k_cache.fill_(1)
    assert views["b"].v_cache.all()
    assert pool.sum() == pool.numel() / 3
