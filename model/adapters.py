"""LoRA adapters as PEFT saves them, read into slots of a model: each rank reads its slices alone.

Slots are static: what is traced and captured knows their shapes and addresses, and which adapter
is in which may change while the model serves.

A layer that splits its outputs splits an adapter's B with them and has all of A; one that splits
its inputs splits A, and what B makes of a part is summed over the ranks with the layer's own. Where
they go follows from what the layers say of their weights (`WeightSlice`).

Shapes: I inputs, O outputs, R rank, as in `model.layers.lora`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from compile.errors import Words
from model.config import fingerprint
from model.files import refused
from model.layers.decoder import CausalLM
from model.layers.linear import Linear
from model.layers.slices import WeightSlice
from model.lora_config import CONFIG_FILE, LoraConfig
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


@dataclass(frozen=True)
class SlotLayout:
    """The room for adapters in a model: a traced graph depends on nothing else of them."""

    num_slots: int
    max_rank: int
    modules: frozenset[str] | None
    """Whose layers have room; None: all that may take adapters, whatever will be read."""

    @classmethod
    def of(cls, adapters: Sequence[Adapter], num_slots: int, max_rank: int) -> SlotLayout | None:
        """Return the room for adapters to begin with, and for others up to `num_slots` of
        `max_rank`, if those are more; None if there are neither."""
        ranks = [adapter.max_rank for adapter in adapters]
        if num_slots > len(adapters):
            return cls(num_slots, max(max_rank, *ranks) if ranks else max_rank, None)
        if not adapters:
            return None
        used = frozenset().union(*(adapter.modules for adapter in adapters))
        return cls(len(adapters), max(ranks), used)

    def has_room_at(self, modules: Iterable[str]) -> bool:
        return self.modules is None or not self.modules.isdisjoint(modules)


def traced_layout(paths: Sequence[str], num_slots: int = 0, max_rank: int = 0) -> str:
    """Return what a traced graph depends on of adapters: how many there may be, how wide, and
    where. Empty without room for one. Arguments are those of `load_adapters`."""
    layout = SlotLayout.of([Adapter.from_dir(path) for path in paths], num_slots, max_rank)
    if layout is None:
        return ""
    modules = "all" if layout.modules is None else sorted(layout.modules)
    return repr((layout.num_slots, layout.max_rank, modules))


class ModelAdapters:
    """The slots of a model's linear layers, each of which one adapter may fill. Invariant: what a
    slot holds is finite, also while it is written and where a read has failed."""

    def __init__(self, model: CausalLM, layout: SlotLayout | None) -> None:
        """Reserve the slots. They add nothing as long as nothing was read into them."""
        self._architecture = model.config.architecture
        self._max_rank = layout.max_rank if layout is not None else 0
        self._homes: dict[Linear, list[WeightSlice]] = {}
        homes: dict[Linear, list[WeightSlice]] = {}
        for piece in model.weight_slices():
            layer = piece.layer
            if model.is_extra(piece.name):
                continue  # adapters are made for the model alone
            if isinstance(layer, Linear) and layer.is_quantizable and piece.parameter == "weight":
                homes.setdefault(layer, []).append(piece)
        self._known = {_module(piece) for pieces in homes.values() for piece in pieces}
        for layer, pieces in homes.items():
            if layout is not None and layout.has_room_at(map(_module, pieces)):
                # A part is what one piece fills of the outputs; one that splits inputs has one.
                sizes = [len(layer.weight[piece.rows]) for piece in pieces]
                layer.take_adapters(layout.num_slots, layout.max_rank, sizes)
                self._homes[layer] = pieces

    def check(self, adapter: Adapter) -> None:
        """Refuse an adapter of modules that the model has not, or too wide for a slot."""
        for module in sorted(adapter.modules - self._known):
            field = f"tensor {_name(module, 'A')}"
            wanted = f"linear layers of {self._architecture} that take adapters"
            raise refused(field, wanted, Words("another"), adapter.weights)
        directory = adapter.weights.parent
        adapter.config.check_targets(adapter.modules, self._known, directory)
        for module in sorted(adapter.modules):
            if (rank := adapter.config.rank_of(module)) > self._max_rank:
                wanted = f"a rank of at most {self._max_rank} (max_lora_rank)"
                raise refused(f"module {module}", wanted, rank, directory / CONFIG_FILE)

    def reading(self, slot: int, path: str, wanted: bytes) -> Iterator[None]:
        """Read an adapter whose files have this fingerprint into a slot that no token has, a layer
        at every turn. A FieldError names the file and what it has that does not fit; then the slot
        must not be used."""
        directory = Path(path)
        adapter = Adapter.from_dir(directory)
        self.check(adapter)
        try:
            found = fingerprint(directory)
        except OSError as error:
            found_error = Words(error.strerror or type(error).__name__)
            raise refused(directory.name, "readable files", found_error, directory) from error
        if found != wanted:
            first = "the files that it was loaded from first"
            raise refused(directory.name, first, Words("others"), directory)
        yield from self.fill(slot, adapter)

    def fill(self, slot: int, adapter: Adapter) -> Iterator[None]:
        """Read a checked adapter as `reading` does. All shapes are compared before the first number
        is written, and what it has no numbers for becomes zero."""
        with opened_tensors(adapter.weights) as file:
            for pieces in self._homes.values():
                for piece in pieces:
                    if (module := _module(piece)) in adapter.modules:
                        rank, (outputs, inputs) = adapter.config.rank_of(module), piece.shape
                        _check_tensor(adapter, file, module, "A", (rank, inputs))
                        _check_tensor(adapter, file, module, "B", (outputs, rank))
            for layer, pieces in self._homes.items():
                yield
                layer.clear_slot(slot)
                for part, piece in enumerate(pieces):
                    if _module(piece) in adapter.modules:
                        _fill(adapter, file, slot, piece, part * self._max_rank)


@torch.no_grad()
def load_adapters(
    model: CausalLM, paths: Sequence[str], num_slots: int = 0, max_rank: int = 0
) -> ModelAdapters:
    """Give the linear layers of a model what adapters add to them, in the order of their paths, and
    room for others up to `num_slots` of `max_rank` in all layers that may take some. A FieldError
    names the file and what it has that the model has not, or the other way round."""
    adapters = [Adapter.from_dir(path) for path in paths]
    slots = ModelAdapters(model, SlotLayout.of(adapters, num_slots, max_rank))
    for adapter in adapters:
        slots.check(adapter)
    for slot, adapter in enumerate(adapters):
        for _ in slots.fill(slot, adapter):
            pass
    return slots


def _fill(adapter: Adapter, file: Any, slot: int, piece: WeightSlice, first: int) -> None:
    """Read one module's matrices; its rows of the layer's A begin at `first`."""
    module, layer = _module(piece), piece.layer
    assert isinstance(layer, Linear) and layer.lora_a is not None and layer.lora_b is not None
    rank, cut = adapter.config.rank_of(module), slice(piece.start, piece.stop)
    of_a, of_b = (cut, slice(None)) if piece.dim == 1 else (slice(None), cut)
    a = _read(adapter, file, module, "A")[:, of_a]
    b = _read(adapter, file, module, "B")[of_b].float()
    scaled = (b * adapter.config.scale_of(module)).T
    for half, values, target in (
        ("A", a, layer.lora_a[slot, first : first + rank]),
        ("B", scaled, layer.lora_b[slot, :rank, piece.rows]),
    ):
        rounded = values.to(layer.dtype)
        if not rounded.isfinite().all():
            dtype = str(layer.dtype).removeprefix("torch.")
            field = f"tensor {_name(module, half)}"
            wanted = f"finite numbers that {dtype} holds, scaled"
            raise refused(field, wanted, Words("another"), adapter.weights)
        target.copy_(rounded)


def _check_tensor(
    adapter: Adapter, file: Any, module: str, half: str, shape: tuple[int, int]
) -> None:
    name, path = _name(module, half), adapter.weights
    stored = file.get_slice(name)
    found, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if found != shape:
        raise refused(f"tensor {name}", f"shape {shape}", found, path)
    if dtype not in FLOATS:
        raise refused(f"tensor {name}", f"one of {', '.join(FLOATS)}", dtype, path)


def _read(adapter: Adapter, file: Any, module: str, half: str) -> torch.Tensor:
    try:
        tensor: torch.Tensor = file.get_tensor(_name(module, half))
    except (OSError, SafetensorError) as error:
        raise broken(adapter.weights, error) from error
    return tensor


def _module(piece: WeightSlice) -> str:
    return piece.name.removesuffix(".weight")


def _name(module: str, half: str) -> str:
    return f"base_model.model.{module}.lora_{half}.weight"
