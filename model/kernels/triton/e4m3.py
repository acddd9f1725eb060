"""Numbers of a cache of e4m3, by integer operations on their bytes: the same on every GPU, of which
sm_80 has no instruction for them."""

from __future__ import annotations

import triton
import triton.language as tl

UNIT = tl.constexpr(256.0)
"""What `from_e4m3` leaves out."""


@triton.jit
def from_e4m3(codes: tl.tensor) -> tl.tensor:
    """Return numbers / UNIT in float16, exactly: its exponent and mantissa are the same bits, with
    another bias. UNIT is left to the caller's scale, which is float32."""
    bits = codes.to(tl.uint16)
    rest = bits & 0x7F
    # Only of what is no number the sum has the next bit, which completes float16's exponent.
    half = rest << 7 | (bits & 0x80) << 8 | ((rest + 1) & 0x80) << 7
    return half.to(tl.float16, bitcast=True)


@triton.jit
def to_e4m3(x: tl.tensor) -> tl.tensor:
    """Return codes of float32 numbers, rounded to nearest, ties to even, and cut off at 448. Below
    2^-6 a sum rounds, of which the last bit is 2^-9."""
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - 960
    small = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(x != x, 0x7F, tl.where(magnitude < 0.015625, small, normal))
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8)
