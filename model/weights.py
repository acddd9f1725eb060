"""Open a checkpoint: its configuration, an empty model, and its weights, each rank only its slices.
The model says which tensors it wants and where they go (`WeightSlice`), and everything is compared
before the first byte of weights is read. What was read must be finite on its device."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from safetensors import SafetensorError, safe_open

from compile.errors import FieldError, Words
from model.config import ModelConfig
from model.files import check_file, read_json, refused
from model.layers.decoder import CausalLM
from model.layers.slices import WeightSlice
from model.parallel import Placement, Shard

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_FILE_NAME = re.compile(r"\w[\w.-]*\.safetensors", re.ASCII)
COMPARED_ROWS = 8192
# Others, such as float8, mean nothing without scales that no layer here knows.
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_HALVES = ("F16", "BF16")
log = logging.getLogger("lockstep.model")
ALONE = Shard()


@torch.no_grad()
def load_weights(
    model: CausalLM, checkpoint_dir: Path | str, progress: Callable[[int, int], None] | None = None
) -> None:
    """Fill the parameters of `model`; `progress` is called with (tensors done, tensors in all). A
    FieldError names the file and the tensor that is missing, unknown, broken, of another shape or
    not finite; the parameters' values mean nothing then."""
    directory = Path(checkpoint_dir)
    files = _tensor_files(directory)
    wanted = {piece.name: piece for piece in model.weight_slices(files.keys())}
    missing = Counter(piece.home for piece in wanted.values())
    by_file = _plan(wanted, files, model, directory)
    report = progress or (lambda _done, _total: None)
    report(0, len(wanted))
    with ExitStack() as stack:
        opened = {path: stack.enter_context(_opened(path)) for path in by_file}
        read, extremes = [], []
        # The largest parameters first: one that is packed is there twice for a while.
        pieces = [(piece, path) for path, pieces in by_file.items() for piece in pieces]
        pieces.sort(key=lambda entry: -entry[0].layer.get_parameter(entry[0].parameter).nbytes)
        for done, (piece, path) in enumerate(pieces, 1):
            target = piece.target()
            if piece.start < piece.stop:
                target.copy_(_values(piece, opened[path], path))
                read.append((piece, path))
                extremes.append(torch.stack(target.aminmax()))
            missing[piece.home] -= 1
            if not missing[piece.home]:
                piece.layer.loaded(piece.parameter)
            report(done, len(wanted))
        # All at once: a GPU is waited for here alone.
        is_finite = torch.stack(extremes).isfinite().all(1).tolist()
        for (piece, path), is_good in zip(read, is_finite, strict=True):
            if not is_good:
                raise _not_finite(piece, _values(piece, opened[path], path), path)


def has_own_head(checkpoint_dir: Path) -> bool:
    """Return whether a checkpoint holds a head that is not its embeddings. Like transformers' it
    then counts, though the model may be configured as tied. All of both is compared, so that every
    rank finds the same."""
    files = _tensor_files(checkpoint_dir)
    names = ("lm_head.weight", "model.embed_tokens.weight")
    if not all(name in files for name in names):
        return False
    with ExitStack() as stack:
        opened = [(stack.enter_context(_opened(files[name])), name) for name in names]
        if not all(name in file.keys() for file, name in opened):  # noqa: SIM118 (no mapping)
            return False  # the index says what is not so, which loading tells
        head, embeddings = (file.get_slice(name) for file, name in opened)
        if head.get_shape() != embeddings.get_shape():
            return True
        starts = range(0, head.get_shape()[0], COMPARED_ROWS)
        parts = (slice(start, start + COMPARED_ROWS) for start in starts)
        return any(not torch.equal(head[p].float(), embeddings[p].float()) for p in parts)


def _plan(
    wanted: dict[str, WeightSlice], files: dict[str, Path], model: CausalLM, directory: Path
) -> dict[Path, list[WeightSlice]]:
    """Return what to read from which file, after comparing names, shapes and dtypes."""
    by_file: dict[Path, list[WeightSlice]] = {path: [] for path in files.values()}
    for name, piece in wanted.items():
        if name not in files:
            raise refused(f"tensor {name}", "in the checkpoint", Words("none"), directory)
        by_file[files[name]].append(piece)
    halves: dict[str, str] = {}
    for path, pieces in by_file.items():
        listed = {name for name, file in files.items() if file == path}
        with _opened(path) as file:
            present = set(file.keys())
            for name in sorted(present | listed):
                field = f"tensor {name}"
                if model.is_ignored(name):
                    continue
                if name not in wanted:
                    family = model.config.architecture
                    raise refused(field, f"only tensors of {family}", Words("it"), path)
                if name not in listed:
                    raise refused(field, "only where the index says", Words("another"), path)
            for piece in pieces:
                _check(piece, file, present, path, halves)
    return by_file


def _tensor_files(directory: Path) -> dict[str, Path]:
    single, index = directory / SINGLE_FILE, directory / INDEX_FILE
    if single.exists() or single.is_symlink():
        with _opened(single) as file:
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
def _opened(path: Path) -> Iterator[Any]:
    check_file(path)
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except (OSError, SafetensorError) as error:
        raise _broken(path, error) from error
    with file:
        yield file


def _broken(path: Path, error: Exception) -> FieldError:
    return refused(path.name, "a whole safetensors file", Words(str(error)), path)


def _check(
    piece: WeightSlice, file: Any, present: set[str], path: Path, halves: dict[str, str]
) -> None:
    """Refuse a tensor that is not as the model wants it. `halves` has a tensor of each 16-bit type
    so far. Only one may occur: read as the other one, numbers are wrong but finite."""
    field = f"tensor {piece.name}"
    if piece.name not in present:
        raise refused(field, "where the index says", Words("none"), path)
    tensor = file.get_slice(piece.name)
    shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
    if shape != piece.shape:
        raise refused(field, f"shape {piece.shape}", shape, path)
    if dtype not in READABLE_DTYPES:
        raise refused(field, f"one of {', '.join(READABLE_DTYPES)}", dtype, path)
    if dtype in _HALVES:
        halves.setdefault(dtype, piece.name)
    if len(halves) > 1:
        other = next(kind for kind in halves if kind != dtype)
        raise refused(field, f"{other} as tensor {halves[other]}", dtype, path)


def _values(piece: WeightSlice, file: Any, path: Path) -> torch.Tensor:
    part = slice(piece.start, piece.stop)
    try:
        tensor = file.get_slice(piece.name)
        values: torch.Tensor = tensor[part] if piece.dim == 0 else tensor[:, part]
    except (OSError, SafetensorError) as error:
        raise _broken(path, error) from error
    return values


def _not_finite(piece: WeightSlice, values: torch.Tensor, path: Path) -> FieldError:
    """Return the error for a tensor that is not finite, or is not once it is converted."""
    low, high = (float(value) for value in values.aminmax())
    field, dtype = f"tensor {piece.name}", str(piece.layer.dtype).removeprefix("torch.")
    if not (math.isfinite(low) and math.isfinite(high)):
        found = low if not math.isfinite(low) else high
        return refused(field, "finite numbers", found, path)
    return refused(field, f"numbers that {dtype} holds", low if -low > high else high, path)


def load_model(
    checkpoint_dir: Path | str,
    *,
    shard: Shard = ALONE,
    dtype: torch.dtype,
    device: torch.device | str,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[CausalLM, ModelConfig]:
    """Return one rank's model in eval mode, without gradients, in `dtype`, and its configuration; a
    FieldError if the checkpoint cannot be used, or not by this many ranks."""
    place = Placement(dtype, torch.device(device), shard)
    model, config = _described_model(checkpoint_dir, place)
    load_weights(model, checkpoint_dir, progress)
    return model.eval(), config


@torch.no_grad()
def blank_model(
    checkpoint_dir: Path | str, *, shard: Shard = ALONE, dtype: torch.dtype
) -> tuple[CausalLM, ModelConfig]:
    """Return the model that `load_model` returns on a CPU, without values: to be traced, not run.
    It takes memory for its largest parameter and no more."""
    place = Placement(dtype, torch.device("cpu"), shard)
    model, config = _described_model(checkpoint_dir, place)
    files = _tensor_files(Path(checkpoint_dir))
    slices = model.weight_slices(files.keys())
    for layer, name in dict.fromkeys(piece.home for piece in slices):
        # Packing looks where each element goes, and could not tell zeros apart.
        layer.allocate(name).random_(-127, 128)
        layer.loaded(name)
        layer.forget_values()
        if not layer.get_parameter(name).is_meta:
            setattr(layer, name, layer.declare(*layer.get_parameter(name).shape))
            layer.allocate(name)
    return model.eval(), config


def _described_model(checkpoint_dir: Path | str, place: Placement) -> tuple[CausalLM, ModelConfig]:
    """Return a model whose parameters have no memory yet, as its checkpoint has it."""
    config = ModelConfig.from_dir(checkpoint_dir)
    if config.tie_word_embeddings and has_own_head(Path(checkpoint_dir)):
        log.warning(
            "tie_word_embeddings: wanted a head that is the embeddings, found another one, which "
            "is used, in %s",
            checkpoint_dir,
        )
        config = replace(config, tie_word_embeddings=False)
    # A configuration that is not its checkpoint's may describe a model larger than memory, so the
    # model takes none until its tensors have been compared.
    return CausalLM(config, place), config
