"""Applications whose pools are groups of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.feature("P01", "R01")
@pytest.mark.parametrize(
    ("name", "pools", "overlap"),
    [
        ("mixed", {"mixed": 2}, "off"),
        ("pd", {"prefill": 2, "decode": 2}, "off"),
        pytest.param("pd", {"prefill": 2, "decode": 2}, "on", marks=pytest.mark.feature("T04")),
    ],
)
def test_groups_of_two_ranks_answer_as_one_rank_does(
    start_app: Callable[..., Any], name: str, pools: dict[str, int], overlap: str
) -> None:
    from serve.llm import LLM, SamplingParams

    sizes = [f"{pool}.tensor_parallel_size={size}" for pool, size in pools.items()]
    # In float32: another order of summation shows in bfloat16.
    options = ("dtype=float32", f"overlap={overlap}")
    app = start_app(f"tp-{name}-{overlap}", f"pools={name}", *options, *sizes)
    for pool, size in pools.items():
        ranks = app.ready_ranks(pool)
        assert [r["tp_rank"] for r in ranks] == list(range(size))
        assert len({r["pid"] for r in ranks}) == size
    llm = LLM(dtype="float32", max_num_seqs=8)
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:
        for question in ("What is 12 + 30?", "Count from 3 to 9.", "Sort 5 2 9."):
            messages = [{"role": "user", "content": question}]
            served = client.chat.completions.create(
                model="lockstep-tiny",
                messages=messages,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=60,
                extra_body={"return_token_ids": True},
            )
            [offline] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))
            assert served.choices[0].token_ids == offline.outputs[0].token_ids  # type: ignore[attr-defined]
    if name == "pd":
        ranks = app.settled_ranks(
            lambda ranks: (
                all(r["kv_bytes_sent"] for r in ranks["prefill"])
                and all(r["kv_bytes_received"] for r in ranks["decode"])
            )
        )
        sent = [r["kv_bytes_sent"] for r in ranks["prefill"]]
        assert sent == [r["kv_bytes_received"] for r in ranks["decode"]]
        assert sent[0] == sent[1] > 0
        assert [r["held_tickets"] for r in ranks["prefill"]] == [0, 0]
