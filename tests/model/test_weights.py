"""Reading checkpoints: single and sharded files, slices by rank, and everything broken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
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
from model.kernels.cpu.packed_linear import can_pack
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


def test_a_rank_reads_its_slices_only(
    make_checkpoint: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    values_of = weights._values

    def counted(*args: Any) -> torch.Tensor:
        values = values_of(*args)
        read.append(values.nbytes)
        return values

    monkeypatch.setattr(weights, "_values", counted)
    model, _ = load(make_checkpoint()[0], Shard(1, 2))
    padding_row = 48 * 4
    # The last rank's embedding and head have a padding row each.
    assert sum(read) == sum(p.nbytes for p in model.parameters()) - 2 * padding_row


@pytest.mark.feature("S07")
def test_the_largest_of_the_bad_tensors_that_a_rank_reads_is_named(
    checkpoint: Path, load: Any
) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("model.norm.weight", "lm_head.weight"):
            tensors[name].view(-1)[-1] = torch.nan

    rewrite(checkpoint / "model.safetensors", plant)
    for rank, name in enumerate(("model.norm", "lm_head")):
        with pytest.raises(FieldError, match=f"tensor {name}.weight: wanted finite numbers"):
            load(checkpoint, Shard(rank, 2))


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


@pytest.mark.feature("S07")
@pytest.mark.usefixtures("unpacked")
def test_sharded_files_load_like_a_single_one(
    make_checkpoint: Any, load: Any, sharded: Path
) -> None:
    single, several = (load(path)[0].state_dict() for path in (make_checkpoint()[0], sharded))
    assert single.keys() == several.keys()
    for name, tensor in several.items():
        assert torch.equal(tensor, single[name]), name


@pytest.mark.feature("S07")
@pytest.mark.usefixtures("unpacked")
def test_tensors_are_converted_to_the_dtype_asked_for(make_checkpoint: Any) -> None:
    path, reference = make_checkpoint()
    model, _ = load_model(path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    wanted = reference.model.layers[1].mlp.down_proj.weight.bfloat16()
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, wanted)


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


@pytest.mark.usefixtures("unpacked")
def test_what_fills_the_last_ranks_vocabulary_up_is_zero(make_checkpoint: Any, load: Any) -> None:
    embedding = load(make_checkpoint()[0], Shard(1, 2))[0].model.embed_tokens.weight
    assert len(embedding) == 255 and not embedding[254].any()


@pytest.mark.parametrize("size", [3, 8, 5])
def test_ranks_that_do_not_divide_the_model_are_refused(
    size: int, make_checkpoint: Any, load: Any
) -> None:
    with pytest.raises(FieldError, match=f"wanted a multiple of tensor_parallel_size={size}"):
        load(make_checkpoint()[0], Shard(0, size))


def test_missing_weights_are_named(checkpoint: Path, load: Any) -> None:
    (checkpoint / "model.safetensors").unlink()
    wanted = "weights: wanted model.safetensors or model.safetensors.index.json"
    with pytest.raises(FieldError, match=wanted):
        load(checkpoint)


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


def test_a_number_that_the_dtype_cannot_hold_is_named(checkpoint: Path) -> None:
    def plant(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][7] = -70000.0

    rewrite(checkpoint / "model.safetensors", plant)
    load_model(checkpoint, dtype=torch.bfloat16, device="cpu")
    wanted = "tensor model.norm.weight: wanted numbers that float16 holds, found -70000.0 in"
    with pytest.raises(FieldError, match=wanted):
        load_model(checkpoint, dtype=torch.float16, device="cpu")


def test_links_to_files_are_followed(checkpoint: Path, load: Any, tmp_path: Path) -> None:
    blob = tmp_path / "blob"
    (checkpoint / "model.safetensors").rename(blob)
    (checkpoint / "model.safetensors").symlink_to(blob)
    load(checkpoint)


def test_a_model_larger_than_memory_is_refused_before_it_takes_any(
    checkpoint: Path, load: Any
) -> None:
    rewrite(checkpoint / "config.json", lambda c: c.update(intermediate_size=1 << 28))
    wanted = r"tensor model.layers.0.mlp.gate_proj.weight: wanted shape \(2684"
    with pytest.raises(FieldError, match=wanted):
        load(checkpoint)


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


SHAPES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6, "intermediate_size": 20},
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20},
    "DeepseekV3": {
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_key_value_heads": 4,
    },
}
EXPERT = {
    "Mixtral": "model.layers.1.block_sparse_moe.experts.4.w3.weight",
    "Qwen3Moe": "model.layers.1.mlp.experts.4.up_proj.weight",
    "DeepseekV3": "model.layers.1.mlp.experts.4.up_proj.weight",
}

Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=SHAPES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def copy(make_checkpoint: Any, family: str, tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of a checkpoint, its tensors changed, in the spelling that is asked for."""

    def do(change: Callable[[Tensors], object], *, is_fused: bool = False) -> Path:
        source, reference = make_checkpoint(family=family, **SHAPES[family])
        path = tmp_path / "checkpoint"
        if is_fused:
            reference.save_pretrained(path, save_original_format=False)
        else:
            shutil.copytree(source, path)
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")
        return path

    return do


def refusal(load: Any, path: Path, shard: Shard | None = None) -> str:
    with pytest.raises(FieldError) as caught:
        load(path, shard)
    assert str(caught.value).endswith((str(path), str(path / "model.safetensors")))
    return str(caught.value)


def weights_of(load: Any, path: Path, *, rank: int = 0, size: int = 1) -> list[torch.Tensor]:
    """Return the second layer's router and experts on a rank."""
    mlp = load(path, Shard(rank, size))[0].model.layers[1].mlp
    return [layer.weight for layer in (mlp.gate, mlp.gate_up_proj, mlp.down_proj)]


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("is_fused", [False, True])
def test_experts_are_read_in_both_spellings(
    is_fused: bool, copy: Callable[..., Path], load: Any, make_checkpoint: Any, family: str
) -> None:
    _, reference = make_checkpoint(family=family, **SHAPES[family])
    theirs = reference.model.layers[1].mlp
    wanted = [theirs.gate.weight, theirs.experts.gate_up_proj, theirs.experts.down_proj]
    path = copy(lambda tensors: None, is_fused=is_fused)
    for found, tensor in zip(weights_of(load, path), wanted, strict=True):
        assert torch.equal(found, tensor)


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("is_fused", [False, True])
def test_ranks_hold_whole_experts_that_join_to_all(
    is_fused: bool, copy: Callable[..., Path], load: Any
) -> None:
    path = copy(lambda tensors: None, is_fused=is_fused)
    gate, *experts = weights_of(load, path)
    gates, *parts = zip(*(weights_of(load, path, rank=r, size=2) for r in range(2)), strict=True)
    assert all(torch.equal(part, gate) for part in gates)
    for matrices, ranks in zip(experts, parts, strict=True):
        assert [part.shape[0] for part in ranks] == [3, 3]
        assert torch.equal(torch.cat(ranks), matrices)


def test_a_rank_reads_its_own_experts_alone(
    copy: Callable[..., Path], load: Any, family: str
) -> None:
    def plant(tensors: Tensors) -> None:
        tensors[EXPERT[family]][3, 5] = torch.nan

    path = copy(plant)
    load(path, Shard(0, 2))
    message = refusal(load, path, Shard(1, 2))
    assert message.startswith(f"tensor {EXPERT[family]}: wanted finite numbers, found nan in")


def test_spellings_are_not_mixed(copy: Callable[..., Path], load: Any, family: str) -> None:
    name = EXPERT[family]
    path = copy(lambda tensors: tensors.update({name: torch.zeros(20, 48)}), is_fused=True)
    assert refusal(load, path).startswith(f"tensor {name}: wanted only tensors of {family}For")


@pytest.mark.parametrize(
    ("shard", "sizes"),
    [
        (Shard(0, 4), "tensor_parallel_size=4"),
        (
            Shard(0, 2, data=Shard(0, 2, kind="dp")),
            "tensor_parallel_size=2 times data_parallel_size=2",
        ),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_by_name(
    shard: Shard, sizes: str, copy: Callable[..., Path], load: Any
) -> None:
    path = copy(lambda tensors: None)
    with pytest.raises(FieldError, match=f"num_experts: wanted a multiple of {sizes}, found 6"):
        load(path, shard)


@pytest.mark.feature("S04")
@pytest.mark.parametrize("family", ["DeepseekV3"])
def test_layers_that_predict_further_tokens_are_skipped_in_one_line(
    copy: Callable[..., Path], load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def extend(tensors: Tensors, layer: int) -> None:
        for name in ("eh_proj", "self_attn.q_a_proj", "mlp.experts.0.up_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = torch.zeros(3)

    path = copy(lambda tensors: extend(tensors, 2))
    with caplog.at_level("INFO", "lockstep.model"):
        load(path)
    [line] = [m for m in caplog.messages if "num_nextn_predict_layers" in m]
    assert line.startswith("3 tensors of the 1 num_nextn_predict_layers are not used, in ")
    # One is configured: what lies behind it belongs to nothing.
    rewrite(path / "model.safetensors", lambda tensors: extend(tensors, 3))
    assert refusal(load, path).startswith("tensor model.layers.3.eh_proj.weight: wanted only tens")
    rewrite(path / "config.json", lambda values: values.update(num_nextn_predict_layers=0))
    assert refusal(load, path).startswith("tensor model.layers.2.eh_proj.weight: wanted only tens")


@pytest.mark.feature("S04", "T05")
@pytest.mark.parametrize("family", ["DeepseekV3"])
def test_the_layer_that_predicts_a_token_more_is_read_beside_the_head_that_it_shares(
    copy: Callable[..., Path],
) -> None:
    def extend(tensors: Tensors) -> None:
        before, prefix = "model.layers.1.", "model.layers.2."
        for name in [name for name in tensors if name.startswith(before)]:
            tensors[prefix + name.removeprefix(before)] = tensors[name] + 1
        hidden = len(tensors["model.norm.weight"])
        for i, name in enumerate(("enorm", "hnorm", "shared_head.norm")):
            tensors[f"{prefix}{name}.weight"] = torch.full((hidden,), float(i))
        tensors[f"{prefix}eh_proj.weight"] = torch.randn(hidden, 2 * hidden)
        for name in ("embed_tokens", "shared_head.head"):
            tensors[f"{prefix}{name}.weight"] = torch.full((3,), torch.nan)  # which nothing reads

    def load(path: Path, shard: Shard | None = None) -> Any:
        return load_model(path, dtype=torch.float16, device="cpu", has_mtp=True)[0]

    path = copy(extend)
    model, tensors = load(path), load_file(path / "model.safetensors")
    for name, found in (
        ("enorm", model.mtp.enorm),
        ("hnorm", model.mtp.hnorm),
        ("eh_proj", model.mtp.eh_proj),
        ("shared_head.norm", model.mtp.shared_head["norm"]),
        ("input_layernorm", model.mtp.input_layernorm),
        ("self_attn.kv_b_proj", model.mtp.self_attn.attn),
    ):
        assert torch.equal(found.weight, tensors[f"model.layers.2.{name}.weight"].to(found.dtype))
    assert [*model.attention_layers()] == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    rewrite(path / "model.safetensors", lambda tensors: tensors.pop("model.layers.2.hnorm.weight"))
    assert refusal(load, path).startswith("tensor model.layers.2.hnorm.weight: wanted in the che")
    path = Path(shutil.copytree(path, path.parent / "unknown"))
    rewrite(
        path / "model.safetensors",
        lambda tensors: tensors.update(
            {f"model.layers.2.{name}.weight": torch.ones(52) for name in ("hnorm", "other")}
        ),
    )
    assert refusal(load, path).startswith("tensor model.layers.2.other.weight: wanted only tensors")


BENCH = Path(__file__).resolve().parents[2] / "examples" / "bench" / "load_memory.py"

ALLOWANCE = 8 * 2**20
"""What any model costs: rotary tables, and safetensors' copy of a slice that is cut by columns."""


def loading(*options: str) -> dict[str, Any]:
    """Return what a load of 0.2 GB takes."""
    command = [sys.executable, str(BENCH), "--gigabytes", "0.2", "--ranks", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_peak_is_the_slice_and_little_more(dtype: str) -> None:
    # What is not packed, as float16 is nowhere: there the plain parameters are the slice.
    # A head of a quarter of the model: two copies of it beside all the rest would show.
    found = loading("--dtype", dtype, "--hidden", "1024", "--vocab", "24000")
    assert found["packed"] == can_pack(getattr(torch, dtype), torch.device("cpu"))
    assert 180e6 < found["slice_bytes"] < 220e6
    assert found["peak_bytes"] > 0.95 * found["slice_bytes"]
    assert found["peak_bytes"] < 1.15 * found["slice_bytes"] + ALLOWANCE


@pytest.mark.feature("S08")
@pytest.mark.parametrize(
    ("kind", "share"), [pytest.param("int8", 1 / 2, marks=pytest.mark.slow), ("int4", 1 / 4)]
)
def test_peak_with_integers_is_what_they_take_and_little_more(kind: str, share: float) -> None:
    found = loading("--hidden", "1024", "--vocab", "1000", "--tied", "--quantization", kind)
    assert found["peak_bytes"] > 0.9 * share * found["slice_bytes"]
    # One layer's weight in numbers, too.
    assert found["peak_bytes"] < (1.15 * share + 0.08) * found["slice_bytes"] + ALLOWANCE
