"""Many streams of a served application wait for the same tick."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
NUM_STREAMS = 24


def test_mailboxes_wait_for_the_tick_of_the_streams_that_run(start_app: Callable[..., Any]) -> None:
    app = start_app("ticks", "pools=mixed", "O=0", "debug=true")

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
