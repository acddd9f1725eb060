"""Several ingresses answer as one, and each outlives the others."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS = [f"Count from {i} to {i + 40}." for i in range(3, 11)]
NUM_TOKENS = 160
MAX_NUM_SEQS, MAX_QUEUED = 64, 64
OPTIONS = [
    *("ingress.replicas=2", "dtype=float32", "O=0", "kv_memory=256MiB", "watchdog_s=60"),
    *(f"max_num_seqs={MAX_NUM_SEQS}", f"max_queued_requests={MAX_QUEUED}"),
]


@pytest.fixture(scope="module")
def answers() -> dict[str, list[int]]:
    """By prompt: what the model answers in one process."""
    from serve.llm import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=8, O=0)
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy)
    return {p: list(o.outputs[0].token_ids) for p, o in zip(PROMPTS, outputs, strict=True)}


@dataclass
class Answer:
    """What one stream brought, and why it broke; empty if it did not."""

    prompt: str
    token_ids: list[int]
    error: str = ""


def ask(app: Any, prompt: str, **fields: Any) -> Answer:
    answer = Answer(prompt, [])
    with app.client() as client:
        try:
            stream = client.completions.create(
                model="lockstep-tiny",
                prompt=prompt,
                temperature=0,
                max_tokens=NUM_TOKENS,
                stream=True,
                timeout=900,
                extra_body={"ignore_eos": True, "return_token_ids": True, **fields},
            )
            ends = []
            for chunk in stream:
                for choice in chunk.choices:
                    if choice.index == 0:
                        answer.token_ids += choice.token_ids  # type: ignore[attr-defined]
                    ends += [choice.finish_reason] if choice.finish_reason else []
            if set(ends) != {"length"}:
                answer.error = f"ended with {ends}"
        except openai.APIStatusError as error:
            answer.error = str(error.status_code)
        except (openai.APIError, httpx.HTTPError) as error:
            answer.error = f"{type(error).__name__}: {error}"
    return answer


class Watch:
    """Reads `/ready` and `/metrics` again and again: no total may fall, and no limit be passed."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.num_scrapes = 0
        self.errors: list[str] = []
        """Of looks that got no answer."""
        self.fallen: list[Any] = []
        self.most: dict[str, int] = {}
        """By ingress the most sequences that it had."""
        self.most_in_all = 0
        self._totals: dict[Any, float] = {}

    def __enter__(self) -> Watch:
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        self._thread.join(timeout=300)
        assert not self._thread.is_alive()

    def _look(self) -> None:
        while not self._is_over.wait(0.25):
            try:
                _, body = self._app.get("/ready")
                totals = self._app.totals()
            except (OSError, json.JSONDecodeError) as error:
                self.errors.append(f"{time.monotonic():.1f} {type(error).__name__}: {error}")
                continue
            self._see_ready(body)
            self._see_totals(totals)

    def _see_ready(self, body: dict[str, Any]) -> None:
        live = {each["id"]: each["num_live"] for each in body.get("ingresses", ())}
        for name, num in live.items():
            self.most[name] = max(num, self.most.get(name, 0))
        self.most_in_all = max(self.most_in_all, sum(live.values()))

    def _see_totals(self, totals: dict[Any, float]) -> None:
        before, self._totals = self._totals, totals
        self.fallen += [
            (key, value, totals.get(key))
            for key, value in before.items()
            if totals.get(key, -1) < value
        ]
        self.num_scrapes += 1

    def wait_for_scrapes(self, num: int) -> None:
        """Wait until so many more have been answered."""
        wanted = self.num_scrapes + num
        self._app.wait_until(lambda: self.num_scrapes >= wanted, lambda: self.errors)


def slow_down(actor: Any, pause_s: float, while_there: str) -> None:
    """Let each step of a rank take so long more while a file is there. Runs in its process."""
    runner = actor._rank.engine.runner
    execute = runner.execute

    def slowly(*arguments: Any) -> Any:
        if os.path.exists(while_there):
            time.sleep(pause_s)
        return execute(*arguments)

    runner.execute = slowly


@contextmanager
def slow_steps(name: str, file: Path) -> Iterator[None]:
    """Let all ranks make a step in some 400 ms until the block ends.

    So no stream ends for a minute: on a busy machine it takes long until all of them live.
    """
    import ray

    file.touch()
    board = ray.get_actor(f"status:{name}", namespace="lockstep")
    pools = ray.get(board.actors.remote()).values()
    ranks = [actor for replicas in pools for actors in replicas.values() for actor in actors]
    calls = [rank.__ray_call__.options(concurrency_group="ctl") for rank in ranks]
    ray.get([call.remote(slow_down, 0.4, str(file)) for call in calls])
    try:
        yield
    finally:
        file.unlink()


def ingresses(app: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = app.get("/ready")[1]["ingresses"]
    return found


def assert_right(found: list[Answer], answers: dict[str, list[int]]) -> None:
    assert not [answer.error for answer in found if answer.error]
    assert not [answer.prompt for answer in found if answer.token_ids != answers[answer.prompt]]


@pytest.mark.feature("R13", "R15", "P14")
def test_two_ingresses_answer_as_one_and_each_outlives_the_other(
    start_app: Callable[..., Any], answers: dict[str, list[int]], tmp_path: Path
) -> None:
    app = start_app("ingresses", *OPTIONS)
    with Watch(app) as watch, ThreadPoolExecutor(64) as threads:
        asked = [threads.submit(ask, app, PROMPTS[i % len(PROMPTS)]) for i in range(64)]
        assert_right([each.result() for each in asked], answers)
        assert len(watch.most) == 2 and min(watch.most.values()) > 0, watch.most

        # The first one owns the status board.
        for place in (0, 1):
            one_is_killed(app, threads, place, answers, tmp_path / f"slow{place}")
            watch.wait_for_scrapes(8)
        more_than_there_is_room_for(app, threads, answers, tmp_path / "slow")
    assert not watch.fallen
    assert watch.most_in_all <= MAX_NUM_SEQS + MAX_QUEUED


def one_is_killed(
    app: Any, threads: ThreadPoolExecutor, place: int, answers: dict[str, list[int]], slow: Path
) -> None:
    """Kill an ingress while both have streams."""
    app.wait_until(lambda: app.get("/ready")[0] == 200)
    before = ingresses(app)
    assert len(before) == 2
    with slow_steps("ingresses", slow):
        asked = [threads.submit(ask, app, PROMPTS[i % len(PROMPTS)]) for i in range(16)]
        struck = when_all_live(app, 16)[place]
        os.kill(struck["pid"], signal.SIGKILL)
        app.wait_until(lambda: sum(each.done() for each in asked) >= struck["num_live"])
        broken = [each.result() for each in asked if each.done() and each.result().error]
        again = [threads.submit(ask, app, each.prompt) for each in broken]
    found = [each.result() for each in asked]
    # Those of the other ingress have not noticed.
    assert_right([each for each in found if not each.error], answers)
    assert len([each for each in found if each.error]) == struck["num_live"]
    for each in broken:
        assert answers[each.prompt][: len(each.token_ids)] == each.token_ids
    assert_right([each.result() for each in again], answers)
    app.wait_until(lambda: is_replaced(app, struck["id"]))


def when_all_live(app: Any, num: int) -> list[dict[str, Any]]:
    """Return the ingresses once they have so many streams, as one look found them.

    Each knows its own number, and that of the other as it was a moment ago: another look may be
    answered by the other one.
    """
    looks: list[list[dict[str, Any]]] = []

    def have_all() -> bool:
        looks.append(ingresses(app))
        return sum(each["num_live"] for each in looks[-1]) == num

    app.wait_until(have_all)
    return looks[-1]


def is_replaced(app: Any, struck: str) -> bool:
    status, body = app.get("/ready")
    names = [each["id"] for each in body["ingresses"]]
    return status == 200 and len(names) == 2 and struck not in names


def more_than_there_is_room_for(
    app: Any, threads: ThreadPoolExecutor, answers: dict[str, list[int]], slow: Path
) -> None:
    """Ask for 192 sequences at once."""
    with slow_steps("ingresses", slow), Watch(app) as watch:
        asked = [threads.submit(ask, app, PROMPTS[i % len(PROMPTS)], n=8) for i in range(24)]
        num_refused = 24 - (MAX_NUM_SEQS + MAX_QUEUED) // 8
        app.wait_until(lambda: sum(each.done() for each in asked) >= num_refused)
        watch.wait_for_scrapes(8)
    found = [each.result() for each in asked]
    refused = [each for each in found if each.error == "429"]
    assert len(refused) >= num_refused
    assert_right([each for each in found if each not in refused], answers)
    assert 0 < watch.most_in_all <= MAX_NUM_SEQS + MAX_QUEUED
