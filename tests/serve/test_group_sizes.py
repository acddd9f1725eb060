"""Sizes of rank groups, as the arguments of `deploy` and of `LLM` allow them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compile.errors import FieldError
from serve.config import deploy_config, engine_config


def test_both_pools_may_be_groups_of_equal_size() -> None:
    config = deploy_config({"prefill.tensor_parallel_size": "2", "decode.tensor_parallel_size": 2})
    assert [pool.engine.parallel.world_size for pool in config.pools] == [2, 2]


def test_groups_of_different_sizes_do_not_talk() -> None:
    one, two = (deploy_config({"pools": "mixed", "mixed.tensor_parallel_size": n}) for n in (1, 2))
    assert one.config_hash != two.config_hash


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (
            {"pools": "mixed", "mixed.tensor_parallel_size": 3},
            "mixed.tensor_parallel_size: wanted one of 1, 2, 4, 8 for a model with 8 heads and "
            "4 KV heads, found 3",
        ),
        (
            {"pools": "mixed", "mixed.tensor_parallel_size": 0},
            "mixed.tensor_parallel_size: wanted a whole number of at least 1, found 0",
        ),
        (
            {"decode.tensor_parallel_size": 2},
            "decode.tensor_parallel_size: wanted 1 like prefill.tensor_parallel_size "
            "(other sizes are not built yet), found 2",
        ),
        (
            {"decode.data_parallel_size": 0},
            "decode.data_parallel_size: wanted a whole number of at least 1, found 0",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as error:
        deploy_config(raw)
    assert str(error.value) == message


@pytest.mark.parametrize("field", ["tensor_parallel_size", "data_parallel_size"])
def test_an_engine_in_process_is_one_rank(field: str) -> None:
    with pytest.raises(FieldError, match=rf"^mixed\.{field}: wanted 1 for an engine"):
        engine_config({f"mixed.{field}": 2})


def test_data_parallel_ranks_of_a_dense_model_step_together_unless_told_otherwise() -> None:
    raw = {"prefill.data_parallel_size": 2, "decode.data_parallel_size": "3"}
    parallel = [pool.engine.parallel for pool in deploy_config(raw).pools]
    assert [(p.data_parallel_size, p.lockstep_size) for p in parallel] == [(2, 2), (3, 3)]
    parallel = [pool.engine.parallel for pool in deploy_config({**raw, "lockstep": "off"}).pools]
    assert [(p.data_parallel_size, p.lockstep_size) for p in parallel] == [(2, 1), (3, 1)]


def test_ranks_that_share_experts_cannot_step_apart(tmp_path: Path) -> None:
    fields = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(FieldError, match=r"^lockstep: wanted on for a model with experts"):
        deploy_config({"model": str(tmp_path), "lockstep": "off", "decode.data_parallel_size": 2})
