"""Arguments as text, dashed options, YAML and a file: what they become, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.actors.reports import ScalingTargets
from cluster.config import (
    CacheConfig,
    EngineConfig,
    Placement,
    Role,
    SchedulerConfig,
    SpeculationConfig,
)
from compile.config import CompilationConfig, CUDAGraphMode
from compile.errors import FieldError
from model.fields import hints_of, members, words_for
from serve import config as config_module
from serve.arguments import (
    DeployArgs,
    EngineArgs,
    IngressArgs,
    KVArgs,
    PoolArgs,
    PrefillArgs,
    parse_args,
    split_dashed,
)
from serve.config import check_device, check_num_nodes, deploy_config, offline_pool
from serve.served_models import ServedModels

MIXED = {"pools": "mixed"}
SECTIONS = {
    "": DeployArgs,
    "ingress.": IngressArgs,
    "kv.": KVArgs,
    "prefill.": PrefillArgs,
    **dict.fromkeys(("decode.", "mixed."), PoolArgs),
}
FILE = """
max_num_seqs: 8
kv_memory: 64MiB
lockstep: on
decode:
  replicas: 2
  num_cpus: 0.5
compilation_config:
  level: 2
  cudagraph_capture_sizes: [1, 2, 4]
"""


def engine_config(raw: dict[str, Any]) -> EngineConfig:
    """Return that of an engine without a server."""
    return offline_pool(raw).engine


def written(folder: Path, text: str | bytes) -> str:
    """Return the name of a file with this text."""
    path = folder / "arguments.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def refused(raw: dict[str, Any], build: Any = deploy_config) -> str:
    """Return the one line that refuses arguments."""
    with pytest.raises(FieldError) as caught:
        build(raw)
    line = str(caught.value)
    assert str(pickle.loads(pickle.dumps(caught.value))) == line, "it crosses processes"
    assert "\n" not in line
    return line


# What arguments become.


def test_no_arguments_give_the_bundled_model_in_two_pools() -> None:
    config = deploy_config({})
    assert config.api.served_model_name == "lockstep-tiny"
    assert [pool.engine.role for pool in config.pools] == [Role.PREFILL, Role.DECODE]
    for pool in config.pools:
        scheduler, cache = pool.engine.scheduler, pool.engine.cache
        assert (pool.replicas, pool.placement) == (1, Placement(num_cpus=0.01))
        assert (scheduler.max_num_seqs, scheduler.max_num_batched_tokens) == (64, 512)
        assert (cache.block_size, cache.kv_memory_bytes) == (16, 1 << 30)


def test_a_step_has_more_tokens_on_a_gpu_and_never_fewer_than_sequences() -> None:
    """And on a CPU a time, after which streams go on."""

    def limits(**args: object) -> tuple[int, float | None]:
        scheduler = deploy_config(args).pools[0].engine.scheduler
        return scheduler.max_num_batched_tokens, scheduler.max_step_s

    assert limits(device="cpu", max_num_seqs=600) == (600, 0.25)
    assert limits(device="cpu", max_num_batched_tokens=2048) == (2048, 0.25)
    assert limits(device="cpu", max_step_ms=20) == (512, 0.02)
    assert limits(device="cuda") == (2048, None)
    assert limits(device="cuda", max_step_ms=20) == (2048, 0.02)


@pytest.mark.feature("R01")
def test_text_and_nested_values_mean_the_same() -> None:
    text = {"max_num_seqs": "8", "decode.replicas": "2", "kv.transport": "tcp", "O": "0"}
    nested = {
        "max_num_seqs": 8,
        "decode": {"replicas": 2},
        "kv": {"transport": "tcp"},
        "compilation": {"level": 0},
    }
    assert parse_args(text) == parse_args(nested)
    assert deploy_config(text) == deploy_config(nested)
    assert parse_args({"decode": '{"replicas": 2}'}) == parse_args({"decode.replicas": "2"})
    assert parse_args({"num_kv_blocks": "null"}) == parse_args({})
    assert parse_args({"prefill.replicas": "9", "prefill": {}}).prefill.replicas == 9


@pytest.mark.parametrize(
    ("value", "wanted"), [("1GiB", 1 << 30), ("512MiB", 1 << 29), ("2GB", 2 * 10**9), ("77", 77)]
)
def test_memory_has_units(value: str, wanted: int) -> None:
    assert engine_config({"kv_memory": value}).cache.kv_memory_bytes == wanted


def hashes_of(raw: dict[str, Any]) -> tuple[str, str]:
    """Return those of numerics, and of the KV of the last pool."""
    config = deploy_config(raw)
    return config.numerics_hash, config.pools[-1].engine.kv_hash


@pytest.mark.feature("X08")
def test_a_model_is_known_by_what_its_checkpoint_holds(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """A copy is the same model; other weights or another tokenizer under equal names are not."""

    def hashes(name: str, changed: str = "") -> tuple[str, str]:
        shutil.copytree(tiny_checkpoint, tmp_path / name)
        if changed:
            path = tmp_path / name / changed
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return hashes_of({"model": str(tmp_path / name)})

    same = hashes("same")
    assert hashes("copy") == same == hashes_of({"model": str(tiny_checkpoint)})
    [weights] = [path.name for path in tiny_checkpoint.glob("*.safetensors")]
    found = [same, hashes("tuned", weights), hashes("words", "tokenizer.json")]
    assert len({*found[0], *found[1], *found[2]}) == 6


def test_a_model_has_the_names_that_are_given(tmp_path: Path, tiny_checkpoint: Path) -> None:
    (tmp_path / "my-model").symlink_to(tiny_checkpoint)
    config = deploy_config({"model": str(tmp_path / "my-model")})
    assert tuple(ServedModels(config.api).by_name) == ("my-model",)
    for given in (["large", "gpt-4o"], '["large", "gpt-4o"]', "large, gpt-4o"):
        config = deploy_config({"served_model_name": given})
        assert tuple(ServedModels(config.api).by_name) == ("large", "gpt-4o")
        assert config.api.served_model_name == "large"


@pytest.mark.parametrize(
    ("window", "length", "needed"), [(None, 200, 13), (40, 200, 4), (40, 30, 2), (1, 200, 1)]
)
def test_one_sequence_fits_into_the_smallest_pool(
    tmp_path: Path, window: int | None, length: int, needed: int
) -> None:
    """With a sliding window, the blocks that a window reaches."""
    config = {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    (tmp_path / "config.json").write_text(json.dumps(config))
    raw = {"model": str(tmp_path), "max_model_len": length}
    assert engine_config({**raw, "num_kv_blocks": needed}).cache.num_kv_blocks == needed
    if needed > 1:
        wanted = f"at least {needed} (one sequence of max_model_len={length})"
        line = refused({**raw, "num_kv_blocks": needed - 1}, engine_config)
        assert line == f"num_kv_blocks: wanted {wanted}, found {needed - 1}"


@pytest.mark.parametrize(("device", "num_gpus"), [("auto", 0), ("cpu", 4), ("auto", 4)])
def test_a_cluster_with_gpus_is_not_served_on_cpus_unasked(
    monkeypatch: pytest.MonkeyPatch, device: str, num_gpus: int
) -> None:
    """`deploy` often runs on a head node without one."""
    monkeypatch.setattr(config_module, "_device", lambda device: "cpu")
    config = deploy_config({"device": device})
    if device == "cpu" or not num_gpus:
        check_device(config, num_gpus)
        return
    with pytest.raises(FieldError, match=r"^device: wanted cpu or cuda .*the cluster has 4"):
        check_device(config, num_gpus)


def test_an_application_for_one_node_starts_nothing_in_a_cluster_of_two() -> None:
    """What runs listens where another node could not reach it."""
    placement = deploy_config({"single_node": True}).pools[0].placement
    check_num_nodes(placement, 1)
    check_num_nodes(deploy_config({}).pools[0].placement, 2)
    wanted = "^single_node: wanted false in a cluster of 2 nodes, found True$"
    with pytest.raises(FieldError, match=wanted):
        check_num_nodes(placement, 2)


@pytest.mark.feature("R16")
@pytest.mark.parametrize(
    ("bounds", "replicas"),
    [
        ({}, (1, 1, 1)),
        ({"replicas": 2}, (2, 2, 2)),
        ({"max_replicas": "4"}, (1, 1, 4)),
        ({"replicas": 2, "max_replicas": 4}, (2, 2, 4)),
        ({"min_replicas": 2, "max_replicas": 4}, (2, 2, 4)),
        ({"replicas": 3, "min_replicas": 2, "max_replicas": 4}, (2, 3, 4)),
    ],
)
def test_a_pool_is_scaled_from_its_fewest_to_its_most(
    bounds: dict[str, Any], replicas: tuple[int, int, int]
) -> None:
    config = deploy_config({"decode": bounds, "tpot_target_s": "0.05", "max_num_seqs": 8})
    prefill, decode = config.pools
    assert (decode.min_replicas, decode.replicas, decode.max_replicas) == replicas
    assert decode.is_scaled == (replicas[0] < replicas[2]) and not prefill.is_scaled
    assert decode.targets == ScalingTargets(2.0, 0.05, 8, 1)
    assert config.ingress_share(3) == (24, 256)


@pytest.mark.feature("R13")
@pytest.mark.parametrize(("num_seqs", "queued", "num"), [(8, 3, 3), (64, 256, 1), (5, 0, 5)])
def test_ingresses_together_never_take_more_than_one_alone(
    num_seqs: int, queued: int, num: int
) -> None:
    args: dict[str, Any] = {"max_num_seqs": num_seqs, "max_queued_requests": queued, "O": 0}
    config = deploy_config({**args, "ingress.replicas": num})
    running, waiting = config.ingress_share(1)
    assert running > 0 and waiting >= 0
    alone = deploy_config(args)
    assert num * running <= alone.max_running
    assert num_seqs + queued - num < num * (running + waiting) <= num_seqs + queued
    # Ranks are told nothing of ingresses.
    assert (config.pools, config.config_hash) == (alone.pools, alone.config_hash)


def test_groups_have_equal_sizes_and_step_together_unless_told_otherwise() -> None:
    raw = {"prefill.data_parallel_size": 2, "decode.data_parallel_size": "3"}
    for lockstep, sizes in (("on", [(2, 2), (3, 3)]), ("off", [(2, 1), (3, 1)])):
        pools = deploy_config({**raw, "lockstep": lockstep}).pools
        parallel = [pool.engine.parallel for pool in pools]
        assert [(p.data_parallel_size, p.lockstep_size) for p in parallel] == sizes


SETTINGS = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_step_ms": 50,
    "num_kv_blocks": 200,
    "gpu_memory_utilization": 0.5,
    "kv_memory": "64MiB",
    "threads_per_rank": 3,
    "num_cpus": 2,
    "num_gpus": 0.5,
    "accelerator_type": "H100",
    "label_selector": {"ray.io/region": "in(a, b)"},
    "placement_strategy": "PACK",
    "compilation": {"level": 2},
}
"""One of each kind that a pool may have of its own."""


def test_a_pool_has_every_setting_of_its_own_and_others_of_the_application() -> None:
    assert set(SETTINGS) == set(EngineArgs.__struct_fields__)
    shared = {"device": "cuda", "max_num_seqs": 16, "cc.use_cudagraph": False}
    prefill, decode = deploy_config({**shared, "decode": SETTINGS}).pools
    assert prefill == deploy_config(shared).pools[0]
    assert decode == deploy_config({**shared, **SETTINGS}).pools[1]
    engine, placement = decode.engine, decode.placement
    assert engine.scheduler == SchedulerConfig(8, 128, 0.05)
    assert engine.cache == CacheConfig(16, 200, 64 << 20, 0.5)
    assert (engine.threads, decode.replica_places) == (3, 8)
    assert (engine.compilation.level, engine.compilation.use_cudagraph) == (2, False)
    bundle = {"CPU": 2, "GPU": 0.5, "accelerator_type:H100": 0.001}
    assert placement.bundles(engine.parallel) == [bundle]
    assert placement.label_selector == {"ray.io/region": "in(a, b)"}
    assert (prefill.placement.strategy, placement.strategy) == ("STRICT_PACK", "PACK")
    assert prefill.placement.bundle == {"CPU": 0.01, "GPU": 1}


def test_a_pool_takes_text_and_short_names_as_the_application_does() -> None:
    text = {"decode.cc.level": "2", "decode.label_selector": '{"ray.io/region": "a"}'}
    nested = {"decode": {"O": 2, "label_selector": {"ray.io/region": "a"}}}
    assert deploy_config(text) == deploy_config(nested)
    assert (
        deploy_config({"decode.O": 2, "decode.label_selector": "null"}).pools[1]
        == (deploy_config({"O": 2}).pools[1])
    )


@pytest.mark.feature("S09")
def test_kv_is_fp8_where_it_is_asked_for_or_the_checkpoint_is_made_for_it(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "fp8")
    path = tmp_path / "fp8" / "config.json"
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor"}
    method = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": method}))
    scheduled = {"model": str(path.parent)}
    plain = {"model": str(tiny_checkpoint), "dtype": "float32"}
    for raw, wanted in (
        (plain, "float32"),
        (plain | {"dtype": "bfloat16"}, "bfloat16"),
        (plain | {"kv_cache_dtype": "fp8"}, "float8_e4m3fn"),
        (plain | {"kv_cache_dtype": "fp8_e4m3"}, "float8_e4m3fn"),
        (scheduled, "float8_e4m3fn"),
    ):
        config = deploy_config(raw)
        assert {pool.engine.kv_dtype for pool in config.pools} == {wanted}
        assert ("cache_dtype", wanted) in config.api.cache_info
    latent = {"architectures": ["DeepseekV2ForCausalLM"], "num_key_value_heads": 8}
    latent |= {"num_experts_per_tok": 1}
    (path.parent / "config.json").write_text(
        json.dumps(json.loads(path.read_text()) | latent | {"quantization_config": None})
    )
    with pytest.raises(FieldError, match=r"^kv_cache_dtype: wanted auto, .* found 'fp8'$"):
        deploy_config(scheduled | {"kv_cache_dtype": "fp8"})
    same = ({**plain, "kv_cache_dtype": kind} for kind in ("fp8", "fp8_e4m3"))
    assert len({hashes_of(raw) for raw in same}) == 1


def compressed(layout: str, inputs: Any = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    file = {"quant_method": "compressed-tensors", "format": layout}
    return {**file, "config_groups": {"group_0": group}}


FP8_FILE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FP4_KIND = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
FP4_FILE = compressed("nvfp4-pack-quantized", {"dynamic": "local"}, **FP4_KIND)


@pytest.mark.feature("S08")
@pytest.mark.parametrize(
    ("file", "given", "held"),
    [
        (FP8_FILE, {}, "fp8"),
        (FP8_FILE, {"device": "cpu"}, "none"),
        (FP8_FILE, {"dtype": "float16"}, "fp8"),
        (FP8_FILE, {"quantization": "none"}, "none"),
        (FP8_FILE, {"quantization": "int8"}, "int8"),
        (FP8_FILE | {"weight_block_size": [128, 64]}, {}, "none"),
        (FP8_FILE | {"weight_block_size": None}, {}, "fp8"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, {}, "fp8"),
        (FP4_FILE, {}, "nvfp4"),
        (FP4_FILE, {"device": "cpu"}, "none"),
        (compressed("nvfp4-pack-quantized", **FP4_KIND), {}, "none"),
        (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), {}, "fp8"),
        (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), {}, "none"),
        (None, {}, "none"),
    ],
)
def test_a_gpu_holds_short_floats_as_a_checkpoint_has_them(
    file: dict[str, Any] | None,
    given: dict[str, Any],
    held: str,
    tmp_path: Path,
    tiny_checkpoint: Path,
) -> None:
    path = shutil.copytree(tiny_checkpoint, tmp_path / "model") / "config.json"
    stored = {"quantization_config": file, "dtype": "bfloat16"}
    path.write_text(json.dumps(json.loads(path.read_text()) | stored))
    config = deploy_config({"model": str(path.parent), "device": "cuda", **given})
    assert {pool.engine.quantization for pool in config.pools} == {held}


HELD = ("int8", "w8a8", "int4", "fp8")


@pytest.mark.feature("S08", "X08")
def test_integers_of_two_ranks_are_others_than_those_of_one() -> None:
    """Each rounds its part of a layer's inputs."""

    def numerics(size: int, kind: str) -> str:
        sizes = {f"{pool}.tensor_parallel_size": size for pool in ("prefill", "decode")}
        return hashes_of({"device": "cpu", "quantization": kind, **sizes})[0]

    for kind in ("none", "nvfp4"):  # as the checkpoint has them
        assert numerics(1, kind) == numerics(2, kind)
    assert numerics(1, "none") != numerics(1, "nvfp4")
    assert numerics(1, "none") == numerics(1, "auto")
    assert len({numerics(size, kind) for size in (1, 2) for kind in HELD}) == 8


@pytest.mark.feature("T05", "D04")
@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp"])
def test_all_pools_of_a_model_that_drafts_cache_what_its_layer_for_that_has(
    method: str, tmp_path: Path, tiny_checkpoint: Path
) -> None:
    path = Path(shutil.copytree(tiny_checkpoint, tmp_path / "v3")) / "config.json"
    values = json.loads(path.read_text()) | {"architectures": ["DeepseekV3ForCausalLM"]}
    values["num_key_value_heads"] = values["num_attention_heads"]
    path.write_text(json.dumps(values))
    plain = {"model": str(path.parent)}
    given = plain | {"speculative_config": {"method": method, "num_speculative_tokens": 3}}
    prefill, decode = (pool.engine for pool in deploy_config(given).pools)
    assert prefill.cache.has_mtp and decode.cache.has_mtp
    # A prefill engine fills the layer's KV, and drafts nothing.
    assert (prefill.speculation, prefill.query_len, prefill.draft_blocks) == (None, 1, 0)
    assert (decode.speculation, decode.query_len) == (SpeculationConfig(3), 4)
    assert prefill.kv_hash == decode.kv_hash
    # Without the layer KV lies otherwise; tokens are the same.
    (numerics, kv), (other_numerics, other_kv) = hashes_of(plain), hashes_of(given)
    assert numerics == other_numerics and kv != other_kv
    for found in (0, 2):
        path.write_text(json.dumps(values | {"num_nextn_predict_layers": found}))
        with pytest.raises(FieldError) as error:
            deploy_config(given)
        assert str(error.value) == (
            "speculative_config.method: wanted ngram for a model without one layer that predicts a "
            f"token more (num_nextn_predict_layers={found}), found '{method}'"
        )
    path.write_text(json.dumps(values))
    with pytest.raises(FieldError, match=r"^overlap: wanted auto or off with speculative_config"):
        deploy_config(given | {"overlap": "on"})


# Bad arguments.


def arguments() -> Iterator[tuple[str, Any]]:
    for prefix, struct in SECTIONS.items():
        for name, kind in hints_of(struct).items():
            if f"{name}." not in SECTIONS and name != "config":
                yield prefix + name, kind


NUMERICS = {
    **{"device": "cpu", "max_model_len": 100, "enforce_eager": True, "torch_compile_config": None},
    **{f"{pool}compilation": {"level": 2} for pool in ("", "prefill.", "decode.", "mixed.")},
}
"""Other tokens: streams run out where they are. Those of all kinds have a value that is not the
default, with a GPU."""
KV = {
    "block_size": 8,
    **{f"{pool}.tensor_parallel_size": 2 for pool in ("prefill", "decode", "mixed")},
}
"""Other KV alone: streams go on at the successor, which computes them."""
BOTH = {
    **{"model": "tuned", "dtype": "float32", "kv_cache_dtype": "fp8"},
    **{"lora_modules": "one=adapter", "quantization": "int8"},
}
NEITHER = {
    **{
        prefix + name: value
        for prefix in ("", "prefill.", "decode.", "mixed.")
        for name, value in SETTINGS.items()
        if name != "compilation"
    },
    **{
        f"{pool}.{name}": value
        for pool in ("prefill", "decode", "mixed")
        for name, value in {
            **{"replicas": 2, "min_replicas": 1, "max_replicas": 4, "data_parallel_size": 2},
            "routing": "round_robin",
        }.items()
    },
    **{"served_model_name": "other", "pools": "mixed", "enable_prefix_caching": False},
    **{"prefix_cache_sharing": "all", "ingress.replicas": 2, "lockstep": "off", "overlap": "off"},
    **{"kv.transport": "tcp", "kv.lease_s": 5, "cuda_graph_config": None},
    **{"ttft_target_s": 1, "tpot_target_s": 1, "scale_down_after_s": 1, "watchdog_s": 1},
    **{"max_queued_requests": 1, "max_queue_wait_s": 1, "request_timeout_s": 1},
    **{"drain_timeout_s": 1, "max_body_bytes": 9, "max_answer_bytes": 1 << 20},
    **{"stream_interval": 2, "api_keys": "sesame", "api_keys_file": "keys", "open_paths": "/"},
    **{"allowed_hosts": "me", "allowed_origins": "*", "trusted_proxies": 1, "log_format": "json"},
    **{"log_requests": "off", "otlp_traces_endpoint": "http://localhost:4317"},
    **{"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "debug": True},
    **{"host": "::1", "port": 1, "single_node": True, "prefill.on_decode": "auto"},
    **{"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    **{"max_loras": 2, "max_lora_rank": 8, "admin_keys": "open"},
    "disable_custom_all_reduce": True,
}
"""Streams go on at the successor with their KV, if it has a pool of that name."""
LOADING = {"max_loras": 3, "max_lora_rank": 4, "admin_keys": "key"}
"""Arguments that need one another, apart from the rank."""


@pytest.mark.feature("X08")
def test_every_argument_is_known_to_change_tokens_or_kv_or_neither() -> None:
    known = [*NUMERICS, *KV, *BOTH, *NEITHER]
    assert sorted(known) == sorted(name for name, _ in arguments())


@pytest.mark.feature("X08")
@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        *((*argument, (True, False)) for argument in NUMERICS.items()),
        *((*argument, (False, True)) for argument in KV.items()),
        *((*argument, (True, True)) for argument in BOTH.items()),
        *((*argument, (False, False)) for argument in NEITHER.items()),
    ],
)
def test_an_argument_changes_what_decides_tokens_or_kv(
    name: str, value: Any, changes: tuple[bool, bool], tmp_path: Path, tiny_checkpoint: Path
) -> None:
    if name in ("model", "api_keys_file"):
        value = str(tmp_path / value)
    if name == "lora_modules":
        value = value.replace("=", f"={tmp_path}/")
    (tmp_path / "keys").write_text("sesame")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    shutil.copytree(tiny_checkpoint, tmp_path / "tuned")
    (tmp_path / "tuned" / "more.json").write_text("{}")
    shared: dict[str, Any] = {"device": "cpu" if name == "quantization" else "cuda"}
    pool, _, setting = name.partition(".")
    if pool == "mixed":
        shared |= MIXED
    beside = {}
    if setting == "tensor_parallel_size" and pool != "mixed":
        beside = {"prefill.tensor_parallel_size": value, "decode.tensor_parallel_size": value}
    elif setting == "min_replicas":
        beside = {f"{pool}.max_replicas": 3}
    elif name in LOADING:
        beside = {each: LOADING[each] for each in LOADING if each != name}
    before, after = hashes_of(shared), hashes_of({**shared, **beside, name: value})
    assert tuple(a != b for a, b in zip(before, after, strict=True)) == changes


def out_of_bounds(kind: Any) -> Iterator[float]:
    """Yield numbers just outside of a type's bounds."""
    for bare, metas in members(kind):
        for meta in metas:
            if meta.ge is not None:
                yield meta.ge - (1 if bare is int else meta.ge / 2 or 1)
            if meta.gt is not None:
                yield meta.gt
            if meta.le is not None:
                yield meta.le + 1 if bare is int else math.inf


@pytest.mark.parametrize(("name", "kind"), [*arguments()])
def test_an_argument_of_another_type_or_out_of_bounds_is_refused_by_name(
    name: str, kind: Any
) -> None:
    assert refused({name: [{"no": "value"}]}, parse_args).startswith(name)
    for number in out_of_bounds(kind):
        wanted = f"{name}: wanted {words_for(kind)}, found "
        assert refused({name: str(number)}, parse_args).startswith(wanted)


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"colour": "red"}, "colour: wanted one of max_num_seqs, "),
        ({"prefill.colour": "red"}, "prefill.colour: wanted one of max_num_seqs, "),
        ({"max_num_seqs": "many"}, "max_num_seqs: wanted int | null, found 'many'"),
        ({"max_num_seqs": "0"}, "max_num_seqs: wanted a whole number of at least 1, found 0"),
        ({"watchdog_s": "inf"}, "watchdog_s: wanted seconds above 0, found inf"),
        ({"port": "0"}, "port: wanted 1 to 65535, found 0"),
        ({"block_size": "2.5"}, "block_size: wanted int, found '2.5'"),
        ({"request_timeout_s": "nan"}, "request_timeout_s: wanted a finite number of at least"),
        ({"dtype": "int8"}, "dtype: wanted auto, float32, bfloat16, float16, found 'int8'"),
        *(
            ({"kv_cache_dtype": kind}, "kv_cache_dtype: wanted auto, fp8 or fp8_e4m3, found")
            for kind in ("fp8_e5m2", "fp8_inc", "int8", "bfloat16")
        ),
        (
            {"quantization": "fp4"},
            "quantization: wanted auto, none, int8, w8a8, int4, fp8 or nvfp4, found",
        ),
        (
            {"quantization": "w8a8", "device": "cuda"},
            "quantization: wanted another one on a GPU, where w8a8 is not built, found 'w8a8'",
        ),
        ({"pools": "both"}, "pools: wanted pd or mixed, found 'both'"),
        ({"prefix_cache_sharing": "no"}, "prefix_cache_sharing: wanted key or all, found 'no'"),
        ({"kv_memory": "lots"}, "kv_memory: wanted bytes, such as "),
        ({"kv_memory": "0"}, "kv_memory: wanted at least 1 and less than 8 EiB, found '0'"),
        ({"kv_memory": "9" * 400}, "kv_memory: wanted at least 1 and less than 8 EiB, found "),
        ({"kv.transport": "nixl"}, "kv.transport: wanted auto, shm or tcp (others are not built"),
        ({"kv.transport": "pigeon"}, "kv.transport: wanted auto, shm or tcp, found 'pigeon'"),
        (
            {"device": "cuda", "kv.transport": "shm"},
            "kv.transport: wanted auto or tcp with device=cuda, whose KV is no host memory, found",
        ),
        ({"max_model_len": "999999"}, "max_model_len: wanted 1 to 2048 (the model's), found"),
        ({"max_num_batched_tokens": "8"}, "max_num_batched_tokens: wanted at least max_num_seqs"),
        ({"mixed.replicas": "2"}, "mixed: wanted nothing where pools=pd, found"),
        ({"mixed.max_num_seqs": "2"}, "mixed: wanted nothing where pools=pd, found"),
        ({"decode.max_num_seqs": "0"}, "decode.max_num_seqs: wanted a whole number of at least 1"),
        (
            {"max_num_batched_tokens": 64, "decode.max_num_seqs": 65},
            "decode.max_num_batched_tokens: wanted at least max_num_seqs (65), found 64",
        ),
        ({"prefill.num_kv_blocks": 1}, "prefill.num_kv_blocks: wanted at least "),
        ({"decode.kv_memory": "lots"}, "decode.kv_memory: wanted bytes, such as "),
        ({"decode.cc.level": 7}, "decode.compilation.level: wanted "),
        ({"decode.compilation.colour": 1}, "decode.compilation.colour: wanted one of level, "),
        ({"decode": {"O": 1}, "decode.cc.level": 1}, "decode.compilation.level: wanted one value"),
        ({"device": "cpu", "decode.num_gpus": 1}, "decode.num_gpus: wanted nothing with device=cp"),
        ({"num_gpus": 2}, "num_gpus: wanted a share in (0, 1], found 2"),
        ({"accelerator_type": "H 100"}, "accelerator_type: wanted a name such as H100, found"),
        (
            {"decode.label_selector": {"zone": "a b"}},
            "decode.label_selector: wanted a label's value, !value, in(value, value) or !in(",
        ),
        ({"label_selector": {"-": "a"}}, "label_selector: wanted names of labels, such as ray.io/"),
        (
            {"decode.placement_strategy": "NEAR"},
            "decode.placement_strategy: wanted STRICT_PACK, PACK, SPREAD or STRICT_SPREAD, found",
        ),
        ({"decode.routing": "random"}, "decode.routing: wanted one of cost, round_robin"),
        (
            {"prefill.on_decode": "always"},
            "prefill.on_decode: wanted never or auto, found 'always'",
        ),
        ({"decode.on_decode": "auto"}, "decode.on_decode: wanted one of max_num_seqs, "),
        (
            {"prefill.on_decode": "auto", "decode.routing": "round_robin"},
            "prefill.on_decode: wanted never where decode.routing=round_robin, found 'auto'",
        ),
        (
            {**MIXED, "prefill.on_decode": "auto"},
            "prefill: wanted nothing where pools=mixed, found",
        ),
        ({"reasoning_parser": "gpt"}, "reasoning_parser: wanted one of "),
        ({"tool_call_parser": "gpt"}, "tool_call_parser: wanted one of "),
        ({"api_keys": "a b"}, "api_keys: wanted keys of printable ASCII characters"),
        (
            {"max_loras": 1, "admin_keys": "sesame,a b"},
            "admin_keys: wanted keys of printable ASCII characters without spaces, found 'another "
            "one, number 2'",
        ),
        ({"max_loras": 1}, "admin_keys: wanted a key for those who may load adapters (max_loras"),
        ({"max_loras": 0}, "max_loras: wanted a whole number of at least 1, found 0"),
        ({"max_loras": 1, "max_lora_rank": 513}, "max_lora_rank: wanted 1 to 512, found 513"),
        (
            {"max_lora_rank": 8},
            "max_lora_rank: wanted nothing without a max_loras of more than 0, found 8",
        ),
        (
            {"admin_keys": "sesame"},
            "admin_keys: wanted nothing without a max_loras of more than 0, found some",
        ),
        ({"served_model_name": "a,b,a"}, "served_model_name: wanted different names, found"),
        ({"model": "/no/such"}, "model: wanted a directory with config.json and safetensors"),
        ({"host": "http://me"}, "host: wanted an address or a name of this machine, found"),
        (
            {"max_num_seqs": 8, "ingress.replicas": 9},
            "ingress.replicas: wanted 1 to 8 where 8 sequences decode at once, found 9",
        ),
        (
            {"max_num_seqs": 128, "ingress.replicas": 0},
            "ingress.replicas: wanted 1 to 64 where 128 sequences decode at once, found 0",
        ),
        (
            {**MIXED, "mixed.tensor_parallel_size": 3},
            "mixed.tensor_parallel_size: wanted one of 1, 2, 4, 8 for a model with 8 heads and "
            "4 KV heads, found 3",
        ),
        (
            {"decode.min_replicas": 2},
            "decode.max_replicas: wanted a number beside decode.min_replicas, found None",
        ),
        (
            {"decode.replicas": 3, "decode.max_replicas": 2},
            "decode.max_replicas: wanted at least 3 (decode.replicas), found 2",
        ),
        (
            {"prefill.min_replicas": 3, "prefill.max_replicas": 2},
            "prefill.max_replicas: wanted at least 3 (prefill.min_replicas), found 2",
        ),
        ({"ttft_target_s": 0}, "ttft_target_s: wanted seconds above 0, found 0"),
        (
            {"decode.tensor_parallel_size": 2},
            "decode.tensor_parallel_size: wanted 1 like prefill.tensor_parallel_size (other sizes "
            "are not built yet), found 2",
        ),
    ],
)
def test_a_bad_argument_is_one_line(raw: dict[str, Any], line: str) -> None:
    assert refused(raw).startswith(line)


@pytest.mark.feature("S10")
def test_adapters_that_are_there_from_the_start_count_among_those_at_once(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    raw = {"device": "cpu", "lora_modules": f"a={tmp_path},b={tmp_path}"}

    def places(**more: Any) -> tuple[int, int]:
        engine = deploy_config({**raw, **more}).pools[1].engine
        return engine.max_loras, engine.max_lora_rank

    assert places() == (0, 16) == places(max_loras=2)
    assert places(max_loras=3, admin_keys="k") == (3, 16)
    assert places(max_loras=3, admin_keys="k", max_lora_rank=64) == (3, 64)
    line = refused({**raw, "max_loras": 1})
    assert line == "max_loras: wanted at least 2, as many as lora_modules has, found 1"
    line = refused({**raw, "max_loras": 2, "admin_keys": "sesame"})
    assert line == "admin_keys: wanted nothing without a max_loras of more than 2, found some"
    # Nobody can load any without a server.
    offline = offline_pool({**raw, "max_loras": 3, "admin_keys": "k"})
    assert offline.engine.max_loras == 0


def test_ranks_that_share_experts_cannot_step_apart(tmp_path: Path) -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    raw = {"model": str(tmp_path), "lockstep": "off", "decode.data_parallel_size": 2}
    assert refused(raw).startswith("lockstep: wanted on for a model with experts")


def test_without_a_server_there_is_one_pool_of_one_group() -> None:
    line = refused({"mixed.replicas": 2}, offline_pool)
    assert line.startswith("mixed.replicas: wanted 1 without a server (mixed.data_parallel_size is")
    line = refused({"decode.replicas": 2}, offline_pool)
    assert line.startswith("decode: wanted nothing where pools=mixed")


# `config=FILE`.


@pytest.mark.feature("Q05")
def test_a_file_means_what_its_arguments_mean(tmp_path: Path) -> None:
    file = {"config": written(tmp_path, FILE)}
    text = {
        "max_num_seqs": "8",
        "kv_memory": "64MiB",
        "decode.replicas": "2",
        "decode.num_cpus": "0.5",
        "cc.level": "2",
        "cc.cudagraph_capture_sizes": "[1, 2, 4]",
    }
    assert deploy_config(file) == deploy_config(text)
    more = {"max_model_len": "512", "decode.routing": "round_robin"}
    assert deploy_config({**file, **more}) == deploy_config({**text, **more})


@pytest.mark.feature("Q05")
@pytest.mark.parametrize(
    ("text", "beside", "line"),
    [
        ("compilation: {colour: 1}", {}, "compilation.colour: wanted one of level, "),
        ("decode: {replicas: many}", {}, "decode.replicas: wanted int, found 'many'"),
        ("decode: 2", {}, "decode: wanted object, found 2"),
        ("block_size: 8\nblock_size: 8", {}, "block_size: wanted one value, found 'it twice, "),
        ("kv:\n  lease_s: 1\n  lease_s: 1", {}, "kv.lease_s: wanted one value, found 'it twice"),
        ("decode: {replicas: 2}\ndecode.replicas: 2", {}, "decode.replicas: wanted one value"),
        ("block_size: 8", {"block_size": "8"}, "block_size: wanted one value, found 'it twice'"),
        ("decode: {replicas: 2}", {"decode.replicas": "2"}, "decode.replicas: wanted one value"),
        ("compilation_config: {level: 1}", {"O": "1"}, "compilation.level: wanted one value"),
        ("api_keys: [sesame, 7]", {}, "api_keys[1]: wanted str, found 'what is not repeated here'"),
        (
            "admin_keys: [sesame, 7]",
            {},
            "admin_keys[1]: wanted str, found 'what is not repeated here'",
        ),
        ("api_keys: [sesame", {}, "config: wanted a YAML file, found "),
        ("config: other.yaml", {}, "config: wanted a file that names no other"),
        ("- sesame", {}, "config: wanted a YAML file of keys and values, found "),
        ("? [kv]\n: 1", {}, "config: wanted keys that are text, found "),
        ("kv: &kv {lease_s: *kv}", {}, "kv.lease_s: wanted a value that does not contain itself"),
        (b"model: \xff", {}, "config: wanted a YAML file, found "),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(
    tmp_path: Path, text: str | bytes, beside: dict[str, Any], line: str
) -> None:
    found = refused({"config": written(tmp_path, text), **beside})
    assert found.startswith(line)
    assert "sesame" not in found


@pytest.mark.feature("Q05")
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        assert refused({"config": str(path)}).startswith("config: wanted a YAML file, found '/")


@pytest.mark.feature("Q06")
def test_a_server_and_an_engine_in_process_read_one_file(tmp_path: Path) -> None:
    """The same compilation, written as YAML, object, dict, JSON and dotted keys."""
    fields = {"level": 2, "use_cudagraph": True, "cudagraph_capture_sizes": [1, 2]}
    text = f"max_num_seqs: 8\npools: mixed\ncompilation_config: {json.dumps(fields)}\n"
    file = {"config": written(tmp_path, text)}
    served = deploy_config(file).pools[0].engine
    in_process = engine_config(file)
    # A server may answer while it compiles, and its KV goes from one engine to another.
    early = replace(served.compilation, serve_while_compiling="off")
    assert replace(served, compilation=early, kv_hash="") == in_process
    assert in_process.compilation.level == 2
    ways: list[Any] = [fields, json.dumps(fields), CompilationConfig(**fields)]
    for way in ways:
        given = {"max_num_seqs": 8, **MIXED, "compilation_config": way}
        assert engine_config(given) == in_process
        assert deploy_config(given).pools[0].engine == served
    dotted = {f"cc.{name}": json.dumps(value) for name, value in fields.items()}
    assert engine_config({"max_num_seqs": "8", **dotted}) == in_process


# vLLM's dashed options.


def fields_of(dashed: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return compilation fields as they are kept, and all other arguments."""
    fields, others = split_dashed(dashed)
    return parse_args(fields).compilation, others


@pytest.mark.feature("Q01")
def test_dashed_forms_and_json_are_merged_in_depth() -> None:
    for short in (["-O3"], ["-O", "3"], ["-O=3"], ["-cc.level=3"]):
        assert fields_of(short) == ({"level": 3}, [])
    options = {"inductor_compile_config": {"max_autotune": True}, "cudagraph_mode": "FULL"}
    fields, others = fields_of(
        [
            *("model", "-O2", "-cc", json.dumps(options)),
            "-cc.inductor_compile_config.triton.cudagraphs=false",
            "--max-num-seqs=8",
            "--compilation-config.compile_sizes=[1, 2]",
            "--compilation_config",
            '{"dynamic_shapes_config": {"type": "unbacked"}}',
            "-cc.dynamic_shapes_config.evaluate_guards=false",
            "-cc.cache_dir=/a=b",
            *("--port", "1"),
        ]
    )
    assert {**fields, "dynamic_shapes": fields["dynamic_shapes"].name} == {
        "level": 2,
        "inductor_compile_config": {"max_autotune": True, "triton.cudagraphs": False},
        "cudagraph_mode": CUDAGraphMode.FULL,
        "compile_sizes": (1, 2),
        "dynamic_shapes": "UNBACKED",
        "evaluate_guards": False,
        "cache_dir": "/a=b",
    }
    assert others == ["model", "--max-num-seqs=8", "--port", "1"]


@pytest.mark.feature("Q01")
@pytest.mark.parametrize(
    ("dashed", "line"),
    [
        (["-O"], "-O: wanted a value, found 'the end of the line'"),
        (["-cc.level"], "-cc.level: wanted a value, found 'the end of the line'"),
        (["-cc.level=1", "-O1"], "compilation.level: wanted one value, found 'it twice'"),
        (["-cc", '{"level": 1}', "-O1"], "compilation.level: wanted one value, found 'it twice'"),
        (["-cc.level=1", "-cc.level.x=1"], "compilation.level.x: wanted level to have fields"),
        (["-cc.level.x=1", "-cc.level=1"], "compilation.level: wanted one value"),
        (["-cc.use_cudagraph=maybe"], "compilation.use_cudagraph: wanted true or false, found"),
    ],
)
def test_a_bad_dashed_form_is_one_line(dashed: list[str], line: str) -> None:
    with pytest.raises(FieldError) as error:
        fields_of(dashed)
    assert str(error.value).startswith(line)


@pytest.mark.parametrize("rest", [["-Ofast"], ["-c", "x"], ["--", "-O3"], ["-ccx=1"], []])
def test_other_dashed_arguments_are_left_alone(rest: list[str]) -> None:
    assert split_dashed(rest) == ({}, rest)
