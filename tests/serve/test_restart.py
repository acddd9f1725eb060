"""A rank that dies or stops is named, its group is rebuilt, and no request is lost or wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

QUESTIONS = ["Count from 3 to 9.", "What is 12 + 30?", "Sort 5 2 9.", "Count from 11 to 19."]
NUM_CLIENTS = 4


@dataclass
class Load:
    """Clients that ask all questions in turn, each as a stream, until they are told to stop."""

    url: str
    answers: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0

    def __enter__(self) -> Load:
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=240)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, client: int) -> None:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as api:
            turn = client
            while not self._is_over.is_set():
                question = QUESTIONS[turn % len(QUESTIONS)]
                turn += 1
                try:
                    self.answers.setdefault(question, set()).add(ask(api, question))
                    self.num_answers += 1
                except openai.OpenAIError as error:
                    self.failures.append(f"{question} {error}")

    def wait_for(self, num_answers: int) -> None:
        wanted = self.num_answers + num_answers
        deadline = time.monotonic() + 180
        while self.num_answers < wanted:
            assert time.monotonic() < deadline, self.failures
            time.sleep(0.01)


def ask(client: openai.OpenAI, question: str) -> tuple[int, ...]:
    """Return the tokens of an answer, as they came piece by piece."""
    stream = client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        stream=True,
        timeout=240,
        extra_body={"return_token_ids": True},
    )
    tokens: list[int] = []
    for chunk in stream:
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or []
    return tuple(tokens)


def wait_for_restart(app: Any, pool: str, epoch: int) -> tuple[str, float, float]:
    """Return who was named, after how many seconds, and when the group served again."""
    began, named, named_s = time.monotonic(), "", 0.0
    while time.monotonic() - began < 240:
        status, body = app.get("/ready")
        [replica] = body["pools"][pool]["replicas"]
        if not named and replica.get("error"):
            named, named_s = replica["error"], time.monotonic() - began
            assert status == 503 and replica["state"] == "restarting"
        ranks = replica["ranks"]
        if status == 200 and ranks and all(rank["epoch"] == epoch for rank in ranks):
            return named, named_s, time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"not ready again: {app.log.read_text()}")


@pytest.mark.feature("P09", "P14")
def test_ranks_that_are_killed_or_stopped_are_named_and_no_request_notices(
    start_app: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from serve.llm import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=4, O=0)
    wanted = {}
    for question in QUESTIONS:
        [output] = llm.chat(
            [{"role": "user", "content": question}], SamplingParams(temperature=0, max_tokens=60)
        )
        wanted[question] = tuple(output.outputs[0].token_ids)
    options = ["pools=mixed", "dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB"]
    app = start_app("restart", *options, "mixed.tensor_parallel_size=2")
    told = []
    with Load(app.url) as load:
        for epoch, (tp_rank, number, reason) in enumerate(
            [
                (0, signal.SIGKILL, "ended: "),
                (1, signal.SIGKILL, "ended: "),
                (1, signal.SIGSTOP, "no heartbeat for "),
                (0, signal.SIGSTOP, "no heartbeat for "),
            ]
        ):
            load.wait_for(4)
            [pid] = [r["pid"] for r in app.ranks("mixed") if r["tp_rank"] == tp_rank]
            os.kill(pid, number)
            named, named_s, again_s = wait_for_restart(app, "mixed", epoch + 1)
            told.append(f"{number.name} tp={tp_rank}: {named_s:.1f} s, {again_s:.1f} s: {named}")
            assert f"rank dp=0 tp={tp_rank} epoch={epoch}" in named and reason in named
            # A death is known at once, a stopped process after ten seconds; the machine is busy.
            assert named_s < 40, told
        load.wait_for(4)
    assert not load.failures
    assert load.answers == {question: {tokens} for question, tokens in wanted.items()}
    with capsys.disabled():
        print("\n" + "\n".join(told), f"\n{load.num_answers} answers, 0 lost, 0 wrong")
