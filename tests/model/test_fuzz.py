"""Damaged checkpoints: each is refused by name, or was not damaged in anything that is used.

What cannot be told from a good checkpoint is no part of the claim: a bit inside a weight's bytes
that leaves it finite, tensors of one shape in each other's place, a number in the configuration
that fits the weights as well.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantizer import KINDS, write
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
EXPERTS: dict[str, Any] = {
    "family": "Qwen3Moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
}
LATENTS: dict[str, Any] = {
    "family": "DeepseekV3",
    "num_key_value_heads": 2,
    "q_lora_rank": 11,
    "kv_lora_rank": 9,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 4,
    "v_head_dim": 7,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 10,
    "first_k_dense_replace": 1,
}
NUM_CASES = 25
"""Of each kind of damage."""


class Checkpoint:
    """A copy of a good checkpoint, to be damaged."""

    def __init__(self, path: Path, rng: random.Random, case: int) -> None:
        self.path, self.rng, self.case = path, rng, case

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


def flip_file(path: Path, rng: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(flip(content, rng, 0, len(content)))


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


COUNTS = {torch.int32, torch.int64}


def other_dtype(c: Checkpoint) -> None:
    kinds = [torch.int8, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]

    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = pick(tensors, c.rng)
        # Counts may be of either length.
        dtype = tensors[name].dtype
        held = COUNTS if dtype in COUNTS else {dtype}
        tensors[name] = tensors[name].to(c.rng.choice([k for k in kinds if k not in held]))

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
    "/etc/model.safetensors",
    "a/../model.safetensors",
    "a\\b.safetensors",
    "",
    "..",
    "-.safetensors",
    "a" * 300 + ".safetensors",
    "a\u0000.safetensors",
    "\u0430.safetensors",
    "model.safetensors\n",
    "missing.safetensors",
    "config.json",
    None,
    3,
    ["model.safetensors"],
    {},
]


def index_path(c: Checkpoint) -> None:
    entry = PATHS[c.case % len(PATHS)]
    c.rewrite_index(lambda files: files.update({pick(files, c.rng): entry}))


NOT_JSON = [b"", b"null", b"[]", b'"x"', b"{" * 50_000, b"\0" * 100, b"\xff{}", b"{}}", b'{"a']


def index_text(c: Checkpoint) -> None:
    others = [*NOT_JSON, b"{}", b'{"weight_map": null}', b'{"weight_map": [1]}']
    (c.path / INDEX).write_bytes(others[c.case % len(others)])


def index_bits(c: Checkpoint) -> None:
    flip_file(c.path / INDEX, c.rng)


def tensor_twice(c: Checkpoint) -> None:
    """A second file holds a tensor too, with other values: which one counts is not said."""
    files = json.loads((c.path / INDEX).read_text())["weight_map"]
    name = pick(files, c.rng)
    other = c.path / c.rng.choice(sorted(set(files.values()) - {files[name]}))
    tensors = load_file(other)
    save_file(tensors | {name: load_file(c.path / files[name])[name] + 1}, other)


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
EXPERT_SIZES = ["num_local_experts", "moe_intermediate_size"]
LATENT_SIZES = [name for name in LATENTS if "dim" in name or "rank" in name]
LATENT_SIZES += ["n_routed_experts", "n_shared_experts", "first_k_dense_replace"]


def config_text(c: Checkpoint) -> None:
    (c.path / "config.json").write_bytes(NOT_JSON[c.case % len(NOT_JSON)])


def config_bits(c: Checkpoint) -> None:
    """They may leave a number that is as good as the right one: no more is claimed."""
    flip_file(c.path / "config.json", c.rng)


def config_size(c: Checkpoint) -> None:
    """Name a size that is not the weights'."""
    path = c.path / "config.json"
    config = json.loads(path.read_text())
    choices = EXPERT_SIZES if "num_local_experts" in config else SIZES
    name = c.rng.choice(LATENT_SIZES if "kv_lora_rank" in config else choices)
    sizes = [config[name] + 2, config[name] * 2, 1 << 20, 1 << 28, 10**18, -1, "4", 1.5]
    config[name] = c.rng.choice([*sizes, *([1] if config[name] > 1 else [])])
    path.write_text(json.dumps(config))


WHOLE, FILE = "wanted a whole safetensors file, found ", "wanted a (readable|regular) file, found "
UNKNOWN, SHAPES = "wanted only tensors of Qwen", r"wanted shape \(.*\), found \("
MISSING = "wanted (in the checkpoint|where the index says), found none"
TWICE = "wanted only where the index says, found another"
DTYPE = (
    "wanted (one of F64, F32, F16, BF16|one of I(32|64), I(32|64)|I32|I8|U8|F32|F8_E4M3), found "
)
OF_WEIGHTS = {
    header_bits: "",
    truncated: WHOLE,
    lengthened: WHOLE,
    empty: WHOLE,
    other_bytes: WHOLE,
    header_length: WHOLE,
    renamed: f"{MISSING}|{UNKNOWN}",
    removed: MISSING,
    added: UNKNOWN,
    swapped: SHAPES,
    reshaped: SHAPES,
    other_dtype: DTYPE,
    relabelled_dtype: f"{DTYPE}|{WHOLE}",
    other_half: "wanted B?F16 as tensor .*, found 'B?F16'",
    offsets: WHOLE,
    duplicate_key: f"{WHOLE}|{SHAPES}",
    not_finite: "wanted finite numbers, found (nan|-?inf)",
    no_regular_file: FILE,
}
OF_INDEX = {
    index_entry_removed: MISSING,
    index_entry_renamed: MISSING,
    index_entry_added: UNKNOWN,
    index_wrong_file: f"{MISSING}|{TWICE}",
    index_path: f"wanted the name of a safetensors file beside the index, found|{FILE}|{TWICE}",
    index_text: "wanted (JSON|a JSON object|an object of tensor and file names), found",
    index_bits: "",
    tensor_twice: TWICE,
}
OF_CONFIG = {
    config_text: "wanted (JSON|a JSON object|one of .*), found ",
    config_size: "",
    config_bits: "",
}
OF_QUANTIZED = (renamed, removed, added, swapped, reshaped, other_dtype, truncated, config_bits)
QUANTIZED = ("int by channel", "fp8", "nvfp4", "packed 4 with zeros", "gptq 4 with zeros", "awq")
OF_EXPERTS = (renamed, removed, added, swapped, reshaped, other_dtype, not_finite, config_size)
DAMAGES = OF_WEIGHTS | OF_INDEX | OF_CONFIG
"""Each kind of damage, and what its refusal says."""
HARMLESS = {header_bits, index_bits, config_bits}
"""A bit may hit what is not used: a space, the metadata, a letter's escape."""


@pytest.fixture(scope="module")
def good(make_checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small model in one file and in several, one of experts in both spellings, and the small one
    quantized."""
    by_expert, reference = make_checkpoint(**SHAPE | EXPERTS)
    fused = tmp_path_factory.mktemp("fused")
    reference.save_pretrained(fused, save_original_format=False)
    sharded, _ = make_checkpoint(max_shard_size="6KB", **SHAPE)
    single, _ = make_checkpoint(**SHAPE)
    good = {"single": single, "sharded": sharded, "by expert": by_expert, "fused": fused}
    good["latents"], _ = make_checkpoint(**SHAPE | LATENTS)
    for kind in QUANTIZED:
        good[kind], _ = write(single, KINDS[kind], tmp_path_factory.mktemp("quantized"))
    return good


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
        assert str(path) in message.encode().decode(), "names the file"
        return message
    return ""


CASES = [(damage, ["single", "sharded"]) for damage in OF_WEIGHTS]
CASES += [(damage, ["sharded"]) for damage in OF_INDEX]
CASES += [(damage, ["single"]) for damage in OF_CONFIG]
CASES += [(damage, ["by expert", "fused"]) for damage in OF_EXPERTS]
CASES += [(damage, list(QUANTIZED)) for damage in OF_QUANTIZED]
CASES += [(config_size, ["latents"])]


@pytest.mark.feature("S07")
@pytest.mark.parametrize(
    ("damage", "kinds"), CASES, ids=[f"{d.__name__} {' or '.join(kinds)}" for d, kinds in CASES]
)
def test_damaged_checkpoints_are_refused_by_name(
    damage: Callable[[Checkpoint], None], kinds: list[str], good: dict[str, Path], tmp_path: Path
) -> None:
    wanted = state(good["single"])
    num_harmless = 0
    for case in range(NUM_CASES):
        rng = random.Random(f"{kinds} {damage.__name__} {case}")
        path = Path(shutil.copytree(good[rng.choice(kinds)], tmp_path / str(case)))
        damage(Checkpoint(path, rng, case))
        message = refusal(path)
        if message:
            assert re.search(DAMAGES[damage], message), message
            continue
        assert damage in HARMLESS, f"{damage.__name__} {case} was loaded"
        num_harmless += 1
        if damage is not config_bits:
            for name, tensor in state(path).items():
                assert torch.equal(tensor, wanted[name]), f"{damage.__name__} {case} changed {name}"
    assert num_harmless < NUM_CASES * (0.7 if damage is config_bits else 1 / 3)
