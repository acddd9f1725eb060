"""Applications whose pools are groups of data-parallel engines in lockstep."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NUM_STREAMS = 24


@pytest.fixture(scope="module")
def app(start_shared_app: Callable[..., Any]) -> Any:
    """Two pools of two engines each."""
    # In float32: another batch, and with it another order of summation, shows in bfloat16.
    options = ["dtype=float32", "enforce_eager=true", "prefill.routing=round_robin", "debug=true"]
    options += [f"{pool}.data_parallel_size=2" for pool in ("prefill", "decode")]
    return start_shared_app("dp", *options)


@pytest.mark.feature("P02", "P08")
def test_two_pools_of_two_engines_each_answer_as_one_rank_does(app: Any) -> None:
    from serve.llm import LLM, SamplingParams

    for pool in ("prefill", "decode"):
        found = [(r["dp_rank"], r["tp_rank"]) for r in app.ready_ranks(pool)]
        assert found == [(0, 0), (1, 0)]
    llm = LLM(dtype="float32", max_num_seqs=8, enforce_eager=True)
    questions = ["What is 12 + 30?", "Count from 3 to 9.", "Sort 5 2 9.", "Count from 5 to 20."]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client:

        def ask(messages: list[dict[str, str]]) -> list[int]:
            answer = client.chat.completions.create(
                model="lockstep-tiny",
                messages=messages,  # type: ignore[arg-type]
                temperature=0,
                max_tokens=60,
                extra_body={"return_token_ids": True},
            )
            return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]

        with ThreadPoolExecutor(4) as threads:
            served = list(threads.map(ask, conversations))
        assert ask(conversations[0]) == served[0]  # alone: the other rank has nothing to do
    for messages, tokens in zip(conversations, served, strict=True):
        [offline] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=60))
        assert tokens == offline.outputs[0].token_ids
    # Routing gave every prefill engine some of the prompts, and all step together.
    ranks = app.settled_ranks(
        lambda ranks: all(r["prompt_tokens_computed"] for r in ranks["prefill"])
    )
    for pool in ("prefill", "decode"):
        steps = [r["step"] for r in ranks[pool]]
        assert abs(steps[0] - steps[1]) <= 1, steps  # asked one after the other
    check_debug(app)


def check_debug(app: Any) -> None:
    """What ranks tell of themselves: nothing was compiled, and all agreed on the same."""
    status, body = app.get("/debug/ranks")
    assert status == 200
    for pool in ("prefill", "decode"):
        [replica] = body["pools"][pool]["replicas"]
        places = [(rank["dp_rank"], rank["tp_rank"]) for rank in replica["ranks"]]
        assert places == [(0, 0), (1, 0)]
        for rank in replica["ranks"]:
            assert (rank["compilations"], rank["captures"], rank["replays"]) == (0, 0, {})
        first, second = (
            [{k: v for k, v in step.items() if k != "graph_bs"} for step in rank["agreements"]]
            for rank in replica["ranks"]
        )
        assert first and first == second
        assert any(0 in step["num_scheduled_tokens"] for step in first)


def test_mailboxes_wait_for_the_tick_of_the_streams_that_run(app: Any) -> None:

    def tick_s() -> float:
        status, body = app.get("/debug/ingress")
        assert status == 200
        return float(body["tick_s"])

    assert tick_s() == 0
    with (
        openai.OpenAI(base_url=f"{app.url}/v1", api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(1) as threads,
    ):

        def stream() -> list[int]:
            chunks = client.completions.create(
                model="lockstep-tiny",
                prompt="Count from 3 to 9.",
                n=NUM_STREAMS,
                max_tokens=100,
                stream=True,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )
            counts = [0] * NUM_STREAMS
            for chunk in chunks:
                for choice in chunk.choices:
                    counts[choice.index] += len(choice.token_ids)  # type: ignore[attr-defined]
            return counts

        streaming, longest_s = threads.submit(stream), 0.0
        while not streaming.done():
            longest_s = max(longest_s, tick_s())
            time.sleep(0.02)
        assert streaming.result() == [100] * NUM_STREAMS
    assert 0.01 < longest_s <= 0.1
    assert tick_s() == 0
