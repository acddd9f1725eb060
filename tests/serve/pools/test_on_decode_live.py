"""An application whose decode engine computes prompts where that costs less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MAX_ASKED = 100
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.mark.feature("R19", "R21")
def test_short_prompts_are_answered_alike_by_an_idle_decode_engine(
    start_app: Callable[..., Any],
) -> None:
    from serve.llm import LLM, SamplingParams

    app = start_app("auto", "dtype=float32", "enforce_eager=true", "prefill.on_decode=auto")
    prompts: list[str] = []
    found: list[list[int]] = []

    def num_computed(ranks: dict[str, list[dict[str, Any]]]) -> list[int]:
        return [ranks[pool][0]["prompt_tokens_computed"] for pool in ("prefill", "decode")]

    with app.client() as client:
        while True:
            prompts.append(f"{len(prompts)}: what is {len(prompts)} + 30?")
            answer = client.completions.create(
                model="lockstep-tiny",
                prompt=prompts[-1],
                extra_body={"return_token_ids": True},
                **GREEDY,
            )
            found.append(answer.choices[0].token_ids)
            if all(num_computed({pool: app.ranks(pool) for pool in ("prefill", "decode")})):
                break
            assert len(prompts) < MAX_ASKED
    llm = LLM(dtype="float32", enforce_eager=True)
    wanted = [llm.generate(each, SamplingParams(**GREEDY))[0].outputs[0] for each in prompts]  # type: ignore[arg-type]
    assert found == [output.token_ids for output in wanted]

    def are_told() -> bool:
        # While nobody looked, there are no figures.
        figures = app.get("/status")[1]["figures"]
        choices = figures["choices"] if figures else {}
        return "prefill" in choices and "on_decode" in choices.get("decode", {})

    app.wait_until(are_told)
