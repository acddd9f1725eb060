"""An application whose decode engine computes prompts where that costs less."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

AT_ONCE = 4
MAX_ASKED = 400
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

    # Of prompts that come together, one that waits for others to be prefilled costs more than to be
    # computed where nothing waits, whatever a transfer takes on this machine.
    with app.client() as client, ThreadPoolExecutor(AT_ONCE) as threads:

        def ask(prompt: str) -> list[int]:
            answer = client.completions.create(
                model="lockstep-tiny",
                prompt=prompt,
                extra_body={"return_token_ids": True},
                **GREEDY,
            )
            return list(answer.choices[0].token_ids)

        while not all(num_computed({pool: app.ranks(pool) for pool in ("prefill", "decode")})):
            assert len(prompts) < MAX_ASKED
            new = [f"{i}: what is {i} + 30?" for i in range(len(prompts), len(prompts) + AT_ONCE)]
            found += threads.map(ask, new)
            prompts += new
    llm = LLM(dtype="float32", enforce_eager=True)
    wanted = [llm.generate(each, SamplingParams(**GREEDY))[0].outputs[0] for each in prompts]  # type: ignore[arg-type]
    assert found == [output.token_ids for output in wanted]

    def are_told() -> bool:
        # While nobody looked, there are no figures.
        figures = app.get("/status")[1]["figures"]
        choices = figures["choices"] if figures else {}
        return "prefill" in choices and "on_decode" in choices.get("decode", {})

    app.wait_until(are_told)
