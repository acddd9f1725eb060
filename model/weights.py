"""Open a checkpoint: its configuration, an empty model, and its weights, each rank only its slices.
The model says which weights it wants and where they go (`WeightSlice`), `model.stored_weights`
which tensors a quantized one is stored as, and everything is compared before the first byte of
weights is read. What was read must be finite on its device."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from compile.errors import FieldError, Words
from model.config import ModelConfig
from model.files import check_file, read_json, refused
from model.layers.attention import scale_of
from model.layers.decoder import CausalLM
from model.layers.linear import kv_heads_of
from model.layers.slices import WeightedLayer, WeightSlice
from model.parallel import Placement, Shard
from model.quantization import NVFP4, Quantization, WeightFormat
from model.stored_weights import (
    FLOATS,
    Cut,
    Stored,
    held_of,
    plain_tensor,
    stored_tensors,
    values_of,
)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
COMPARED_ROWS = 8192
_HALVES = ("F16", "BF16")
log = logging.getLogger("lockstep.model")
ALONE = Shard()


@dataclass(frozen=True)
class _Source:
    """Where a piece is read: the tensors that it is stored as, each with its file."""

    piece: WeightSlice
    stored: tuple[Stored, ...]
    paths: tuple[Path, ...]
    quantization: Quantization | None
    """None for a plain tensor."""

    @property
    def cut(self) -> Cut:
        return Cut(self.piece.dim, self.piece.start, self.piece.stop)

    @property
    def is_kept(self) -> bool:
        """Whether the layer holds these tensors as they are."""
        stored = self.quantization
        return stored is not None and stored.is_held_as(self.piece.layer.form)


@torch.no_grad()
def load_weights(
    model: CausalLM, checkpoint_dir: Path | str, progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill the parameters of `model`; `progress` is called with (weights done, weights in all). A
    FieldError names the file and the tensor that is missing, unknown, broken, of another shape or
    not finite, or that this rank's part would split; the parameters' values mean nothing then."""
    directory = Path(checkpoint_dir)
    files = _tensor_files(directory)
    if extra := [name for name in files if model.is_extra(name) and model.is_ignored(name)]:
        layers = f"the {model.config.num_nextn_predict_layers} num_nextn_predict_layers"
        log.info("%d tensors of %s are not used, in %s", len(extra), layers, directory)
    wanted = {piece.name: piece for piece in model.weight_slices(files.keys())}
    missing = Counter(piece.home for piece in wanted.values())
    sources = [
        _source(piece, model.config.quantization, files, directory) for piece in wanted.values()
    ]
    _check_kept(sources, directory)
    by_file = _plan(sources, files, model)
    report = progress or (lambda _done, _total: None)
    report(0, len(wanted))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(opened_tensors(path)) for path in by_file}
        read, extremes = [], []
        # The largest parameters first: one that is packed is there twice for a while.
        sources.sort(key=lambda source: -source.piece.home_bytes)
        for done, source in enumerate(sources, 1):
            piece = source.piece
            if piece.start < piece.stop:
                read.append(source)
                extremes.append(_read(source, opened))
            elif not source.is_kept:
                piece.target()
            missing[piece.home] -= 1
            if not missing[piece.home]:
                piece.layer.loaded(piece.parameter)
            report(done, len(wanted))
        # All at once: a GPU is waited for here alone.
        is_finite = torch.stack(extremes).isfinite().all(1).tolist()
        for source, is_good in zip(read, is_finite, strict=True):
            if not is_good:
                raise _not_finite(source, opened)


def load_kv_scales(
    model: CausalLM, checkpoint_dir: Path, place: Placement, *, is_used: bool
) -> None:
    """Give each attention layer the scales that the checkpoint has for an FP8 cache of its keys and
    values, for all heads or for each, 1 where it has none at all. A FieldError names one that is
    missing, twice there, or not above 0. Unless they are used, a line says that they are passed
    over."""
    files = _tensor_files(checkpoint_dir)
    layers = {name.removesuffix(".attn"): each for name, each in model.attention_layers().items()}
    names: dict[tuple[str, str], str] = {}
    for name in files:
        found = scale_of(name)
        if found is None or found[1] == "q":
            continue
        if found[0] not in layers or found in names:
            wanted = "one scale for the keys of a layer and one for its values"
            raise refused(f"tensor {name}", wanted, Words("another"), files[name])
        names[found] = name
    if not is_used:
        if names:
            log.info("scales of FP8 KV are passed over: kv_cache_dtype is auto")
        return
    if not names:
        log.warning("scales of FP8 KV: wanted k_scale and v_scale, found none; 1 in their place")
    with ExitStack() as stack:
        paths = dict.fromkeys(files[name] for name in names.values())
        opened = {path: stack.enter_context(opened_tensors(path)) for path in paths}
        for prefix, layer in layers.items():
            scales = torch.ones(2, layer.num_kv_heads)
            for kind, own in zip("kv", scales, strict=True) if names else ():
                name = names.get((prefix, kind), "")
                if not name:
                    field = f"tensor {prefix}.{kind}_scale"
                    raise refused(field, "in the checkpoint", Words("none"), checkpoint_dir)
                num_heads = model.config.num_kv_heads
                of_all = _kv_scales(name, num_heads, opened[files[name]], files[name])
                count, first = kv_heads_of(num_heads, place.shard)
                own.copy_(of_all[first : first + count])
            # Each layer's has an address of its own, as aligned as all others.
            layer.kv_scales = scales.to(place.device)


def _kv_scales(name: str, num_heads: int, file: Any, path: Path) -> torch.Tensor:
    """Return float32 [heads]."""
    field = f"tensor {name}"
    if name not in file.keys():  # noqa: SIM118 (no mapping)
        raise refused(field, "where the index says", Words("none"), path)
    stored = file.get_slice(name)
    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
    if math.prod(shape) not in (1, num_heads):
        raise refused(field, f"one number, or one for each of {num_heads} KV heads", shape, path)
    if dtype not in FLOATS:
        raise refused(field, f"one of {', '.join(FLOATS)}", dtype, path)
    values: torch.Tensor = file.get_tensor(name).float().flatten()
    for value in values.tolist():
        if not 0 < value < math.inf:
            wanted = "a number above 0" if len(values) == 1 else "numbers above 0"
            raise refused(field, wanted, value, path)
    return values.expand(num_heads) if len(values) == 1 else values


def has_own_head(checkpoint_dir: Path) -> bool:
    """Return whether a checkpoint holds a head that is not its embeddings. Like transformers' it
    then counts, though the model may be configured as tied. All of both is compared, so that every
    rank finds the same."""
    files = _tensor_files(checkpoint_dir)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not all(name in files for name in names):
        return False
    with ExitStack() as stack:
        opened = [(stack.enter_context(opened_tensors(files[name])), name) for name in names]
        if not all(name in file.keys() for file, name in opened):  # noqa: SIM118 (no mapping)
            return False  # the index says what is not so, which loading tells
        head, embeddings = (file.get_slice(name) for file, name in opened)
        if head.get_shape() != embeddings.get_shape():
            return True
        starts = range(0, head.get_shape()[0], COMPARED_ROWS)
        parts = (slice(start, start + COMPARED_ROWS) for start in starts)
        return any(not torch.equal(head[p].float(), embeddings[p].float()) for p in parts)


def _quantization_of(piece: WeightSlice, quantization: Quantization | None) -> Quantization | None:
    """Return how a piece is stored, None if as a plain tensor."""
    is_linear = piece.layer.is_quantizable and piece.parameter == "weight"
    if not is_linear or (quantization and quantization.is_plain(_module(piece.name))):
        return None
    return quantization


def _check_kept(sources: list[_Source], directory: Path) -> None:
    """Refuse a layer that would hold some of what it joins as it is stored, and some not."""
    kept = {source.piece.home for source in sources if source.is_kept}
    for source in sources:
        if source.piece.home in kept and not source.is_kept:
            wanted = "quantized like those that are multiplied in one, or none of them"
            field = f"tensor {source.piece.name}"
            raise refused(field, wanted, Words("a plain tensor"), directory)


def _source(
    piece: WeightSlice, quantization: Quantization | None, files: dict[str, Path], directory: Path
) -> _Source:
    stored = plain_tensor(piece.name, piece.shape)
    quantization = _quantization_of(piece, quantization)
    if quantization:
        cut = Cut(piece.dim, piece.start, piece.stop)
        try:
            stored = stored_tensors(quantization, piece.name, piece.shape, cut)
        except FieldError as error:
            raise refused(error.field, error.wanted, error.found, directory) from error
    for tensor in stored:
        if tensor.name not in files:
            raise refused(f"tensor {tensor.name}", "in the checkpoint", Words("none"), directory)
    paths = tuple(files[tensor.name] for tensor in stored)
    return _Source(piece, stored, paths, quantization)


def _module(tensor_name: str) -> str:
    return tensor_name.rpartition(".")[0]


def _plan(
    sources: list[_Source], files: dict[str, Path], model: CausalLM
) -> dict[Path, list[Stored]]:
    """Return what to read from which file, after comparing names, shapes and dtypes."""
    by_file: dict[Path, list[Stored]] = {path: [] for path in files.values()}
    wanted, unused = set(), set()
    for source in sources:
        for tensor, path in zip(source.stored, source.paths, strict=True):
            by_file[path].append(tensor)
            wanted.add(tensor.name)
        if source.quantization:
            module = _module(source.piece.name)
            unused |= {f"{module}.{part}" for part in source.quantization.unused}
    # Scales of one 16-bit type may stand beside plain tensors of the other.
    halves: dict[bool, dict[str, str]] = {True: {}, False: {}}
    for path, tensors in by_file.items():
        listed = {name for name, file in files.items() if file == path}
        with opened_tensors(path) as file:
            present = set(file.keys())
            for name in sorted(present | listed):
                field = f"tensor {name}"
                if model.is_ignored(name) or name in unused:
                    continue
                if name not in wanted:
                    family = model.config.architecture
                    raise refused(field, f"only tensors of {family}", Words("it"), path)
                if name not in listed:
                    raise refused(field, "only where the index says", Words("another"), path)
            for tensor in tensors:
                _check(tensor, file, present, path, halves[not tensor.part.name])
    return by_file


def _tensor_files(directory: Path) -> dict[str, Path]:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() or single.is_symlink():
        with opened_tensors(single) as file:
            return dict.fromkeys(file.keys(), single)
    if not index.exists():
        raise refused("weights", f"{SINGLE_FILE} or {INDEX_FILE}", Words("neither"), directory)
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise refused("weight_map", "an object of tensor and file names", weight_map, index)
    for name, value in weight_map.items():
        # Nothing elsewhere is opened, whatever the index says.
        if not (isinstance(value, str) and _FILE_NAME.fullmatch(value)):
            wanted = "the name of a safetensors file beside the index"
            raise refused(f"weight_map[{name}]", wanted, value, index)
    return {name: directory / value for name, value in weight_map.items()}


@contextmanager
def opened_tensors(path: Path) -> Iterator[Any]:
    check_file(path)
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise broken(path, error) from error
    with file:
        yield file


def broken(path: Path, error: Exception) -> FieldError:
    return refused(path.name, "a whole safetensors file", Words(str(error)), path)


def _check(
    stored: Stored, file: Any, present: set[str], path: Path, halves: dict[str, str]
) -> None:
    """Refuse a tensor that is not as the model wants it. `halves` has a tensor of each 16-bit type
    so far. Only one may occur: read as the other one, numbers are wrong but finite."""
    field = f"tensor {stored.name}"
    if stored.name not in present:
        raise refused(field, "where the index says", Words("none"), path)
    tensor = file.get_slice(stored.name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    # A scale of a whole tensor may be a number or a list of one.
    if shape != stored.shape and (shape or stored.shape != (1,)):
        raise refused(field, f"shape {stored.shape}", shape, path)
    if dtype not in stored.part.dtypes:
        *others, last = stored.part.dtypes
        wanted = f"one of {', '.join(stored.part.dtypes)}" if others else last
        raise refused(field, wanted, dtype, path)
    if dtype in _HALVES:
        halves.setdefault(dtype, stored.name)
    if len(halves) > 1:
        other = next(kind for kind in halves if kind != dtype)
        raise refused(field, f"{other} as tensor {halves[other]}", dtype, path)


def _parts(source: _Source, opened: dict[Path, Any]) -> Iterator[tuple[Stored, Path, torch.Tensor]]:
    for stored, path in zip(source.stored, source.paths, strict=True):
        try:
            tensor = opened[path].get_slice(stored.name)
            is_number = not tensor.get_shape()
            tensor = tensor[...].reshape(1) if is_number else tensor[stored.where(source.cut)]
        except (OSError, SafetensorError) as error:
            raise broken(path, error) from error
        yield stored, path, tensor


def _read(source: _Source, opened: dict[Path, Any]) -> torch.Tensor:
    """Fill a piece, and return two numbers that are finite if all of it are."""
    piece, stored = source.piece, source.quantization
    if stored is None or not source.is_kept:
        target = piece.target()
        target.copy_(_values(source, opened, target.dtype))
        return torch.stack(target.aminmax())
    parts = {tensor.part.name: values for tensor, _, values in _parts(source, opened)}
    with _named(source):
        held = held_of(stored, parts)
    piece.layer.keep(piece.rows, stored, held.tensors)
    return held.largest.expand(2).to(piece.layer.device)


def _values(
    source: _Source, opened: dict[Path, Any], dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return what a piece is filled with; `dtype` is a quantized one's."""
    parts = {stored.part.name: tensor for stored, _, tensor in _parts(source, opened)}
    if source.quantization is None:
        [values] = parts.values()
        return values
    with _named(source):
        return values_of(source.quantization, parts, source.cut, source.piece.shape, dtype)


@contextmanager
def _named(source: _Source) -> Iterator[None]:
    """Let an error that names a part say which tensor it is, and in which file."""
    try:
        yield
    except FieldError as error:
        [place] = [i for i, stored in enumerate(source.stored) if stored.part.name == error.field]
        field = f"tensor {source.stored[place].name}"
        raise refused(field, error.wanted, error.found, source.paths[place]) from error


def _not_finite(source: _Source, opened: dict[Path, Any]) -> FieldError:
    """Return the error for a weight that is not finite, or is not once it is converted."""
    for stored, path, tensor in _parts(source, opened):
        if tensor.is_floating_point():
            low, high = (float(value) for value in tensor.float().aminmax())
            if not (math.isfinite(low) and math.isfinite(high)):
                found = low if not math.isfinite(low) else high
                return refused(f"tensor {stored.name}", "finite numbers", found, path)
    low, high = (float(value) for value in _values(source, opened).aminmax())
    dtype = str(source.piece.layer.dtype).removeprefix("torch.")
    found, wanted = low if -low > high else high, f"numbers that {dtype} holds"
    return refused(f"tensor {source.piece.name}", wanted, found, source.paths[0])


def load_model(
    checkpoint_dir: Path | str,
    *,
    shard: Shard = ALONE,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
    has_fp8_kv: bool = False,
    quantization: WeightFormat = "none",
    has_mtp: bool = False,
) -> tuple[CausalLM, ModelConfig]:
    """Return one rank's model in eval mode, without gradients, in `dtype`, and its configuration; a
    FieldError if the checkpoint cannot be used, or not by this many ranks. `has_fp8_kv`: its KV
    cache will be FP8, and attention gets its scales. `quantization`: what linear layers hold.
    `has_mtp`: with its MTP layer."""
    place = Placement(dtype, torch.device(device), shard, quantization)
    if place.device.type == "cpu" and quantization in ("fp8", "nvfp4"):
        log.warning("products of %s numbers are slow on a CPU", quantization)
    model, config = _described_model(checkpoint_dir, place, has_mtp=has_mtp)
    load_weights(model, checkpoint_dir, progress)
    load_kv_scales(model, Path(checkpoint_dir), place, is_used=has_fp8_kv)
    return model.eval(), config


@torch.no_grad()
def blank_model(
    checkpoint_dir: Path | str,
    *,
    shard: Shard = ALONE,
    dtype: torch.dtype,
    quantization: WeightFormat = "none",
) -> tuple[CausalLM, ModelConfig]:
    """Return the model that `load_model` returns on a CPU, without values: to be traced, not run.
    It takes memory for its largest parameter and no more."""
    place = Placement(dtype, torch.device("cpu"), shard, quantization)
    model, config = _described_model(checkpoint_dir, place)
    files = _tensor_files(Path(checkpoint_dir))
    slices = model.weight_slices(files.keys())
    kept: dict[tuple[WeightedLayer, str], Quantization | None] = {}
    for piece in slices:
        stored = _quantization_of(piece, config.quantization)
        is_kept = stored is not None and stored.is_held_as(piece.layer.form)
        kept[piece.home] = stored if is_kept else None
    for (layer, name), stored in kept.items():
        if stored is not None:
            layer.allocate_kept(stored)
        else:
            # Packing looks where each element goes, and could not tell zeros apart.
            layer.allocate(name).random_(-127, 128)
        layer.loaded(name)
        layer.forget_values()
        if not layer.get_parameter(name).is_meta:
            setattr(layer, name, layer.declare(*layer.get_parameter(name).shape))
            layer.allocate(name)
    return model.eval(), config


def _described_model(
    checkpoint_dir: Path | str, place: Placement, *, has_mtp: bool = False
) -> tuple[CausalLM, ModelConfig]:
    """Return a model whose parameters have no memory yet, as its checkpoint has it."""
    config = ModelConfig.from_dir(checkpoint_dir)
    if config.tie_word_embeddings and has_own_head(Path(checkpoint_dir)):
        log.warning(
            "tie_word_embeddings: wanted a head that is the embeddings, found another one, which "
            "is used, in %s",
            checkpoint_dir,
        )
        config = replace(config, tie_word_embeddings=False)
    stored = config.quantization
    if stored and (place.quantization == "none" or place.quantization != stored.own_format):
        name = str(place.dtype).removeprefix("torch.")
        log.info("weights that are stored as %s are computed in %s", stored.layout, name)
        if stored.rounds_tokens and place.device.type == "cpu" and place.quantization != "w8a8":
            log.info("with quantization=w8a8 they are multiplied as they are stored, and faster")
    if place.quantization == "nvfp4" and not (stored and stored.has_input_scales):
        wanted = f"none where no input_global_scale is stored: it takes {NVFP4} with activations"
        raise FieldError("quantization", wanted, "nvfp4")
    if place.quantization != "none":
        log.info("weights of linear layers are held as %s", place.quantization)
    # A configuration that is not its checkpoint's may describe a model larger than memory, so the
    # model takes none until its tensors have been compared.
    return CausalLM(config, place, has_mtp=has_mtp), config
