"""Products of short numbers with scales.

Integers have one for each group of inputs of an output. Devices' own kernels multiply them.

FP8 (e4m3) has one for each token of the inputs and one for each output of the weight. These are the
scales that torch multiplies by on every device (`_scaled_mm` by rows): on a GPU it knows them from
sm_89 on, with results in bfloat16, and on a CPU in any dtype, but not in all versions. A scale for
the whole weight would lose more to its largest number and save nothing. Where a checkpoint has one
for each 128 inputs, so has either side (DeepSeek-V3; DeepSeek-AI, 2024). Where torch does not
multiply on a GPU, a Triton kernel does.

FP4 (e2m1, NVFP4) has one for each 16 numbers of either side, in e4m3, and one for all of them. GPUs
multiply these from sm_100 on; on others a Triton kernel does.

Where torch does not multiply on a CPU, both sides become float32, which rounds alike.

Shapes: T tokens, I inputs, O outputs, B = I / 16 blocks, G groups of inputs: one, or each of 128.
"""

from __future__ import annotations

import functools
import logging
import mmap
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from compile.formats import FP4_BLOCK, FP8_GROUP
from compile.passes.quantizers import (
    FP8,
    fp4_values,
    quantize_blocks,
    quantize_fp8_per_token,
    quantize_fp8_per_token_group,
    quantize_nvfp4,
    quantize_rows,
)
from model.quantization import Float4, Float8, Integers

OUTPUTS_AT_ONCE = 64
"""That become FP8: what they take in float32 is bounded."""

FIRST_FP8_GPU, FIRST_FP4_GPU = (8, 9), (10, 0)
"""The compute capabilities from which GPUs multiply FP8 numbers, and FP4 numbers in blocks."""
FP4_MULTIPLES = (32, 16)
"""Of which inputs and outputs are where they do."""
FP8_MULTIPLE = 16
"""Of which both are where torch multiplies FP8 on a GPU."""

logger = logging.getLogger(__name__)


class ScaledWeight(NamedTuple):
    numbers: torch.Tensor
    """e4m3 [O, I], or of all experts [Xr, O, I]"""
    scales: torch.Tensor
    """float32 [G, O], [Xr, G, O]"""

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device, *, is_grouped: bool) -> Self:
        *stacked, outputs, inputs = shape
        groups = -(-inputs // FP8_GROUP) if is_grouped else 1
        return cls(
            torch.empty(shape, dtype=FP8, device=device),
            torch.empty(*stacked, groups, outputs, dtype=torch.float32, device=device),
        )

    def fill(self, outputs: slice, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        """Copy some outputs. scales: [O, G], or what broadcasts to that"""
        self.numbers[outputs].copy_(numbers)
        self.scales[:, outputs].copy_(scales.expand(len(numbers), len(self.scales)).t())

    def of_expert(self, number: int) -> Self:
        return type(self)(*(tensor[number] for tensor in self))

    @property
    def form(self) -> Float8:
        return Float8(is_grouped=self.scales.shape[-2] > 1)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.numbers.shape

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def input_scale(self) -> None:
        """Each token has its own."""

    @property
    def nbytes(self) -> int:
        return self.numbers.nbytes + self.scales.nbytes


class IntegerWeight(NamedTuple):
    tiles: torch.Tensor
    """int32 [O / N, G, 1 + words, N], of N outputs side by side first a group's scales, in float32;
    or of all experts [Xr, ...]"""
    integers: Integers


class BlockScaledWeight(NamedTuple):
    """Stands for e2m1 times the scale of its block, over the global scale of its output. Of all
    experts each tensor is one dimension more."""

    numbers: torch.Tensor
    """Two e2m1 numbers a byte, the first one its low half: uint8 [O, I / 2]"""
    blocks: torch.Tensor
    """Scales of 16 inputs: e4m3 [O, B], or of one dimension as torch's product has them"""
    global_scales: torch.Tensor
    """float32 [1, O]: the tensors that a layer joins may differ."""
    input_scale: torch.Tensor
    """The global scale of what it is multiplied with: float32 [1]"""

    @classmethod
    def empty(cls, shape: tuple[int, ...], device: torch.device) -> Self:
        *stacked, outputs, inputs = shape
        return cls(
            torch.empty(*stacked, outputs, inputs // 2, dtype=torch.uint8, device=device),
            torch.empty(*stacked, outputs, inputs // FP4_BLOCK, dtype=FP8, device=device),
            torch.empty(*stacked, 1, outputs, dtype=torch.float32, device=device),
            torch.full((*stacked, 1), torch.inf, dtype=torch.float32, device=device),
        )

    def fill(
        self,
        outputs: slice,
        numbers: torch.Tensor,
        blocks: torch.Tensor,
        global_scale: torch.Tensor,
        input_scale: torch.Tensor,
    ) -> None:
        """Copy some outputs. Of several input scales the least counts: the largest number that any
        of them is made for is not cut off."""
        self.numbers[outputs].copy_(numbers)
        self.blocks[outputs].copy_(blocks)
        self.global_scales[0, outputs] = global_scale.to(self.device)
        self.input_scale.copy_(torch.minimum(self.input_scale, input_scale.to(self.device)))

    def of_expert(self, number: int) -> Self:
        return type(self)(*(tensor[number] for tensor in self))

    @property
    def form(self) -> Float4:
        return Float4()

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.numbers.shape[:-1], 2 * self.numbers.shape[-1]

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self)

    def laid_out(self) -> Self:
        """Return it with its scales as the product that will be computed has them."""
        if len(self.shape) > 2:
            return self
        outputs, inputs = self.shape
        is_even = inputs % FP4_MULTIPLES[0] == 0 and outputs % FP4_MULTIPLES[1] == 0
        if multiplies_blocks(self.device) and is_even:
            return self._replace(blocks=in_tiles(self.blocks))
        return self


def scaled_weight(weight: torch.Tensor) -> ScaledWeight:
    """Round a weight [O, I], or [Xr, O, I], each output by its largest number."""
    if weight.device.type == "cpu":
        # A mapping of its own: in the heap, what is freed behind it would leave gaps.
        memory = mmap.mmap(-1, max(weight.numel(), 1))
        numbers = torch.frombuffer(memory, dtype=FP8)[: weight.numel()].view(weight.shape)
    else:
        numbers = torch.empty_like(weight, dtype=FP8, memory_format=torch.contiguous_format)
    *experts, outputs, inputs = weight.shape
    scales = weight.new_empty((*experts, 1, outputs), dtype=torch.float32)
    rows, in_rows = weight.view(-1, inputs), numbers.view(-1, inputs)
    for start in range(0, len(rows), OUTPUTS_AT_ONCE):
        some = slice(start, start + OUTPUTS_AT_ONCE)
        rounded, of_rows = quantize_rows(rows[some])
        in_rows[some].copy_(rounded)
        scales.view(-1)[some] = of_rows.squeeze(1)
    return ScaledWeight(numbers, scales)


def quantize_inputs(
    x: torch.Tensor, form: Float8 | Float4, input_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the numbers and scales of x [T, I] that are multiplied with a weight of this form and,
    if that is FP4, scale of inputs."""
    found: tuple[torch.Tensor, torch.Tensor]
    if isinstance(form, Float4):
        found = quantize_nvfp4(x, input_scale)
    elif form.is_grouped:
        found = quantize_fp8_per_token_group(x)
    else:
        found = quantize_fp8_per_token(x)
    return found


def scaled_linear(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight | BlockScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return [T, O] in `dtype`. numbers, scales: e4m3 [T, I] and float32 [T, G], or of an FP4
    weight uint8 [T, I / 2] and e4m3 [T, B]; bias: [O] in `dtype`."""
    if isinstance(weight, BlockScaledWeight):
        has_tiles = weight.blocks.ndim == 1
        product = _multiply_blocks if has_tiles else _multiply_wide_blocks
        wide = product(numbers, scales, weight)
        wide = wide / (weight.global_scales * weight.input_scale)
    elif weight.form.is_grouped:
        wide = F.linear(_spread(numbers, scales), _spread(weight.numbers, weight.scales.t()))
    elif numbers.is_cuda or multiplies_rows():
        return _multiply(numbers, scales, weight, bias, dtype)
    else:
        wide = F.linear(numbers.float(), weight.numbers.float()) * scales * weight.scales
    return (wide if bias is None else wide + bias).to(dtype)


@functools.cache
def multiplies_fp8(device: torch.device) -> bool:
    """Return whether a device is a GPU that multiplies FP8 numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_FP8_GPU


def multiplies_on_gpu(weight: ScaledWeight, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies on the weight's GPU, with results of this dtype."""
    is_even = all(size % FP8_MULTIPLE == 0 for size in weight.shape)
    is_taken = is_even and dtype == torch.bfloat16 and not weight.form.is_grouped
    return is_taken and multiplies_fp8(weight.device)


def _spread(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return what FP8 numbers [N, I] and scales [N, G] stand for, in float32."""
    return numbers.float() * scales.repeat_interleave(FP8_GROUP, 1)[:, : numbers.shape[1]]


@functools.cache
def multiplies_rows() -> bool:
    """Return whether torch multiplies by rows on a CPU: some versions do only by tensors."""
    weight = scaled_weight(torch.tensor([[1.0, 2.0], [4.0, 8.0]]))
    x, scales = quantize_rows(torch.eye(2))
    try:
        _multiply(x, scales, weight, None, torch.float32)
    except RuntimeError as error:
        logger.info("FP8 products become float32: %s", str(error).splitlines()[0])
        return False
    return True


def _multiply(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    weight: ScaledWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    product: torch.Tensor = torch._scaled_mm(
        numbers,
        weight.numbers.t(),
        scale_a=scales,
        scale_b=weight.scales,
        bias=bias,
        out_dtype=dtype,
    )
    return product


@functools.cache
def multiplies_blocks(device: torch.device) -> bool:
    """Return whether torch multiplies FP4 numbers on a device, as it should."""
    try:
        if device.type != "cuda" or torch.cuda.get_device_capability(device) < FIRST_FP4_GPU:
            raise RuntimeError("no GPU from sm_100 on")
        x = torch.linspace(-2, 2, 48 * 64, device=device).cos().view(48, 64)
        scale = torch.full((1,), 100.0, device=device)
        numbers, scales = quantize_blocks(x, scale)
        weight = BlockScaledWeight(numbers, scales, scale.expand(1, 48), scale)
        wanted = _multiply_wide_blocks(numbers[:3], scales[:3], weight)
        weight = weight._replace(blocks=in_tiles(scales))
        torch.testing.assert_close(_multiply_blocks(numbers[:3], scales[:3], weight), wanted)
    except (AssertionError, AttributeError, RuntimeError, ValueError) as error:
        logger.info("FP4 numbers are widened: %s", str(error).splitlines()[0])
        return False
    return True


def in_tiles(scales: torch.Tensor) -> torch.Tensor:
    """Return scales of blocks [N, B] as GPUs read them (cuBLAS, "1D block scaling factors layout"):
    tiles of 128 rows and 4 columns, padded with zeros, and of a tile rows 0, 32, 64 and 96 side by
    side, then rows 1, 33 and so on. One dimension."""
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.unflatten(1, (-1, 4)).unflatten(0, (-1, 4, 32))
    found: torch.Tensor = tiles.permute(0, 3, 2, 1, 4).flatten().view(FP8)
    return found


def _multiply_blocks(
    numbers: torch.Tensor, scales: torch.Tensor, weight: BlockScaledWeight
) -> torch.Tensor:
    """Return float32 [T, O], without global scales."""
    recipe, swizzle = F.ScalingType.BlockWise1x16, F.SwizzleType.SWIZZLE_32_4_4
    product: torch.Tensor = F.scaled_mm(
        numbers.view(torch.float4_e2m1fn_x2),
        weight.numbers.view(torch.float4_e2m1fn_x2).t(),
        in_tiles(scales),
        recipe,
        weight.blocks,
        recipe,
        swizzle,
        swizzle,
        output_dtype=torch.float32,
    )
    return product


def _multiply_wide_blocks(
    numbers: torch.Tensor, scales: torch.Tensor, weight: BlockScaledWeight
) -> torch.Tensor:
    """Do it in float32, where torch does not."""
    return F.linear(_wide(numbers, scales), _wide(weight.numbers, weight.blocks))


def _wide(numbers: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    wide = fp4_values(numbers).unflatten(-1, (-1, FP4_BLOCK))
    found: torch.Tensor = wide.mul_(blocks.float().unsqueeze(-1)).flatten(-2)
    return found
