"""Arguments as text and as YAML: what they become, and what is said about bad ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cluster.config import Role
from compile.errors import FieldError
from serve import config as config_module
from serve.arguments import parse_args
from serve.config import check_device, deploy_config, engine_config


def test_no_arguments_give_the_bundled_model_in_two_pools() -> None:
    config = deploy_config({})
    assert config.served_model_name == "lockstep-tiny"
    assert [pool.name for pool in config.pools] == ["prefill", "decode"]
    assert [pool.engine.role for pool in config.pools] == [Role.PREFILL, Role.DECODE]
    for pool in config.pools:
        engine = pool.engine
        assert (pool.replicas, pool.num_cpus) == (1, 0.01)
        assert engine.scheduler.max_num_seqs == 64
        assert engine.scheduler.max_num_batched_tokens == 512
        assert engine.cache.block_size == 16
        assert engine.cache.kv_memory_bytes == 1 << 30
        assert engine.cache.gpu_memory_utilization == 0.9
        assert engine.transfer.transport == "auto"
        assert engine.transfer.lease_s == 30
    assert config.args.max_queued_requests == 256
    assert config.args.request_timeout_s == 600
    assert config.args.max_body_bytes == 8388608


def test_a_step_has_more_tokens_on_a_gpu_and_never_fewer_than_sequences() -> None:
    def tokens(**args: object) -> int:
        return deploy_config(args).pools[0].engine.scheduler.max_num_batched_tokens

    assert tokens(device="cpu", max_num_seqs=600) == 600
    assert tokens(device="cpu", max_num_batched_tokens=2048) == 2048
    assert tokens(device="cuda") == 2048


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


@pytest.mark.parametrize(
    ("value", "wanted"), [("1GiB", 1 << 30), ("512MiB", 1 << 29), ("2GB", 2 * 10**9), ("77", 77)]
)
def test_memory_has_units(value: str, wanted: int) -> None:
    assert engine_config({"kv_memory": value}).cache.kv_memory_bytes == wanted


def test_what_processes_must_share_is_told_by_what_the_checkpoint_holds(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    """A copy is the same model; other weights or another tokenizer under equal names are not."""

    def hash_of(name: str, changed: str = "") -> str:
        shutil.copytree(tiny_checkpoint, tmp_path / name)
        if changed:
            path = tmp_path / name / changed
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        return deploy_config({"model": str(tmp_path / name)}).config_hash

    same = hash_of("same")
    assert hash_of("copy") == same == deploy_config({"model": str(tiny_checkpoint)}).config_hash
    [weights] = [path.name for path in tiny_checkpoint.glob("*.safetensors")]
    assert len({same, hash_of("tuned", weights), hash_of("words", "tokenizer.json")}) == 3


def test_a_linked_model_is_served_under_the_name_that_was_given(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    (tmp_path / "my-model").symlink_to(tiny_checkpoint)
    assert deploy_config({"model": str(tmp_path / "my-model")}).served_model_name == "my-model"


def test_a_model_may_have_several_names() -> None:
    for given in (["large", "gpt-4o"], '["large", "gpt-4o"]', "large, gpt-4o"):
        config = deploy_config({"served_model_name": given})
        assert config.served_model_names == ("large", "gpt-4o")
        assert config.served_model_name == "large"


@pytest.mark.parametrize(
    ("raw", "line"),
    [
        ({"colour": "red"}, "colour: wanted one of model, "),
        ({"prefill.colour": "red"}, "prefill.colour: wanted one of replicas, "),
        ({"max_num_seqs": "many"}, "max_num_seqs: wanted int, found 'many'"),
        ({"max_num_seqs": "0"}, "max_num_seqs: wanted a whole number of at least 1, found 0"),
        ({"block_size": "2.5"}, "block_size: wanted int, found '2.5'"),
        ({"dtype": "int8"}, "dtype: wanted auto, float32, bfloat16, float16, found 'int8'"),
        ({"device": "tpu"}, "device: wanted auto, cpu or cuda, found 'tpu'"),
        ({"pools": "both"}, "pools: wanted pd or mixed, found 'both'"),
        ({"kv_memory": "lots"}, "kv_memory: wanted bytes, such as "),
        ({"kv.transport": "nixl"}, "kv.transport: wanted auto, shm or tcp (others are not built"),
        ({"kv.transport": "pigeon"}, "kv.transport: wanted auto, shm or tcp, found 'pigeon'"),
        (
            {"device": "cuda", "kv.transport": "shm"},
            "kv.transport: wanted auto or tcp with device=cuda, whose KV is no host memory, found",
        ),
        ({"kv.lease_s": "inf"}, "kv.lease_s: wanted at least 0.01, at most 86400, found inf"),
        ({"request_timeout_s": "nan"}, "request_timeout_s: wanted a finite number of at least"),
        ({"prefill.num_cpus": "inf"}, "prefill.num_cpus: wanted a finite number"),
        ({"decode.replicas": "0"}, "decode.replicas: wanted a finite number of at least 1"),
        ({"threads_per_rank": "0"}, "threads_per_rank: wanted a whole number of at least 1"),
        ({"max_model_len": "999999"}, "max_model_len: wanted 1 to 2048 (the model's), found"),
        ({"num_kv_blocks": "3"}, "num_kv_blocks: wanted at least 128 (one sequence of"),
        ({"mixed.replicas": "2"}, "mixed: wanted nothing where pools=pd, found"),
        ({"lockstep": "maybe"}, "lockstep: wanted on or off, found 'maybe'"),
        ({"overlap": "yes"}, "overlap: wanted auto, on or off, found 'yes'"),
        ({"decode.data_parallel_size": "0"}, "decode.data_parallel_size: wanted a whole number"),
        ({"kv_memory": "9" * 400}, "kv_memory: wanted less than 8 EiB, found "),
        ({"decode.routing": "random"}, "decode.routing: wanted one of round_robin, least_requests"),
        ({"api_keys": "a b"}, "api_keys: wanted keys of printable ASCII characters"),
        ({"watchdog_s": "0"}, "watchdog_s: wanted"),
        ({"stream_interval": "0"}, "stream_interval: wanted"),
        ({"watchdog_s": "inf"}, "watchdog_s: wanted"),
        ({"compilation.sealed": "off"}, "compilation.sealed: wanted one of warn, strict, found"),
        (
            {"device": "cuda", "compilation.num_warmups_full": "0"},
            "compilation.num_warmups_full: wanted at least 1 with device=cuda, found 0",
        ),
        ({"served_model_name": "a,b,a"}, "served_model_name: wanted different names, found"),
        ({"model": "/no/such"}, "model: wanted a directory with config.json and safetensors"),
        ({"port": "0"}, "port: wanted 1 to 65535, found 0"),
        ({"port": "http"}, "port: wanted int | null, found 'http'"),
        ({"host": ""}, "host: wanted an address or a name of this machine, found ''"),
        ({"host": "http://me"}, "host: wanted an address or a name of this machine, found"),
        ({"max_num_batched_tokens": "8"}, "max_num_batched_tokens: wanted at least max_num_seqs"),
    ],
)
def test_a_bad_argument_is_one_line(raw: dict[str, Any], line: str) -> None:
    with pytest.raises(FieldError) as caught:
        deploy_config(raw)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


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
    wanted = rf"num_kv_blocks: wanted at least {needed} \(one sequence of max_model_len={length}\)"
    if needed > 1:
        with pytest.raises(FieldError, match=f"^{wanted}, found {needed - 1}$"):
            engine_config({**raw, "num_kv_blocks": needed - 1})


def test_an_empty_object_takes_nothing_back() -> None:
    assert parse_args({"prefill.replicas": "9", "prefill": {}}).prefill.replicas == 9


def test_a_configuration_error_survives_the_way_between_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(FieldError("field", "this", 3)))
    assert (str(error), error.field) == ("field: wanted this, found 3", "field")


def test_what_processes_must_agree_on_changes_the_hash() -> None:
    base = deploy_config({}).config_hash
    assert deploy_config({"max_num_seqs": "8", "decode.replicas": "2"}).config_hash == base
    for raw in ({"dtype": "float32"}, {"block_size": "8"}, {"max_model_len": "100"}):
        assert deploy_config(raw).config_hash != base


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


@pytest.mark.feature("R13")
@pytest.mark.parametrize(("num_seqs", "queued", "num"), [(8, 3, 3), (64, 256, 1), (5, 0, 5)])
def test_ingresses_together_never_take_more_than_one_alone(
    num_seqs: int, queued: int, num: int
) -> None:
    args: dict[str, Any] = {"max_num_seqs": num_seqs, "max_queued_requests": queued, "O": 0}
    config = deploy_config({**args, "ingress.replicas": num})
    running, waiting = config.ingress_share
    assert running > 0 and waiting >= 0
    alone = deploy_config(args)
    assert num * running <= alone.max_running
    assert alone.max_live - num < num * (running + waiting) <= alone.max_live
    # Replicas of pools stay when only the number of ingresses changes.
    assert (config.pools, config.config_hash) == (alone.pools, alone.config_hash)


@pytest.mark.parametrize(("num_seqs", "found", "most"), [(8, 0, 8), (8, 9, 8), (128, 65, 64)])
def test_each_ingress_has_a_place_and_engines_can_tell_them_apart(
    num_seqs: int, found: int, most: int
) -> None:
    with pytest.raises(FieldError) as caught:
        deploy_config({"max_num_seqs": num_seqs, "ingress.replicas": found, "O": 0})
    wanted = f"ingress.replicas: wanted 1 to {most} where {num_seqs} sequences decode at once"
    assert str(caught.value) == f"{wanted}, found {found}"
