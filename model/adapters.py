"""LoRA adapters as PEFT saves them, read into a model: each rank reads its slices alone.

A layer that splits its outputs splits an adapter's B with them and has all of A; one that splits
its inputs splits A, and what B makes of a part is summed over the ranks with the layer's own. Where
they go follows from what the layers say of their weights (`WeightSlice`), and everything is
compared before the first number is read.

Shapes: I inputs, O outputs, R rank, as in `model.layers.lora`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from compile.errors import Words
from model.files import refused
from model.layers.decoder import CausalLM
from model.layers.linear import Linear
from model.layers.slices import WeightSlice
from model.lora_config import LoraConfig
from model.stored_weights import FLOATS
from model.weights import broken, opened_tensors

WEIGHTS_FILE = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Adapter:
    """One adapter's files. Invariant: each of `modules` has both of its matrices in `weights`."""

    weights: Path
    config: LoraConfig
    modules: frozenset[str]

    @classmethod
    def from_dir(cls, path: Path | str) -> Adapter:
        """Read the configuration, and the names of the tensors; a FieldError says what is amiss."""
        directory = Path(path)
        config, weights = LoraConfig.from_dir(directory), directory / WEIGHTS_FILE
        halves: dict[str, set[str]] = {"A": set(), "B": set()}
        with opened_tensors(weights) as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if (found := _TENSOR.fullmatch(name)) is None:
                    wanted = "only base_model.model.NAME.lora_A.weight and lora_B.weight"
                    raise refused(f"tensor {name}", wanted, Words("it"), weights)
                halves[found[2]].add(found[1])
        for module in sorted(halves["A"] ^ halves["B"]):
            half = "B" if module in halves["A"] else "A"
            field = f"tensor {_name(module, half)}"
            raise refused(field, "beside the other half", Words("none"), weights)
        if not halves["A"]:
            raise refused(weights.name, "tensors of an adapter", Words("none"), weights)
        return cls(weights, config, frozenset(halves["A"]))

    @property
    def max_rank(self) -> int:
        return max(map(self.config.rank_of, self.modules))


def traced_layout(paths: Sequence[str]) -> str:
    """Return what a traced graph depends on of adapters: how many there are, how wide, and where.
    Empty without one."""
    adapters = [Adapter.from_dir(path) for path in paths]
    if not adapters:
        return ""
    modules = sorted(frozenset().union(*(adapter.modules for adapter in adapters)))
    return repr((len(adapters), max(adapter.max_rank for adapter in adapters), modules))


@torch.no_grad()
def load_adapters(model: CausalLM, paths: Sequence[str]) -> None:
    """Give the linear layers of a model what adapters add to them, in the order of their paths. A
    FieldError names the file and what it has that the model has not, or the other way round."""
    adapters = [Adapter.from_dir(path) for path in paths]
    if not adapters:
        return
    homes: dict[Linear, list[WeightSlice]] = {}
    for piece in model.weight_slices():
        layer = piece.layer
        if model.is_extra(piece.name):
            continue  # adapters are made for the model alone
        if isinstance(layer, Linear) and layer.is_quantizable and piece.parameter == "weight":
            homes.setdefault(layer, []).append(piece)
    known = {_module(piece): piece for pieces in homes.values() for piece in pieces}
    for adapter in adapters:
        for module in sorted(adapter.modules - known.keys()):
            field = f"tensor {_name(module, 'A')}"
            wanted = f"linear layers of {model.config.architecture} that take adapters"
            raise refused(field, wanted, Words("another"), adapter.weights)
        directory = adapter.weights.parent
        adapter.config.check_targets(adapter.modules, known.keys(), directory)
    rank = max(adapter.max_rank for adapter in adapters)
    used = frozenset().union(*(adapter.modules for adapter in adapters))
    for layer, pieces in homes.items():
        if not used.isdisjoint(map(_module, pieces)):
            # A part is what one piece fills of the outputs; a layer that splits inputs has one.
            sizes = [len(layer.weight[piece.rows]) for piece in pieces]
            layer.take_adapters(len(adapters), rank, sizes)
    for index, adapter in enumerate(adapters):
        with opened_tensors(adapter.weights) as file:
            for pieces in homes.values():
                for part, piece in enumerate(pieces):
                    if _module(piece) in adapter.modules:
                        _fill(adapter, file, index, piece, part * rank)


def _fill(adapter: Adapter, file: Any, index: int, piece: WeightSlice, first: int) -> None:
    """Read one module's matrices; its rows of the layer's A begin at `first`."""
    module, layer = _module(piece), piece.layer
    assert isinstance(layer, Linear) and layer.lora_a is not None and layer.lora_b is not None
    outputs, inputs = piece.shape
    rank, cut = adapter.config.rank_of(module), slice(piece.start, piece.stop)
    of_a, of_b = (cut, slice(None)) if piece.dim == 1 else (slice(None), cut)
    a = _read(adapter, file, module, "A", (rank, inputs))[:, of_a]
    b = _read(adapter, file, module, "B", (outputs, rank))[of_b].float()
    scaled = (b * adapter.config.scale_of(module)).T
    for half, values, target in (
        ("A", a, layer.lora_a[index, first : first + rank]),
        ("B", scaled, layer.lora_b[index, :rank, piece.rows]),
    ):
        target.copy_(values)
        if not target.isfinite().all():
            dtype = str(layer.dtype).removeprefix("torch.")
            field = f"tensor {_name(module, half)}"
            wanted = f"finite numbers that {dtype} holds, scaled"
            raise refused(field, wanted, Words("another"), adapter.weights)


def _read(
    adapter: Adapter, file: Any, module: str, half: str, shape: tuple[int, int]
) -> torch.Tensor:
    name, path = _name(module, half), adapter.weights
    stored = file.get_slice(name)
    found, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if found != shape:
        raise refused(f"tensor {name}", f"shape {shape}", found, path)
    if dtype not in FLOATS:
        raise refused(f"tensor {name}", f"one of {', '.join(FLOATS)}", dtype, path)
    try:
        tensor: torch.Tensor = file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise broken(path, error) from error
    return tensor


def _module(piece: WeightSlice) -> str:
    return piece.name.removesuffix(".weight")


def _name(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"
