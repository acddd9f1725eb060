"""What no engine can run is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from parity_rows import Request, Row
from parity_run import RankProcesses, leading

from cluster.group.context import RankContext
from cluster.rank.runner import ModelRunner
from cluster.wire.messages import Submit
from compile.errors import FieldError


@pytest.mark.parametrize(
    ("shape", "needed"), [("mistral window 13 wide heads", 4), ("mistral without window", 64)]
)
def test_a_pool_too_small_for_one_sequence_is_refused_by_name(
    make_oracle: Callable[[str], Any], cache_dir: str, shape: str, needed: int
) -> None:
    config = Row(shape, "one at a time").config(make_oracle(shape), cache_dir)
    few, enough = (
        replace(config, cache=replace(config.cache, num_kv_blocks=n)) for n in (needed - 1, needed)
    )
    wanted = rf"at least {needed} \(one sequence of max_model_len=256\)"
    with pytest.raises(FieldError, match=f"^num_kv_blocks: wanted {wanted}, found {needed - 1}$"):
        ModelRunner(RankContext(few))
    assert ModelRunner(RankContext(enough)).num_blocks == needed


@pytest.mark.feature("S05")
def test_a_prompt_beyond_dynamic_ropes_context_is_refused_by_name(
    make_oracle: Callable[[str], Any], cache_dir: str
) -> None:
    row = Row("qwen3 dynamic rope", "one at a time")
    with leading(row.config(make_oracle(row.shape), cache_dir), RankProcesses(), []) as leader:
        leader.engine.submit(Submit(Request([1] * 91).message(0), None))
        [output] = leader.engine.step()
    wanted = "prompt_token_ids: wanted at most 90 tokens (rope_type dynamic: "
    assert output.finish_reason == "error"
    assert output.error.startswith(wanted) and output.error.endswith("found 91")
