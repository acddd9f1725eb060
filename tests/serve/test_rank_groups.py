"""Applications whose pools are groups of several ranks answer as one rank does."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUESTIONS = ["What is 12 + 30?", "Count from 3 to 9.", "Sort 5 2 9.", "Count from 5 to 20."]
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
NUM_STREAMS = 24
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


def ask(client: openai.OpenAI, chat: list[dict[str, str]]) -> list[int]:
    answer = client.chat.completions.create(
        model="lockstep-tiny",
        messages=chat,  # type: ignore[arg-type]
        temperature=0,
        max_tokens=60,
        extra_body={"return_token_ids": True},
    )
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def offline(llm: Any) -> list[list[int]]:
    """Return what one process answers to the questions."""
    from serve.llm import SamplingParams

    outputs = llm.chat(CHATS, SamplingParams(temperature=0, max_tokens=60))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.feature("P01", "R01", "R09", "T04")
def test_pools_of_two_ranks_each_answer_and_draw_as_one_rank_does(
    start_app: Callable[..., Any],
) -> None:
    """One of the ranks fills masks and samples; with overlap it tells the other what it drew."""
    from serve.llm import LLM, SamplingParams, StructuredOutputsParams

    # In float32: another order of summation shows in bfloat16. What Inductor makes of the pieces of
    # such groups is shown with their actors.
    options = ["dtype=float32", "overlap=on", "compilation.use_inductor=false"]
    options += [f"{pool}.tensor_parallel_size=2" for pool in ("prefill", "decode")]
    app = start_app("tp", *options)
    for pool in ("prefill", "decode"):
        ranks = app.ready_ranks(pool)
        assert [r["tp_rank"] for r in ranks] == [0, 1]
        assert len({r["pid"] for r in ranks}) == 2
    llm = LLM(dtype="float32", max_num_seqs=8, enforce_eager=True)
    with app.client() as client:
        assert [ask(client, chat) for chat in CHATS] == offline(llm)
        for seed, form in enumerate(FORMS):
            common: dict[str, Any] = {"temperature": 0.7, "n": 3, "seed": seed, "max_tokens": 120}
            served = client.completions.create(
                model="lockstep-tiny",
                prompt="Name a size.",
                extra_body={"structured_outputs": form, "return_token_ids": True},
                **common,
            )
            params = SamplingParams(structured_outputs=StructuredOutputsParams(**form), **common)
            [output] = llm.generate("Name a size.", params)
            for choice, other in zip(served.choices, output.outputs, strict=True):
                assert choice.token_ids == other.token_ids  # type: ignore[attr-defined]
                assert choice.finish_reason == other.finish_reason
    found = app.settled_ranks(
        lambda ranks: (
            all(r["kv_bytes_sent"] for r in ranks["prefill"])
            and all(r["kv_bytes_received"] for r in ranks["decode"])
        )
    )
    sent = [r["kv_bytes_sent"] for r in found["prefill"]]
    assert sent == [r["kv_bytes_received"] for r in found["decode"]]
    assert sent[0] == sent[1] > 0
    assert [r["num_handoffs"] for r in found["prefill"]] == [0, 0]


@pytest.fixture(scope="module")
def engines(start_shared_app: Callable[..., Any]) -> Any:
    """An application with two pools of two data-parallel engines each."""
    # In float32: another batch, and with it another order of summation, shows in bfloat16.
    options = ["dtype=float32", "enforce_eager=true", "prefill.routing=round_robin", "debug=true"]
    options += ["single_node=true"]
    options += [f"{pool}.data_parallel_size=2" for pool in ("prefill", "decode")]
    return start_shared_app("dp", *options)


@pytest.mark.feature("P02", "P08")
def test_pools_of_two_engines_each_answer_as_one_rank_does(engines: Any) -> None:
    from serve.llm import LLM

    for pool in ("prefill", "decode"):
        found = [(r["dp_rank"], r["tp_rank"]) for r in engines.ready_ranks(pool)]
        assert found == [(0, 0), (1, 0)]
    with engines.client() as client, ThreadPoolExecutor(4) as threads:
        served = list(threads.map(lambda chat: ask(client, chat), CHATS))
        assert ask(client, CHATS[0]) == served[0]  # alone: the other rank has nothing to do
    assert served == offline(LLM(dtype="float32", max_num_seqs=8, enforce_eager=True))
    # Routing gave every prefill engine some of the prompts, and all step together.
    ranks = engines.settled_ranks(
        lambda ranks: all(r["prompt_tokens_computed"] for r in ranks["prefill"])
    )
    for pool in ("prefill", "decode"):
        steps = [r["step"] for r in ranks[pool]]
        assert abs(steps[0] - steps[1]) <= 1, steps  # asked one after the other
    status, body = engines.get("/debug/ranks")
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


def test_ranks_listen_on_the_loopback_interface_where_there_is_but_one_node(engines: Any) -> None:
    import ray

    board = ray.get_actor("status:dp", namespace="lockstep")
    pools = ray.get(board.actors.remote())
    ranks = [rank for by_id in pools.values() for ranks in by_id.values() for rank in ranks]
    hosts = ray.get([rank.__ray_call__.remote(lambda actor: actor._context.host) for rank in ranks])
    assert hosts == ["127.0.0.1"] * 4


def test_mailboxes_wait_for_the_tick_of_the_streams_that_run(engines: Any) -> None:
    def tick_s() -> float:
        status, body = engines.get("/debug/ingress")
        assert status == 200
        return float(body["tick_s"])

    assert tick_s() == 0
    with engines.client() as client, ThreadPoolExecutor(1) as threads:

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
