"""A cold start serves eagerly while another process compiles, and its groups go over in between."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

PROMPTS = ["Count from 3 to 9.", "What is 12 + 30?", "Sort 5 2 9."]
MAX_TOKENS = 300
FEWER_TOKENS = 49
"""By so many a client asks for fewer than the one before it, so that never all of them pause."""
LIMIT_S = 900.0
"""For another process to compile on a machine that does much else."""


@dataclass
class Streams:
    """One client for each prompt, which asks for a long answer again and again until told to stop.

    What an answer was is noted token by token, with the time between two of them.
    """

    url: str
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    """When each ended, and how long it was."""
    num_tokens_of: list[int] = field(default_factory=lambda: [0] * len(PROMPTS))
    """Tokens that each client got."""
    answers: dict[str, list[int]] = field(default_factory=dict)
    """By prompt: the one right answer, of `MAX_TOKENS`."""

    def __enter__(self) -> Streams:
        self._is_over = threading.Event()
        ask = [threading.Thread(target=self._ask, args=(i,)) for i in range(len(PROMPTS))]
        self._threads = ask
        for thread in ask:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=900)
            assert not thread.is_alive(), "a stream hangs"

    def _ask(self, client: int) -> None:
        prompt = PROMPTS[client]
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as api:
            while not self._is_over.is_set():
                try:
                    found = self._stream(api, client, prompt)
                except openai.InternalServerError as error:
                    if error.status_code != 503:
                        self.failures.append(f"{prompt} {error}")
                    self._is_over.wait(float(error.response.headers["Retry-After"]))
                    continue
                except openai.OpenAIError as error:
                    self.failures.append(f"{prompt} {error}")
                    continue
                wanted = self.answers[prompt][: self._num_tokens(client)]
                if found != wanted:
                    self.wrong.append(f"{prompt}: wanted {wanted}, found {found}")

    def _num_tokens(self, client: int) -> int:
        return MAX_TOKENS - client * FEWER_TOKENS

    def _stream(self, api: openai.OpenAI, client: int, prompt: str) -> list[int]:
        stream = api.chat.completions.create(
            model="lockstep-tiny",
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=self._num_tokens(client),
            stream=True,
            timeout=900,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        tokens: list[int] = []
        came_at = None
        for chunk in stream:
            for choice in chunk.choices:
                new = getattr(choice, "token_ids", None) or []
                if not new:
                    continue
                now = time.monotonic()
                if came_at is not None:
                    self.pauses.append((now, now - came_at))
                came_at = now
                tokens += new
                self.num_tokens_of[client] += len(new)
        return tokens

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until every client has got as many more."""
        wanted = [num + num_tokens for num in self.num_tokens_of]
        deadline = time.monotonic() + 600
        while any(num < least for num, least in zip(self.num_tokens_of, wanted, strict=True)):
            assert time.monotonic() < deadline, (self.num_tokens_of, self.failures)
            time.sleep(0.02)


@pytest.fixture(scope="module")
def answers() -> dict[str, list[int]]:
    """By prompt: what the model answers eagerly in one process."""
    from serve.llm import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=4, O=0)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    answers = {}
    for prompt in PROMPTS:
        [output] = llm.chat([{"role": "user", "content": prompt}], greedy)
        answers[prompt] = output.outputs[0].token_ids
    return answers


def options(cache: Path, *more: str) -> list[str]:
    """Return the arguments of a strict application with a cache of its own."""
    given = ["pools=mixed", "dtype=float32", "max_num_seqs=4", "kv_memory=64MiB", "debug=true"]
    given += ["threads_per_rank=1", "compilation.sealed=strict"]
    return [*given, f"compilation.cache_dir={cache}", *more]


TRACED_ALONE = ("compilation.use_inductor=false", "compilation.serve_while_compiling=on")
"""Pieces that run as they were traced: kept in the cache as others, and there within seconds."""


def debug_ranks(app: Any) -> list[dict[str, Any]]:
    _, body = app.get("/debug/ranks")
    [replica] = body["pools"]["mixed"]["replicas"]
    return list(replica["ranks"])


def stages(app: Any) -> list[int]:
    """Return the stage of each rank's last step."""
    return [rank["agreements"][-1]["stage"] for rank in debug_ranks(app) if rank.get("agreements")]


def compiler_of(pid: int) -> int:
    """Return the process that compiles for a rank."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if "cluster.rank.compile_process" in child.cmdline():
                    return child.pid
        time.sleep(0.02)
    raise AssertionError(f"rank {pid}: wanted a process that compiles, found none")


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone_over(app: Any) -> tuple[float, list[dict[int, dict[str, Any]]]]:
    """Wait until all ranks replay graphs.

    Returns when they were last seen to run eagerly, and by rank its agreements by step, as far as
    they were seen: a rank keeps the last thousand.
    """
    eager_at, deadline = time.monotonic(), time.monotonic() + LIMIT_S
    seen: list[dict[int, dict[str, Any]]] = []
    is_compiling = True
    while is_compiling:
        assert time.monotonic() < deadline, app.get("/ready")
        asked_at = time.monotonic()
        is_compiling = app.get("/ready")[1]["compiling"]
        found = [rank.get("agreements", []) for rank in debug_ranks(app)]
        seen = seen or [{} for _ in found]
        for known, agreements in zip(seen, found, strict=True):
            known.update({each["step"]: each for each in agreements})
        if not any(agreements and agreements[-1]["stage"] for agreements in found):
            eager_at = asked_at
        time.sleep(0.05)
    return eager_at, seen


@pytest.mark.feature("X06")
@pytest.mark.parametrize(
    "more",
    [
        (),
        ("mixed.data_parallel_size=2", *TRACED_ALONE),
        ("mixed.tensor_parallel_size=2", *TRACED_ALONE),
    ],
    ids=["one rank", "dp=2", "tp=2"],
)
def test_streams_do_not_notice_that_their_group_goes_over_to_graphs(
    start_app: Callable[..., Any],
    answers: dict[str, list[int]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    more: tuple[str, ...],
) -> None:
    began = time.monotonic()
    app = start_app("early", *options(tmp_path / "cache", *more), is_compiled=False)
    ready_s = time.monotonic() - began
    status, body = app.get("/ready")
    assert (status, body["status"], body["compiling"]) == (200, "ready", True)
    with Streams(app.url, answers=answers) as streams:
        streams.wait_for_tokens(1)
        first_s = time.monotonic() - began
        assert set(stages(app)) == {0}, "the first tokens come while pieces are compiled"
        eager_at, found = wait_until_gone_over(app)
        over_s = time.monotonic() - began
        streams.wait_for_tokens(2 * MAX_TOKENS)
    assert not streams.failures
    assert not streams.wrong
    # A figure to look at: how long a pause is depends on what else the machine does.
    plain_s = max(took for ended, took in streams.pauses if ended < eager_at)
    going_over_s = max(took for ended, took in streams.pauses if ended >= eager_at)
    with capsys.disabled():
        print(
            f"\nready after {ready_s:.1f} s, first tokens after {first_s:.1f} s, gone over after "
            f"{over_s:.1f} s; longest pause before {plain_s:.3f} s, from then on "
            f"{going_over_s:.3f} s; {len(streams.pauses)} pauses"
        )
    # All ranks entered each stage at the same step, and work was done meanwhile.
    entered = [first_steps_of_stages([known[step] for step in sorted(known)]) for known in found]
    assert all(each == entered[0] for each in entered)
    assert len(entered[0]) == max(entered[0]) >= 8, "a stage was not seen"
    assert all(max(found[0][step]["num_scheduled_tokens"]) for step in entered[0].values())
    for rank in debug_ranks(app):
        replays = sum(rank["replays"].values())
        counters = (rank["late_compilations"], rank["late_captures"], rank["compilations"])
        assert (counters, rank["captures"] > 0, replays > MAX_TOKENS) == ((0, 0, 0), True, True)
    assert all(not rank["compiling"] for rank in app.ranks("mixed"))


def first_steps_of_stages(agreements: list[dict[str, Any]]) -> dict[int, int]:
    """Return by stage the first step of it, of those stages whose beginning is logged."""
    steps: dict[int, int] = {}
    for before, after in pairwise(agreements):
        if before["stage"] != after["stage"]:
            steps[after["stage"]] = after["step"]
    return steps


@pytest.mark.feature("X06")
def test_a_rank_that_dies_while_its_group_compiles_costs_no_token_and_leaves_nobody_behind(
    start_app: Callable[..., Any], answers: dict[str, list[int]], tmp_path: Path
) -> None:
    more = ("mixed.data_parallel_size=2", *TRACED_ALONE)
    app = start_app("early-death", *options(tmp_path / "cache", *more), is_compiled=False)
    with Streams(app.url, answers=answers) as streams:
        streams.wait_for_tokens(5)
        pids = [rank["pid"] for rank in app.ready_ranks("mixed")]
        compilers = [compiler_of(pid) for pid in pids]
        assert set(stages(app)) == {0}
        os.kill(pids[1], signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while not all(rank["epoch"] == 1 for rank in app.ready_ranks("mixed", LIMIT_S)):
            assert time.monotonic() < deadline, app.get("/ready")
            time.sleep(0.05)
        while any(map(is_alive, compilers)):
            assert time.monotonic() < deadline, "a process that compiles outlives its rank"
            time.sleep(0.05)
        app.wait_until_ready(LIMIT_S)
        streams.wait_for_tokens(2 * MAX_TOKENS)
    assert not streams.failures
    assert not streams.wrong
    assert all(sum(rank["replays"].values()) > MAX_TOKENS for rank in debug_ranks(app))


@pytest.mark.feature("X06")
def test_a_compiler_that_is_killed_leaves_its_group_serving_eagerly_and_says_why(
    start_app: Callable[..., Any], answers: dict[str, list[int]], tmp_path: Path
) -> None:
    more = ("mixed.tensor_parallel_size=2", *TRACED_ALONE)
    app = start_app("early-loss", *options(tmp_path / "cache", *more), is_compiled=False)
    with Streams(app.url, answers=answers) as streams:
        follower = app.ready_ranks("mixed")[1]
        os.kill(compiler_of(follower["pid"]), signal.SIGKILL)
        app.wait_until_ready()  # nothing is waited for any more
        streams.wait_for_tokens(2 * MAX_TOKENS)
    assert not streams.failures
    assert not streams.wrong
    errors = [rank["compile_error"] for rank in app.ranks("mixed")]
    assert errors == ["", "the process that compiles was ended by SIGKILL"]
    assert set(stages(app)) == {0}
    assert app.get("/ready")[1]["loading"] == []
