"""Structured output through `serve run`: a prefill rank draws the first token, then decode."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_SCHEMAS = 400


@pytest.mark.feature("R09")
def test_hundreds_of_schemas_fit_while_a_rank_is_killed(start_app: Any) -> None:
    """32 at a time, each its own, in too few blocks for all; half way the decode rank dies."""
    options = ("dtype=float32", "O=0", "max_num_seqs=32", "max_model_len=256", "num_kv_blocks=48")
    app = start_app("structured", *options)
    rng = random.Random(5)

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

    def ask(client: openai.OpenAI, wanted: dict[str, Any]) -> bool:
        """Return whether an answer ended, which then fits; the others were cut by their length."""
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
        choice = answer.choices[0]
        if choice.finish_reason != "length":
            jsonschema.validate(json.loads(choice.text), wanted)
        return choice.finish_reason != "length"

    url = f"{app.url}/v1"
    with (
        openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=900) as client,
        ThreadPoolExecutor(32) as pool,
    ):
        asked = [pool.submit(ask, client, schema()) for _ in range(NUM_SCHEMAS)]
        while sum(each.done() for each in asked) < NUM_SCHEMAS // 2:
            time.sleep(0.05)
        [rank] = app.ranks("decode")
        os.kill(rank["pid"], signal.SIGKILL)
        num_ended = sum(each.result() for each in asked)
    print(f"{num_ended} of {NUM_SCHEMAS} answers ended, the others were cut by their length")
    assert num_ended > 0.8 * NUM_SCHEMAS
    with urllib.request.urlopen(f"{app.url}/metrics", timeout=30) as metrics:
        figures = metrics.read().decode()
    found = re.findall(r"^lockstep:num_preemptions_total\{.*?\} (\S+)$", figures, re.MULTILINE)
    assert sum(map(float, found)) > 0
    assert [rank["epoch"] for rank in app.ready_ranks("decode")] == [1]
