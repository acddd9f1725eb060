"""Sizes of rank groups, as the arguments of `deploy` and of `LLM` allow them."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config import ConfigError
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
            {"decode.data_parallel_size": 2},
            "decode.data_parallel_size: wanted 1 (data-parallel groups are not built yet), found 2",
        ),
    ],
)
def test_sizes_that_cannot_be_had_are_refused_by_name(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        deploy_config(raw)
    assert str(error.value) == message


def test_an_engine_in_process_is_one_rank() -> None:
    with pytest.raises(ConfigError, match=r"^mixed\.tensor_parallel_size: wanted 1 for an engine"):
        engine_config({"mixed.tensor_parallel_size": 2})
