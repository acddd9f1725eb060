"""Reading checkpoints: single and sharded files, slices by rank, and everything broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compile.errors import FieldError
from model import weights
from model.kernels.cpu import packed_linear
from model.layers.linear import Linear
from model.layers.slices import WeightedLayer
from model.parallel import Shard
from model.weights import blank_model, load_model


@pytest.fixture
def checkpoint(make_checkpoint: Any, tmp_path: Path) -> Path:
    """A copy of a checkpoint with a single weights file, to break."""
    return Path(shutil.copytree(make_checkpoint()[0], tmp_path / "checkpoint"))


@pytest.fixture
def sharded(make_checkpoint: Any, tmp_path: Path) -> Path:
    """A copy of a checkpoint with an index and several files, to break."""
    source = make_checkpoint(max_shard_size="100KB")[0]
    assert len(list(source.glob("*.safetensors"))) > 1
    return Path(shutil.copytree(source, tmp_path / "checkpoint"))


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a JSON file or a safetensors file in place."""
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))
    else:
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)


def plain_weights(model: torch.nn.Module, plain: Any) -> dict[str, torch.Tensor]:
    """Return all weights by name, those that are packed as plain copies."""
    return {
        name: plain(layer) if isinstance(layer, Linear) else layer.weight.detach()
        for name, layer in model.named_modules()
        if isinstance(layer, WeightedLayer) and isinstance(layer.weight, torch.Tensor)
    }


def refusal(load: Any, path: Path) -> str:
    with pytest.raises(FieldError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.feature("S07")
def test_sharded_files_load_like_a_single_one(
    make_checkpoint: Any, load: Any, sharded: Path, plain_weight: Any
) -> None:
    single, _ = load(make_checkpoint()[0])
    several, _ = load(sharded)
    wanted = plain_weights(single, plain_weight)
    assert len(wanted) == 15
    for name, tensor in plain_weights(several, plain_weight).items():
        assert torch.equal(tensor, wanted[name]), name


@pytest.mark.feature("S07")
def test_tensors_are_converted_to_the_dtype_asked_for(
    make_checkpoint: Any, plain_weight: Any
) -> None:
    path, reference = make_checkpoint()
    model, _ = load_model(path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    wanted = reference.model.layers[1].mlp.down_proj.weight.bfloat16()
    assert torch.equal(plain_weight(model.model.layers[1].mlp.down_proj), wanted)


def test_model_is_ready_for_inference(make_checkpoint: Any, load: Any) -> None:
    model, _ = load(make_checkpoint()[0])
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())


def test_progress_ends_with_all_tensors(make_checkpoint: Any) -> None:
    calls: list[tuple[int, int]] = []
    load_model(
        make_checkpoint()[0],
        dtype=torch.float32,
        device="cpu",
        progress=lambda done, total: calls.append((done, total)),
    )
    total = len(calls) - 1
    assert calls == [(done, total) for done in range(total + 1)]


def test_ranks_slices_join_to_the_whole(make_checkpoint: Any, load: Any, plain_weight: Any) -> None:
    path, reference = make_checkpoint(attention_bias=True, mlp_bias=True)
    ranks = [load(path, Shard(rank, 2))[0].model for rank in range(2)]
    theirs = reference.model
    mlps = [rank.layers[0].mlp for rank in ranks]
    gate, up = zip(*(plain_weight(mlp.gate_up_proj).chunk(2) for mlp in mlps), strict=True)
    assert torch.equal(torch.cat(gate), theirs.layers[0].mlp.gate_proj.weight)
    assert torch.equal(torch.cat(up), theirs.layers[0].mlp.up_proj.weight)
    down = torch.cat([plain_weight(mlp.down_proj) for mlp in mlps], dim=1)
    assert torch.equal(down, theirs.layers[0].mlp.down_proj.weight)
    queries = torch.cat([rank.layers[0].self_attn.qkv_proj.bias[:24] for rank in ranks])
    assert torch.equal(queries, theirs.layers[0].self_attn.q_proj.bias)
    embedding = torch.cat([rank.embed_tokens.weight for rank in ranks])
    assert torch.equal(embedding[:509], theirs.embed_tokens.weight)
    assert not embedding[509:].any()


class CountingSlice:
    """A safetensors slice that counts the bytes that are read through it."""

    def __init__(self, inner: Any, read: list[int]) -> None:
        self.inner = inner
        self.read = read
        self.get_shape, self.get_dtype = inner.get_shape, inner.get_dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.inner[index]
        self.read.append(tensor.nbytes)
        return tensor


def test_a_rank_reads_its_slices_only(
    make_checkpoint: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make_checkpoint()
    read: list[int] = []
    opened = weights.safe_open

    class Counting:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = opened(*args, **kwargs)

        def __enter__(self) -> Counting:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> CountingSlice:
            return CountingSlice(self.file.get_slice(name), read)

    monkeypatch.setattr(weights, "safe_open", Counting)
    model, _ = load(path, Shard(1, 2))
    padding_row = 48 * 4
    total = sum(p.nbytes for p in model.parameters())
    # The last rank's embedding and head have a padding row each.
    assert sum(read) == total - 2 * padding_row


@pytest.mark.parametrize("size", [3, 8, 5])
def test_ranks_that_do_not_divide_the_model_are_refused(
    size: int, make_checkpoint: Any, load: Any
) -> None:
    with pytest.raises(FieldError, match=f"wanted a multiple of tensor_parallel_size={size}"):
        load(make_checkpoint()[0], Shard(0, size))


def test_more_ranks_than_kv_heads_share_them(
    make_checkpoint: Any, load: Any, plain_weight: Any
) -> None:
    path, reference = make_checkpoint(num_key_value_heads=2)
    for rank in range(4):
        qkv = load(path, Shard(rank, 4))[0].model.layers[0].self_attn.qkv_proj
        first = (rank // 2) * 12
        wanted = reference.model.layers[0].self_attn.k_proj.weight[first : first + 12]
        assert torch.equal(plain_weight(qkv)[12:24], wanted)


def test_missing_weights_are_named(checkpoint: Path, load: Any) -> None:
    (checkpoint / "model.safetensors").unlink()
    message = refusal(load, checkpoint)
    assert message.startswith("weights: wanted model.safetensors or model.safetensors.index.json")


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_truncated_file_is_named(kept: int, checkpoint: Path, load: Any) -> None:
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    message = refusal(load, checkpoint)
    assert message.startswith("model.safetensors: wanted a whole safetensors file, found ")
    assert message.endswith(f" in {path}")


def two_halves(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].half()
    tensors["lm_head.weight"] = tensors["lm_head.weight"].bfloat16()


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM}: wanted in the checkpoint"),
        (lambda t: t.update(odd=torch.zeros(1)), "tensor odd: wanted only tensors of LlamaForCa"),
        *(
            (
                lambda t, shape=shape: t.update({NORM: torch.zeros(shape)}),
                f"tensor {NORM}: wanted shape (48,), found {shape}",
            )
            for shape in ((47,), (48, 1), ())
        ),
        (
            lambda t: t.update({NORM: torch.zeros(48, dtype=torch.int8)}),
            f"tensor {NORM}: wanted one of F64, F32, F16, BF16",
        ),
        (two_halves, "tensor lm_head.weight: wanted F16 as tensor model.norm.weight"),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(
    change: Callable[[dict[str, torch.Tensor]], object], message: str, checkpoint: Path, load: Any
) -> None:
    path = checkpoint / "model.safetensors"
    rewrite(path, change)
    assert refusal(load, checkpoint).startswith(message)


def test_rotary_frequencies_are_tolerated(checkpoint: Path, load: Any) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(6)}
    rewrite(checkpoint / "model.safetensors", lambda t: t.update(extra))
    load(checkpoint)


def test_duplicated_head_is_tolerated_when_tied(checkpoint: Path, load: Any) -> None:
    rewrite(checkpoint / "config.json", lambda c: c.update(tie_word_embeddings=True))
    rewrite(
        checkpoint / "model.safetensors",
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}),
    )
    model, config = load(checkpoint)
    assert model.lm_head is model.model.embed_tokens and config.tie_word_embeddings


def test_a_head_that_is_not_the_embeddings_counts_though_they_should_be_tied(
    checkpoint: Path, load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As in transformers, which warns too."""
    rewrite(checkpoint / "config.json", lambda c: c.update(tie_word_embeddings=True))
    model, config = load(checkpoint)
    reference = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not torch.equal(reference.lm_head.weight, reference.model.embed_tokens.weight)
    hidden = torch.randn(3, config.hidden_size)
    with torch.inference_mode():
        torch.testing.assert_close(
            model.compute_logits(hidden), reference.lm_head(hidden.to(reference.dtype)).float()
        )
    assert not config.tie_word_embeddings and "tie_word_embeddings: wanted" in caplog.text


ELSEWHERE = [
    "../model.safetensors",
    "/etc/model.safetensors",
    "a/b.safetensors",
    "a\\b.safetensors",
    "..",
    "",
    "model.bin",
    "model.safetensors\n",
    "\u0430.safetensors",
    7,
    None,
]


@pytest.mark.parametrize("file_name", ELSEWHERE)
def test_index_entries_elsewhere_are_refused(file_name: object, sharded: Path, load: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    rewrite(index, lambda v: v["weight_map"].update({"model.norm.weight": file_name}))
    message = refusal(load, sharded)
    assert message.startswith("weight_map[model.norm.weight]: wanted the name of a safetensors")
    assert message.endswith(f" in {index}")


def test_index_without_a_map_is_refused(sharded: Path, load: Any) -> None:
    rewrite(sharded / "model.safetensors.index.json", lambda v: v.update(weight_map=[1]))
    assert refusal(load, sharded).startswith("weight_map: wanted an object")


def test_index_that_names_the_wrong_file_is_refused(sharded: Path, load: Any) -> None:
    def swap(value: dict[str, Any]) -> None:
        files = sorted(set(value["weight_map"].values()))
        found = files.index(value["weight_map"]["model.norm.weight"])
        value["weight_map"]["model.norm.weight"] = files[found - 1]

    rewrite(sharded / "model.safetensors.index.json", swap)
    message = refusal(load, sharded)
    assert message.startswith("tensor model.norm.weight: wanted where the index says")


def test_file_that_the_index_names_must_exist(sharded: Path, load: Any) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[0]
    gone.unlink()
    assert refusal(load, sharded).startswith(f"{gone.name}: wanted a readable file, found No such")


@pytest.fixture(params=["as read", "on the device"])
def where_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers are checked before they are copied, or behind, as on a GPU."""
    if request.param == "on the device":
        monkeypatch.setattr(weights, "_is_checked_there", lambda to, of: to.dtype == of.dtype)


@pytest.mark.feature("S07")
@pytest.mark.usefixtures("where_checked")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_named(value: float, checkpoint: Path, load: Any) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = value

    rewrite(checkpoint / "model.safetensors", plant)
    message = refusal(load, checkpoint)
    wanted = "tensor model.layers.1.mlp.down_proj.weight: wanted finite numbers, found "
    assert message == f"{wanted}{value} in {checkpoint / 'model.safetensors'}"


@pytest.mark.usefixtures("where_checked")
def test_the_first_of_two_bad_tensors_is_named(checkpoint: Path, load: Any) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "model.layers.0.mlp.up_proj.weight", "lm_head.weight"):
            tensors[name].view(-1)[-1] = torch.nan

    rewrite(checkpoint / "model.safetensors", plant)
    # Read first, because larger.
    assert refusal(load, checkpoint).startswith("tensor lm_head.weight: wanted finite numbers")


@pytest.mark.usefixtures("where_checked")
def test_a_rank_checks_what_it_reads(checkpoint: Path, load: Any) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][-1] = torch.nan

    rewrite(checkpoint / "model.safetensors", plant)
    load(checkpoint, Shard(0, 2))
    with pytest.raises(FieldError, match=r"tensor lm_head\.weight: wanted finite"):
        load(checkpoint, Shard(1, 2))


@pytest.mark.usefixtures("where_checked")
def test_a_number_that_the_dtype_cannot_hold_is_named(checkpoint: Path) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][7] = -70000.0

    rewrite(checkpoint / "model.safetensors", plant)
    load_model(checkpoint, dtype=torch.bfloat16, device="cpu")
    wanted = "tensor model.norm.weight: wanted numbers that float16 holds, found -70000.0 in"
    with pytest.raises(FieldError, match=wanted):
        load_model(checkpoint, dtype=torch.float16, device="cpu")


def test_a_tensor_in_two_files_is_refused(sharded: Path, load: Any) -> None:
    name = "model.norm.weight"
    files = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    others = set(files.values()) - {files[name]}
    rewrite(sharded / min(others), lambda tensors: tensors.update({name: torch.ones(48)}))
    message = refusal(load, sharded)
    assert message.startswith(f"tensor {name}: wanted only where the index says, found another in")


def test_an_index_entry_that_nobody_wants_is_refused(sharded: Path, load: Any) -> None:
    index = sharded / "model.safetensors.index.json"
    file = sorted(sharded.glob("*.safetensors"))[0].name
    rewrite(index, lambda value: value["weight_map"].update(odd=file))
    assert refusal(load, sharded).startswith("tensor odd: wanted only tensors of LlamaForCausalLM")


def test_links_to_files_are_followed(checkpoint: Path, load: Any, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (checkpoint / "model.safetensors").rename(blob)
    (checkpoint / "model.safetensors").symlink_to(blob)
    load(checkpoint)


def test_a_model_larger_than_memory_is_refused_before_it_takes_any(
    checkpoint: Path, load: Any
) -> None:
    rewrite(checkpoint / "config.json", lambda c: c.update(intermediate_size=1 << 28))
    message = refusal(load, checkpoint)
    assert message.startswith("tensor model.layers.0.mlp.gate_proj.weight: wanted shape (2684")


@pytest.mark.feature("X06")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_blank_model_has_the_tensors_of_a_loaded_one_and_keeps_no_values(
    make_checkpoint: Any, is_tied: bool, dtype: torch.dtype
) -> None:
    path = make_checkpoint(tie_word_embeddings=is_tied)[0]

    def tensors(model: torch.nn.Module) -> dict[str, tuple[object, ...]]:
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: (t.dtype, t.shape, t.stride(), t.device.type) for name, t in named}

    loaded, config = load_model(path, dtype=dtype, device="cpu")
    num_packed = len(packed_linear._table)
    blank, blank_config = blank_model(path, dtype=dtype)
    assert blank_config == config
    assert tensors(blank) == tensors(loaded)
    assert len(packed_linear._table) == num_packed, "what it packed is still there"
