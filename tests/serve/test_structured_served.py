"""Structured output through `serve run`: a prefill rank draws the first token, then decode."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from typing import Any

import jsonschema
import openai
import pytest

pytestmark = pytest.mark.ray

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
NUM_SCHEMAS = 400
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}


@pytest.mark.feature("R09")
def test_answers_of_two_pools_fit_their_schema_and_are_those_of_one_engine(server: Any) -> None:
    from serve.llm import LLM, SamplingParams, StructuredOutputsParams

    llm = LLM(max_num_seqs=8)
    messages: Any = [{"role": "user", "content": "Name a size."}]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for seed in range(3):
            served = client.chat.completions.create(
                model="lockstep-tiny",
                messages=messages,
                response_format=FORMAT,  # type: ignore[arg-type]
                temperature=0.3,
                n=3,
                seed=seed,
                max_tokens=150,
                extra_body={"return_token_ids": True},
            )
            params = SamplingParams(
                temperature=0.3,
                n=3,
                seed=seed,
                max_tokens=150,
                structured_outputs=StructuredOutputsParams(json=SCHEMA),
            )
            [offline] = llm.chat(messages, params)
            for choice, other in zip(served.choices, offline.outputs, strict=True):
                if choice.finish_reason != "length":
                    jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
                assert choice.token_ids == other.token_ids  # type: ignore[attr-defined]


@pytest.mark.feature("R09")
def test_a_stream_and_a_bad_schema(server: Any) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "lockstep-tiny", "prompt": "Say", "temperature": 1.0}
        chunks = client.completions.create(
            **fields, stream=True, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) in ("yes", "no")
        with pytest.raises(openai.BadRequestError, match="guided_json"):
            client.completions.create(**fields, extra_body={"guided_json": {"type": "strng"}})


@pytest.mark.slow
@pytest.mark.feature("R09")
def test_hundreds_of_schemas_fit_while_a_rank_is_killed(start_app: Any) -> None:
    """32 at a time, each with a schema of its own, in too few blocks for all; half way the decode
    rank dies."""
    import os
    import random
    import signal
    from concurrent.futures import ThreadPoolExecutor

    options = ("dtype=float32", "O=0", "max_num_seqs=32", "max_model_len=256", "num_kv_blocks=48")
    app = start_app("structured", *options)
    rng = random.Random(5)
    num_done, half = 0, threading.Event()
    lock = threading.Lock()

    def schema(depth: int = 2) -> dict[str, Any]:
        kinds: list[Any] = [
            {"type": "boolean"},
            {"type": "integer", "minimum": rng.randint(-99, 0), "maximum": rng.randint(1, 9999)},
            {"type": "string", "maxLength": rng.randint(1, 9)},
            {"enum": [rng.randint(0, 999), f"v{rng.randint(0, 999)}", None]},
        ]
        if depth == 0 or rng.random() < 0.3:
            return dict(rng.choice(kinds))
        names = [f"k{rng.randint(0, 9999)}" for _ in range(rng.randint(1, 3))]
        return {
            "type": "object",
            "properties": {name: schema(depth - 1) for name in names},
            "required": names,
            "additionalProperties": False,
        }

    schemas = [schema() for _ in range(NUM_SCHEMAS)]

    def ask(client: openai.OpenAI, wanted: dict[str, Any]) -> bool:
        nonlocal num_done
        while True:
            try:
                answer = client.completions.create(
                    model="lockstep-tiny",
                    prompt="Say",
                    temperature=1.0,
                    max_tokens=120,
                    extra_body={"structured_outputs": {"json": wanted}},
                )
                break
            except openai.InternalServerError as error:
                if error.status_code != 503:
                    raise
                # The decode group is being rebuilt.
                time.sleep(float(error.response.headers["Retry-After"]))
        with lock:
            num_done += 1
            if num_done == NUM_SCHEMAS // 2:
                half.set()
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            return False
        jsonschema.validate(json.loads(choice.text), wanted)
        return True

    def strike() -> None:
        half.wait(1200)
        [rank] = app.ranks("decode")
        os.kill(rank["pid"], signal.SIGKILL)

    striker = threading.Thread(target=strike)
    striker.start()
    with (
        openai.OpenAI(
            base_url=f"{app.url}/v1", api_key="none", max_retries=0, timeout=900
        ) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        ended = list(pool.map(lambda wanted: ask(client, wanted), schemas))
    striker.join()
    print(f"{sum(ended)} of {len(ended)} answers ended, the others were cut by their length")
    assert sum(ended) > 0.8 * NUM_SCHEMAS
    with urllib.request.urlopen(f"{app.url}/metrics", timeout=30) as answer:
        figures = answer.read().decode()
    found = re.findall(r"^lockstep:num_preemptions_total\{.*?\} (\S+)$", figures, re.MULTILINE)
    print(f"{found} pre-emptions, by engine")
    assert sum(map(float, found)) > 0
    assert [rank["epoch"] for rank in app.ready_ranks("decode")] == [1]
