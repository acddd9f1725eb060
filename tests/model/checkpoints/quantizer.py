"""Quantized checkpoints, written from plain ones by code that shares nothing with what reads them.

Layouts are those of the programs that write such files: compressed-tensors' `pack_to_int32` and
`pack_fp4_to_uint8`, AutoGPTQ's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM.from_linear` (its
`order_map` is what `AWQ` is here), and for FP8 in blocks DeepSeek-V3's `inference/kernel.py`, by
tensor transformers' `FP8Linear` and AutoFP8's `FP8StaticLinear`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 8
LINEAR = re.compile(r".*(_proj|_with_mqa|\.w[123])\.weight")
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)
F8 = torch.float8_e4m3fn


class Grid(NamedTuple):
    """A weight [O, I] as numbers of a few bits, and the scale and zero point of each block."""

    numbers: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    plain: torch.Tensor


def quantized(
    weight: torch.Tensor,
    bits: int,
    block: tuple[int, int],
    *,
    symmetric: bool = True,
    is_float: bool = False,
    order: torch.Tensor | None = None,
) -> Grid:
    """Return a weight in blocks of so many outputs and inputs (0: all); `order` lists the inputs
    of the first group, then those of the second, and so on."""
    rows, columns = weight.shape
    height, width = block[0] or rows, block[1] or columns
    order = torch.arange(columns) if order is None else order
    numbers, plain = torch.empty(weight.shape), torch.empty(weight.shape)
    grid = -(-rows // height), -(-columns // width)
    scales, zeros = torch.empty(grid), torch.empty(grid, dtype=torch.int64)
    most = 448 if is_float else (1 << bits) - 1
    middle = 0 if is_float else 1 << (bits - 1)
    for i in range(grid[0]):
        for j in range(grid[1]):
            at = torch.arange(rows)[i * height :][:height, None], order[j * width :][:width]
            part = weight[at].float()
            reach = part.abs().max() / (448 if is_float else middle - 1)
            low = part.min()
            scale = reach if symmetric else ((part.max() - low) / most).clamp(min=1e-6)
            # Scales that a 16-bit type holds, as files have them.
            scale = scale.clamp(min=1e-6).bfloat16().float()
            zero = middle if symmetric else int((-low / scale).round().clamp(1, most))
            each = part / scale + zero
            each = each.to(F8).float() if is_float else each.round().clamp(0, most)
            numbers[at], plain[at] = each, (each - zero) * scale
            scales[i, j], zeros[i, j] = scale, zero
    return Grid(numbers, scales, zeros, plain)


def packed(numbers: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Pack rows of unsigned numbers into int32: place i of a word has its number `order[i]`."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    padded = torch.zeros(rows, -(-columns // per_word) * per_word, dtype=torch.int64)
    padded[:, :columns] = numbers
    words = torch.zeros(rows, padded.shape[1] // per_word, dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        words += padded[:, number::per_word] * 2 ** (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class Kind(NamedTuple):
    config: dict[str, Any]
    parts: Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
    """Return the tensors of a weight, and what they mean in float32."""


KV_SCHEME = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor",
    "dynamic": False,
    "group_size": None,
    "observer": "minmax",
}
"""As llm-compressor writes that of an FP8 KV cache."""


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    kind = "int" if form == "int-quantized" else "float"
    group = {
        "targets": ["Linear"],
        "weights": {"dynamic": False, "symmetric": True, **weights},
        "input_activations": {"dynamic": True, "num_bits": 8, "strategy": "token", "type": kind},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def scaled(strategy: str, block: tuple[int, int], *, is_float: bool, scale: str) -> Any:
    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grid = quantized(weight, 8, block, is_float=is_float)
        numbers = grid.numbers.to(F8) if is_float else (grid.numbers - 128).to(torch.int8)
        scales = grid.scales.flatten() if strategy == "tensor" else grid.scales
        return {"weight": numbers, scale: scales}, grid.plain

    return parts


def float_or_int(form: str, strategy: str, block: tuple[int, int], **fields: Any) -> Kind:
    is_float = form.startswith("float")
    kind = "float" if is_float else "int"
    config = compressed(form, num_bits=8, type=kind, strategy=strategy, **fields)
    return Kind(config, scaled(strategy, block, is_float=is_float, scale="weight_scale"))


def fp8(block: tuple[int, int]) -> Kind:
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    config |= {"weight_block_size": list(block), "modules_to_not_convert": ["lm_head", "mlp.gate"]}
    return Kind(config, scaled("block", block, is_float=True, scale="weight_scale_inv"))


def fp8_by_tensor(*, has_blocks: bool) -> Kind:
    """As AutoFP8 writes it, or as transformers does where a file could have blocks, too: scales
    are numbers, of activations as well."""
    plain = ["lm_head", "mlp.gate"]
    config = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": plain}
    scale, of_inputs = "weight_scale", "input_scale"
    if has_blocks:
        config |= {"weight_block_size": None, "dequantize": False, "modules_to_not_convert": plain}
        scale, of_inputs = "weight_scale_inv", "activation_scale"

    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grid = quantized(weight, 8, (0, 0), is_float=True)
        scales = {scale: grid.scales[0, 0], of_inputs: torch.tensor(INPUT_SCALE)}
        return {"weight": grid.numbers.to(F8), **scales}, grid.plain

    return Kind(config, parts)


def pack(bits: int, group: int = GROUP, *, symmetric: bool = True) -> Kind:
    fields = {"num_bits": bits, "type": "int", "symmetric": symmetric}
    fields |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}

    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grid = quantized(weight, bits, (1, group), symmetric=symmetric)
        found = {
            "weight_packed": packed(grid.numbers, bits),
            "weight_scale": grid.scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            found["weight_zero_point"] = packed(grid.zeros.T, bits).T
        return found, grid.plain

    return Kind(compressed("pack-quantized", **fields), parts)


def gptq(
    bits: int = 4,
    group: int = GROUP,
    *,
    sym: bool = True,
    desc_act: bool = False,
    version: int = 1,
    labelled: int | None = None,
) -> Kind:
    names = {1: "gptq", 2: "gptq_v2"}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "sym": sym}
    config |= {"desc_act": desc_act, "checkpoint_format": names[labelled or version]}

    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        columns, size = weight.shape[1], group or weight.shape[1]
        order = torch.arange(columns)
        if desc_act:
            order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
        grid = quantized(weight, bits, (1, group), symmetric=sym, order=order)
        g_idx = torch.empty(columns, dtype=torch.int32)
        g_idx[order] = torch.arange(columns, dtype=torch.int32) // size
        zeros = grid.zeros.T - (1 if version == 1 else 0)
        return {
            "qweight": packed(grid.numbers, bits).T,
            "qzeros": packed(zeros, bits),
            "scales": grid.scales.T,
            "g_idx": g_idx,
        }, grid.plain

    return Kind(config, parts)


def awq(group: int = GROUP) -> Kind:
    config = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "zero_point": True}
    config |= {"version": "GEMM", "modules_to_not_convert": ["gate"]}

    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        grid = quantized(weight, 4, (1, group), symmetric=False)
        return {
            "qweight": packed(grid.numbers.T, 4, AWQ),
            "qzeros": packed(grid.zeros.T, 4, AWQ),
            "scales": grid.scales.T,
        }, grid.plain

    return Kind(config, parts)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By its three bits without a sign."""
INPUT_SCALE = 300.0


def e2m1_codes(numbers: torch.Tensor) -> torch.Tensor:
    """Return the bits of what is nearest to each number, of two that are as near the even one."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    distances = (numbers.double().abs()[..., None] - torch.tensor(E2M1)[list(order)].double()).abs()
    # The first of several least ones, by its definition.
    return torch.tensor(order)[distances.numpy().argmin(-1)] + 8 * (numbers < 0)


def fp4_scale(weight: torch.Tensor) -> float:
    """Return the global scale by which the largest scale of a block is 448."""
    return float(6.0 * 448 / weight.float().abs().max())


def fp4_blocks(rows: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [..., I], scales [..., blocks] and what they mean, float32 [..., I]."""
    codes, scales, values = [], [], []
    for block in rows.float().split(16, -1):
        wanted = (block.abs().amax(-1, keepdim=True) / 6 * scale).clamp(max=448).to(F8).float()
        scales.append(torch.where(wanted == 0, 0.125, wanted))
        codes.append(e2m1_codes(block / (scales[-1] / scale)))
        numbers = torch.tensor(E2M1)[codes[-1] % 8] * torch.where(codes[-1] > 7, -1.0, 1.0)
        values.append(numbers * (scales[-1] / scale))
    return torch.cat(codes, -1), torch.cat(scales, -1), torch.cat(values, -1)


def nvfp4(*, has_inputs: bool = True) -> Kind:
    fields = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    config = compressed("nvfp4-pack-quantized", **fields)
    inputs = {"dynamic": "local", **fields} if has_inputs else None
    config["config_groups"]["group_0"]["input_activations"] = inputs

    def parts(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        scale = fp4_scale(weight)
        codes, scales, plain = fp4_blocks(weight, scale)
        found = {
            "weight_packed": (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8),
            "weight_scale": scales.to(F8),
            "weight_global_scale": torch.tensor([scale]),
        }
        if has_inputs:
            found["input_global_scale"] = torch.tensor([INPUT_SCALE])
        return found, plain

    return Kind(config, parts)


KINDS = {
    "float by channel": float_or_int("float-quantized", "channel", (1, 0)),
    "float by tensor": float_or_int("float-quantized", "tensor", (0, 0)),
    "float by block": float_or_int("float-quantized", "block", (8, 4), block_structure=[8, 4]),
    "int by channel": float_or_int("int-quantized", "channel", (1, 0)),
    "int by tensor": float_or_int("int-quantized", "tensor", (0, 0)),
    "fp8": fp8((4, 8)),
    "fp8 by tensor": fp8_by_tensor(has_blocks=True),
    "AutoFP8": fp8_by_tensor(has_blocks=False),
    "packed 4": pack(4),
    "packed 8 by channel": pack(8, 0),
    "packed 4 with zeros": pack(4, symmetric=False),
    "packed 8 with zeros": pack(8, symmetric=False),
    "gptq 4": gptq(),
    "gptq 8 by channel": gptq(8, 0),
    "gptq 4 with zeros": gptq(sym=False),
    "gptq 8 of version 2": gptq(8, sym=False, version=2),
    "gptq labelled wrongly": gptq(version=2, labelled=1),
    "nvfp4": nvfp4(),
    "nvfp4 of weights alone": nvfp4(has_inputs=False),
    "awq": awq(),
    "awq by channel": awq(0),
}
REORDERED = {"gptq in order of activations": gptq(sym=False, desc_act=True)}


def write(
    source: Path, kind: Kind, directory: Path, is_kept: Callable[[str], bool] = lambda _: False
) -> tuple[Path, Path]:
    """Quantize a copy of a checkpoint of one file, all linear weights but those that are kept.
    Return it, and a plain one of what it means, in float32."""
    quantized, plain = (
        Path(shutil.copytree(source, directory / name)) for name in ("quantized", "plain")
    )
    found, meant = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not LINEAR.fullmatch(name) or is_kept(name):
            found[name] = meant[name] = tensor
            continue
        parts, meant[name] = kind.parts(tensor)
        module = name.removesuffix("weight")
        found |= {module + part: each.contiguous() for part, each in parts.items()}
    save_file(found, quantized / "model.safetensors")
    save_file({name: each.float() for name, each in meant.items()}, plain / "model.safetensors")
    path = quantized / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": kind.config}
    path.write_text(json.dumps(config))
    return quantized, plain
