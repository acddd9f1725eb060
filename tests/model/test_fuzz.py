"""Damaged checkpoints: each is refused by name, or was not damaged in anything that is used.

What cannot be told from a good checkpoint is no part of the claim: a bit inside a weight's bytes
that leaves it finite, tensors of one shape in each other's place, a number in the configuration
that fits the weights as well.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model.weights import load_model

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHAPE: dict[str, Any] = {
    "family": "Qwen2",
    "vocab_size": 37,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 6,
}
CASES = 25


class Checkpoint:
    """A copy of a good checkpoint, to be damaged."""

    def __init__(self, path: Path, rng: random.Random) -> None:
        self.path = path
        self.rng = rng

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob("*.safetensors"))

    def a_file(self) -> Path:
        return self.rng.choice(self.files)

    def a_file_of_two_shapes(self) -> Path:
        files = [path for path in self.files if len(shapes_in(path)) > 1]
        return self.rng.choice(files)

    def rewrite(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        """Change the tensors of a file that has some of different shapes."""
        path = self.a_file_of_two_shapes()
        tensors = load_file(path)
        change(tensors)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    def rewrite_index(self, change: Callable[[dict[str, Any]], object]) -> None:
        value = json.loads((self.path / INDEX).read_text())
        change(value["weight_map"])
        (self.path / INDEX).write_text(json.dumps(value))

    def rewrite_header(self, change: Callable[[dict[str, Any]], object]) -> None:
        """Change the header of a file and nothing of its data."""
        path = self.a_file()
        header, data = read_header(path)
        change(header)
        path.write_bytes(with_header(json.dumps(header).encode(), data))


def read_header(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    return header, content[8 + size :]


def shapes_in(path: Path) -> set[tuple[int, ...]]:
    header, _ = read_header(path)
    return {tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}


def with_header(header: bytes, data: bytes) -> bytes:
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def flip(content: bytes, rng: random.Random, start: int, stop: int) -> bytes:
    """Flip one to three bits between two offsets."""
    changed = bytearray(content)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(start, stop)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def pick(tensors: dict[str, Any], rng: random.Random) -> str:
    return rng.choice(sorted(name for name in tensors if name != "__metadata__"))


# --- damage to files of weights -------------------------------------------------------------------


def header_bits(c: Checkpoint) -> None:
    path = c.a_file()
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    path.write_bytes(flip(content, c.rng, 0, 8 + size))


def truncated(c: Checkpoint) -> None:
    path = c.a_file()
    content = path.read_bytes()
    path.write_bytes(content[: c.rng.randrange(len(content))])


def lengthened(c: Checkpoint) -> None:
    path = c.a_file()
    path.write_bytes(path.read_bytes() + c.rng.randbytes(c.rng.randint(1, 5000)))


def empty(c: Checkpoint) -> None:
    c.a_file().write_bytes(b"")


def other_bytes(c: Checkpoint) -> None:
    path = c.a_file()
    path.write_bytes(c.rng.randbytes(path.stat().st_size))


def header_length(c: Checkpoint) -> None:
    path = c.a_file()
    lengths = [0, 1, 2**63, 2**64 - 1, 2**32, 100_000_001, c.rng.randrange(2**64)]
    path.write_bytes(struct.pack("<Q", c.rng.choice(lengths)) + path.read_bytes()[8:])


def renamed(c: Checkpoint) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = pick(tensors, c.rng)
        at = c.rng.randrange(len(name) + 1)
        other = name[:at] + c.rng.choice("._x0\n\u2028") + name[at:]
        tensors[other] = tensors.pop(name)

    c.rewrite(change)


def removed(c: Checkpoint) -> None:
    c.rewrite(lambda tensors: tensors.pop(pick(tensors, c.rng)))


def added(c: Checkpoint) -> None:
    c.rewrite(lambda tensors: tensors.update({f"extra.{c.rng.random()}": torch.ones(2)}))


def swapped(c: Checkpoint) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        first = pick(tensors, c.rng)
        second = pick({k: 0 for k, v in tensors.items() if v.shape != tensors[first].shape}, c.rng)
        tensors[first], tensors[second] = tensors[second], tensors[first]

    c.rewrite(change)


def reshaped(c: Checkpoint) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = pick(tensors, c.rng)
        tensor = tensors[name]
        ways = [tensor[:-1], tensor[None], torch.cat((tensor, tensor[:1]))]
        if tensor.ndim == 2 and tensor.shape[0] != tensor.shape[1]:
            ways += [tensor.T, tensor.flatten(), tensor[:, 1:]]
        tensors[name] = c.rng.choice(ways).clone()

    c.rewrite(change)


def other_dtype(c: Checkpoint) -> None:
    kinds = [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = pick(tensors, c.rng)
        tensors[name] = tensors[name].to(c.rng.choice(kinds))

    c.rewrite(change)


def relabelled_dtype(c: Checkpoint) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = header[pick(header, c.rng)]
        entry["dtype"] = c.rng.choice(["I32", "U32", "F16", "F64", "I8", "", "f32", "F32 ", 7])

    c.rewrite_header(change)


def other_half(c: Checkpoint) -> None:
    """One tensor of a bfloat16 checkpoint claims to be float16: as long, and finite."""
    for path in c.files:
        save_file({k: v.bfloat16() for k, v in load_file(path).items()}, path)

    def change(header: dict[str, Any]) -> None:
        header[pick(header, c.rng)]["dtype"] = "F16"

    c.rewrite_header(change)


def offsets(c: Checkpoint) -> None:
    def change(header: dict[str, Any]) -> None:
        entry = header[pick(header, c.rng)]
        side = c.rng.randrange(2)
        entry["data_offsets"][side] += c.rng.choice([-4, 4, 1, 10**6, 2**63, -(10**6)])

    c.rewrite_header(change)


def duplicate_key(c: Checkpoint) -> None:
    """Two entries of one name: which one counts would be the parser's choice."""
    path = c.a_file_of_two_shapes()
    header, data = read_header(path)
    header.pop("__metadata__", None)
    first = pick(header, c.rng)
    shape = header[first]["shape"]
    second = pick({k: 0 for k, entry in header.items() if entry["shape"] != shape}, c.rng)
    entries = [(name, header[name]) for name in header]
    entries.append((first, header[second]))
    text = ", ".join(f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries)
    path.write_bytes(with_header(f"{{{text}}}".encode(), data))


def not_finite(c: Checkpoint) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        flat = tensors[pick(tensors, c.rng)].view(-1)
        flat[c.rng.randrange(len(flat))] = c.rng.choice([float("nan"), float("inf"), -float("inf")])

    c.rewrite(change)


def no_regular_file(c: Checkpoint) -> None:
    path = c.rng.choice([*c.files, c.path / "config.json"])
    path.unlink()
    match c.rng.randrange(6):
        case 0:
            path.mkdir()
        case 1:
            path.symlink_to(c.path / "nowhere")
        case 2:
            path.symlink_to(path)
        case 3:
            path.symlink_to("/dev/zero")
        case 4:
            os.mkfifo(path)
        case 5:
            path.symlink_to(c.path)


# --- damage to the index --------------------------------------------------------------------------


def index_entry_removed(c: Checkpoint) -> None:
    c.rewrite_index(lambda files: files.pop(pick(files, c.rng)))


def index_entry_renamed(c: Checkpoint) -> None:
    def change(files: dict[str, Any]) -> None:
        name = pick(files, c.rng)
        files[name + c.rng.choice(["x", ".weight", "\u0000", "\ud800"])] = files.pop(name)

    c.rewrite_index(change)


def index_entry_added(c: Checkpoint) -> None:
    c.rewrite_index(lambda files: files.update(extra=files[pick(files, c.rng)]))


def index_wrong_file(c: Checkpoint) -> None:
    def change(files: dict[str, Any]) -> None:
        name = pick(files, c.rng)
        files[name] = c.rng.choice(sorted(set(files.values()) - {files[name]}))

    c.rewrite_index(change)


PATHS = [
    "../model.safetensors",
    "/dev/zero",
    "/etc/passwd",
    "a/../model.safetensors",
    "",
    ".",
    "..",
    "-.safetensors",
    "a" * 300 + ".safetensors",
    "a\u0000.safetensors",
    "missing.safetensors",
    "config.json",
    None,
    3,
    ["model.safetensors"],
    {},
]


def index_path(c: Checkpoint) -> None:
    c.rewrite_index(lambda files: files.update({pick(files, c.rng): c.rng.choice(PATHS)}))


def index_text(c: Checkpoint) -> None:
    path = c.path / INDEX
    text = path.read_bytes()
    others = [b"", b"null", b"[]", b"{}", b'{"weight_map": null}', b"\xff\xfe", b"[" * 99999]
    cut = text[: c.rng.randrange(len(text) - 2)]
    path.write_bytes(c.rng.choice([cut, cut, *others]))


def index_bits(c: Checkpoint) -> None:
    path = c.path / INDEX
    text = path.read_bytes()
    path.write_bytes(flip(text, c.rng, 0, len(text)))


def tensor_twice(c: Checkpoint) -> None:
    """A second file holds a tensor too, with other values: which one counts is not said."""
    files = json.loads((c.path / INDEX).read_text())["weight_map"]
    name = pick(files, c.rng)
    other = c.path / c.rng.choice(sorted(set(files.values()) - {files[name]}))
    tensors = load_file(other)
    save_file(tensors | {name: load_file(c.path / files[name])[name] + 1}, other)


OF_WEIGHTS = [
    header_bits,
    truncated,
    lengthened,
    empty,
    other_bytes,
    header_length,
    renamed,
    removed,
    added,
    swapped,
    reshaped,
    other_dtype,
    relabelled_dtype,
    other_half,
    offsets,
    duplicate_key,
    not_finite,
    no_regular_file,
]
OF_INDEX = [
    index_entry_removed,
    index_entry_renamed,
    index_entry_added,
    index_wrong_file,
    index_path,
    index_text,
    index_bits,
    tensor_twice,
]
HARMLESS = {header_bits, index_bits}
"""A bit may hit what is not used: a space, the metadata, a letter's escape."""


@pytest.fixture(scope="module")
def good(make_checkpoint: Any) -> dict[str, Path]:
    sharded, _ = make_checkpoint(max_shard_size="6KB", **SHAPE)
    return {"single": make_checkpoint(**SHAPE)[0], "sharded": sharded}


def state(path: Path) -> dict[str, torch.Tensor]:
    model, _ = load_model(path, dtype=torch.float32, device="cpu")
    return dict(model.state_dict())


def refusal(path: Path) -> str:
    """Return why a checkpoint is refused; empty where it is not."""
    try:
        state(path)
    except FieldError as error:
        message = str(error)
        assert "\n" not in message and ": wanted " in message and ", found " in message
        message.encode()
        return message
    return ""


def test_there_are_500_damaged_checkpoints() -> None:
    assert (len(OF_WEIGHTS) + len(OF_INDEX)) * CASES >= 500


@pytest.mark.feature("S07")
@pytest.mark.parametrize("damage", [*OF_WEIGHTS, *OF_INDEX], ids=lambda damage: damage.__name__)
def test_damaged_checkpoints_are_refused_by_name(
    damage: Callable[[Checkpoint], None], good: dict[str, Path], tmp_path: Path
) -> None:
    wanted = state(good["single"])
    num_harmless = 0
    for case in range(CASES):
        rng = random.Random(f"{damage.__name__} {case}")
        kind = "sharded" if damage in OF_INDEX else rng.choice(["single", "sharded"])
        path = Path(shutil.copytree(good[kind], tmp_path / str(case)))
        damage(Checkpoint(path, rng))
        message = refusal(path)
        if message:
            assert str(path) in message, "names the file"
            continue
        assert damage in HARMLESS, f"{damage.__name__} {case} was loaded"
        num_harmless += 1
        for name, tensor in state(path).items():
            assert torch.equal(tensor, wanted[name]), f"{damage.__name__} {case} changed {name}"
    assert num_harmless < CASES / 3


SPARSE_SHAPE = {
    **SHAPE,
    "family": "Qwen3Moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}
OF_EXPERTS = [renamed, removed, added, swapped, reshaped, other_dtype, not_finite]


@pytest.fixture(scope="module")
def sparse(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of experts in both spellings of their tensors."""
    by_expert, reference = make_checkpoint(**SPARSE_SHAPE)
    fused = tmp_path_factory.mktemp("fused")
    reference.save_pretrained(fused, save_original_format=False)
    return {"by expert": by_expert, "fused": fused}


@pytest.mark.parametrize("damage", OF_EXPERTS, ids=lambda damage: damage.__name__)
def test_damaged_experts_are_refused_by_name(
    damage: Callable[[Checkpoint], None], sparse: dict[str, Path], tmp_path: Path
) -> None:
    for case in range(CASES):
        rng = random.Random(f"experts {damage.__name__} {case}")
        path = Path(shutil.copytree(sparse[rng.choice(list(sparse))], tmp_path / str(case)))
        damage(Checkpoint(path, rng))
        assert str(path) in refusal(path), f"{damage.__name__} {case} was loaded"


@pytest.mark.parametrize("name", ["num_local_experts", "moe_intermediate_size"])
@pytest.mark.parametrize("size", [1, 3, 5, 8, 1000, 1 << 20, 1 << 28, 10**18, -1, "4", None])
def test_sizes_of_experts_that_are_not_the_weights_are_refused(
    name: str, size: object, sparse: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(sparse["by expert"], tmp_path / "checkpoint"))
    config = json.loads((path / "config.json").read_text())
    assert config[name] != size
    (path / "config.json").write_text(json.dumps(config | {name: size}))
    assert str(path) in refusal(path)


# --- damage to the configuration ------------------------------------------------------------------

SIZES = [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
]
WRONG_TYPES = ["", "16", [], {}, -1, 0, 1.5, True, 2**70, 10**5000, float("nan")]
NONSENSE: list[dict[str, Any]] = [
    {"architectures": None},
    {"architectures": ["GPT2LMHeadModel"]},
    {"architectures": "Qwen2ForCausalLM"},
    {"dtype": "float8_e4m3fn", "torch_dtype": 3},
    {"dtype": ["float32"]},
    {"hidden_act": "relu"},
    {"hidden_act": None},
    {"rms_norm_eps": -1e-6},
    {"rms_norm_eps": "1e-6"},
    {"rms_norm_eps": None},
    {"tie_word_embeddings": "no"},
    {"max_position_embeddings": None},
    {"max_position_embeddings": 1 << 40},
    {"rope_parameters": None, "rope_scaling": [1]},
    {"rope_parameters": {"rope_theta": "a"}},
    {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "yarn", "factor": -1, "rope_theta": 1e4}},
    {"rope_parameters": {"rope_type": "llama3", "factor": 2, "rope_theta": 1e4}},
    {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    {"partial_rotary_factor": 0.5, "rope_parameters": None},
    {"use_sliding_window": "true"},
    {"use_sliding_window": True, "sliding_window": -4},
    {"layer_types": ["sliding_attention", "sliding_attention"], "use_sliding_window": False},
    {"layer_types": ["full_attention"]},
    {"layer_types": "full_attention"},
    {"eos_token_id": "2"},
    {"eos_token_id": [[1]]},
    {"bos_token_id": -1},
    {"quantization_config": {"quant_method": "gptq"}},
]


def config_text(text: bytes, rng: random.Random) -> bytes:
    """Damage the file itself."""
    cut = text[: rng.randrange(len(text) - 2)]
    others = [b"", b"null", b"[]", b'"x"', b"{" * 50000, b"\x00" * 100, b"\xff" + text, text + b"}"]
    return rng.choice([cut, cut, *others])


def config_size(text: bytes, rng: random.Random) -> bytes:
    """Name a size that is not the weights'."""
    config = json.loads(text)
    name = rng.choice(SIZES)
    sizes = [config[name] + 2, config[name] * 2, 1 << 20, 1 << 28, 10**18]
    config[name] = rng.choice([*sizes, *([1] if config[name] > 1 else [])])
    return json.dumps(config).encode()


def config_type(text: bytes, rng: random.Random) -> bytes:
    """Give a number's place to something else."""
    value = rng.choice(WRONG_TYPES)
    written = str(10**4000) if value == 10**5000 else json.dumps(value)
    config = json.loads(text) | {rng.choice(SIZES): "HERE"}
    return json.dumps(config).replace('"HERE"', written).encode()


def config_nonsense(text: bytes, rng: random.Random) -> bytes:
    return json.dumps(json.loads(text) | rng.choice(NONSENSE)).encode()


OF_CONFIG = [config_text, config_size, config_type, config_nonsense]


@pytest.mark.feature("S07")
@pytest.mark.parametrize("damage", OF_CONFIG, ids=lambda damage: damage.__name__)
def test_damaged_configurations_are_refused_by_name(
    damage: Callable[[bytes, random.Random], bytes], good: dict[str, Path], tmp_path: Path
) -> None:
    """50 of each, 200 in all."""
    path = Path(shutil.copytree(good["single"], tmp_path / "checkpoint"))
    text = (path / "config.json").read_bytes()
    for case in range(50):
        rng = random.Random(f"{damage.__name__} {case}")
        damaged = damage(text, rng)
        (path / "config.json").write_bytes(damaged)
        message = refusal(path)
        assert str(path) in message, f"{damage.__name__} {case} was loaded: {damaged[:300]!r}"


def test_flipped_bits_of_a_configuration_never_crash(good: dict[str, Path], tmp_path: Path) -> None:
    """They may leave a number that is as good as the right one, so no more can be claimed."""
    path = Path(shutil.copytree(good["single"], tmp_path / "checkpoint"))
    text = (path / "config.json").read_bytes()
    refused = 0
    for case in range(200):
        damaged = flip(text, random.Random(case), 0, len(text))
        (path / "config.json").write_bytes(damaged)
        refused += bool(refusal(path))
    assert refused > 60


@pytest.mark.parametrize("nonsense", NONSENSE, ids=str)
def test_every_nonsense_is_refused(
    nonsense: dict[str, Any], good: dict[str, Path], tmp_path: Path
) -> None:
    path = Path(shutil.copytree(good["single"], tmp_path / "checkpoint"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | nonsense))
    assert refusal(path)
