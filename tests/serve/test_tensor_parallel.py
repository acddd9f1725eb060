"""Applications whose pools are groups of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": "([a-d]{4} ){6}"},
    {"choice": ["zebra", "zoo", "Zürich"]},
    {"grammar": 'start: "(" start ")" | /[0-9]{3}/'},
]


@pytest.mark.feature("P01", "R01", "R09")
@pytest.mark.parametrize(
    ("name", "pools", "overlap"),
    [
        ("mixed", {"mixed": 2}, "off"),
        pytest.param("pd", {"prefill": 2, "decode": 2}, "on", marks=pytest.mark.feature("T04")),
    ],
)
def test_groups_of_two_ranks_answer_as_one_rank_does(
    start_app: Callable[..., Any], name: str, pools: dict[str, int], overlap: str
) -> None:
    from serve.llm import LLM

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
        assert_same_answers(client, llm)
        assert_same_draws(client, llm)
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


def assert_same_answers(client: openai.OpenAI, llm: Any) -> None:
    """Greedy answers are those of one process."""
    from serve.llm import SamplingParams

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


def assert_same_draws(client: openai.OpenAI, llm: Any) -> None:
    """What is drawn within a grammar is, too.

    One of the ranks fills masks and samples; with overlap it tells the other what it drew.
    """
    from serve.llm import SamplingParams, StructuredOutputsParams

    for seed, form in enumerate(FORMS):
        common: dict[str, Any] = {"temperature": 0.7, "n": 3, "seed": seed, "max_tokens": 120}
        served = client.completions.create(
            model="lockstep-tiny",
            prompt="Name a size.",
            extra_body={"structured_outputs": form, "return_token_ids": True},
            **common,
        )
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), **common)
        [offline] = llm.generate("Name a size.", params)
        for choice, other in zip(served.choices, offline.outputs, strict=True):
            assert choice.token_ids == other.token_ids  # type: ignore[attr-defined]
            assert choice.finish_reason == other.finish_reason
