"""A rank that dies, stops or disagrees is named, its group is rebuilt, no request lost or wrong."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest

from examples.bench.fault_injection import Action, Fault, Place, arm_actor

pytestmark = pytest.mark.ray

QUESTIONS = ["Count from 3 to 9.", "What is 12 + 30?", "Sort 5 2 9.", "Count from 11 to 19."]
NUM_CLIENTS = 4


@dataclass
class Load:
    """Clients that ask all questions in turn, each as a stream, until they are told to stop.

    One that is refused because a pool is not ready asks again when the answer says.
    """

    url: str
    answers: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    num_answers_of: list[int] = field(default_factory=lambda: [0] * NUM_CLIENTS)
    num_refused: int = 0

    @property
    def num_answers(self) -> int:
        """Answers that all clients got."""
        return sum(self.num_answers_of)

    def __enter__(self) -> Load:
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(NUM_CLIENTS)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=900)
            assert not thread.is_alive(), "a request hangs"

    def _ask(self, client: int) -> None:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0) as api:
            turn = client
            while not self._is_over.is_set():
                question = QUESTIONS[turn % len(QUESTIONS)]
                turn += 1
                try:
                    self.answers.setdefault(question, set()).add(ask(api, question))
                    self.num_answers_of[client] += 1
                except openai.InternalServerError as error:
                    if error.status_code != 503:
                        self.failures.append(f"{question} {error}")
                    self.num_refused += 1
                    self._is_over.wait(float(error.response.headers["Retry-After"]))
                except openai.OpenAIError as error:
                    self.failures.append(f"{question} {error}")

    def wait_until_new(self) -> None:
        """Wait until what every client asks for is younger than this call.

        A request that is struck three times is given up: it may be what kills its ranks.
        """
        before = list(self.num_answers_of)
        deadline = time.monotonic() + 600
        while any(now == then for now, then in zip(self.num_answers_of, before, strict=True)):
            assert time.monotonic() < deadline, (self.num_answers_of, self.failures)
            time.sleep(0.01)


def ask(client: openai.OpenAI, question: str) -> tuple[int, ...]:
    """Return the tokens of an answer, as they came piece by piece."""
    stream = client.chat.completions.create(
        model="lockstep-tiny",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=60,
        stream=True,
        timeout=900,
        extra_body={"return_token_ids": True},
    )
    tokens: list[int] = []
    for chunk in stream:
        for choice in chunk.choices:
            tokens += getattr(choice, "token_ids", None) or []
    return tuple(tokens)


@pytest.fixture(scope="module")
def answers() -> dict[str, set[tuple[int, ...]]]:
    """By question: what the model answers in one process."""
    from serve.llm import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=4, O=0)
    greedy = SamplingParams(temperature=0, max_tokens=60)
    answers = {}
    for question in QUESTIONS:
        [output] = llm.chat([{"role": "user", "content": question}], greedy)
        answers[question] = {tuple(output.outputs[0].token_ids)}
    return answers


def wait_for_name(app: Any, pool: str, epoch: int) -> tuple[str, float]:
    """Return who was named as the end of the group of this epoch, and after how many seconds."""
    began = time.monotonic()
    while time.monotonic() - began < 600:
        status, body = app.get("/ready")
        [replica] = body["pools"][pool]["replicas"]
        if f"epoch={epoch}" in (named := replica.get("error", "")):
            assert status == 503 and replica["state"] == "restarting"
            return named, time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"nobody named: {app.log.read_text()}")


def wait_for_restart(app: Any, pool: str, epoch: int) -> tuple[str, float, float]:
    """Return who was named, after how many seconds, and when the group served again."""
    began = time.monotonic()
    named, named_s = wait_for_name(app, pool, epoch - 1)
    while time.monotonic() - began < 600:
        status, body = app.get("/ready")
        [replica] = body["pools"][pool]["replicas"]
        ranks = replica["ranks"]
        if status == 200 and ranks and all(rank["epoch"] == epoch for rank in ranks):
            return named, named_s, time.monotonic() - began
        time.sleep(0.02)
    raise AssertionError(f"not ready again: {app.log.read_text()}")


@pytest.mark.slow
@pytest.mark.feature("P09", "P14")
def test_ranks_that_are_killed_or_stopped_are_named_and_no_request_notices(
    start_app: Callable[..., Any],
    answers: dict[str, set[tuple[int, ...]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["pools=mixed", "dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB"]
    app = start_app("restart", *options, "mixed.tensor_parallel_size=2")
    told = []
    with Load(app.url) as load:
        for epoch, (tp_rank, number, reason) in enumerate(
            [
                (0, signal.SIGKILL, "ended: "),
                (1, signal.SIGKILL, "ended: "),
                (1, signal.SIGSTOP, "no heartbeat for "),
            ]
        ):
            load.wait_until_new()
            [pid] = [r["pid"] for r in app.ranks("mixed") if r["tp_rank"] == tp_rank]
            os.kill(pid, number)
            named, named_s, again_s = wait_for_restart(app, "mixed", epoch + 1)
            told.append(f"{number.name} tp={tp_rank}: {named_s:.1f} s, {again_s:.1f} s: {named}")
            assert f"rank dp=0 tp={tp_rank} epoch={epoch}" in named and reason in named
            # A death is known at once, a stopped process after ten seconds; the machine is busy.
            assert named_s < 120, told
        load.wait_until_new()
    # Who asks while there is no rank at all is told when to come again; what was asked is answered.
    assert not load.failures
    assert load.answers == answers
    with capsys.disabled():
        told.append(f"{load.num_answers} answers, {load.num_refused} asked again, 0 lost, 0 wrong")
        print("\n" + "\n".join(told))


def strike(
    name: str, app: Any, pool: str, rank: int, fault: tuple[Place, Action, str], directory: Path
) -> int:
    """Arm one of a group's ranks, wait until the fault strikes, and return the step."""
    import ray

    note = directory / f"{time.monotonic()}"
    board = ray.get_actor(f"status:{name}", namespace="lockstep")
    [actors] = ray.get(board.actors.remote())[pool].values()
    place, action, altered = fault
    arm_actor(actors[rank], Fault(place, action, str(note), altered))
    deadline = time.monotonic() + 600
    while not note.exists():
        assert time.monotonic() < deadline, app.log.read_text()
        time.sleep(0.01)
    return int(note.read_text().split()[0])


@pytest.mark.slow
@pytest.mark.feature("P09", "P13", "P14")
def test_leaders_that_fail_inside_a_step_or_a_capture_are_named_and_nothing_is_told_twice(
    start_app: Callable[..., Any],
    answers: dict[str, set[tuple[int, ...]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    options = ["pools=mixed", "dtype=float32", "O=0", "max_num_seqs=64", "kv_memory=64MiB"]
    options += ["mixed.data_parallel_size=2", "compilation.cudagraph_mode=FULL_DECODE_ONLY"]
    # So many graphs that capturing takes long enough to be seen.
    options += [f"compilation.cudagraph_capture_sizes={list(range(1, 65))}"]
    app = start_app("leaders", *options)
    told = []
    with Load(app.url) as load:
        for epoch, (rank, place, action, altered) in enumerate(
            [
                (1, Place.PREFILL, Action.KILL, ""),
                (0, Place.DECODE, Action.DIVERGE, "num_tokens_across_dp"),
            ]
        ):
            load.wait_until_new()
            step = strike("leaders", app, "mixed", rank, (place, action, altered), tmp_path)
            named, named_s, again_s = wait_for_restart(app, "mixed", epoch + 1)
            told.append(f"{action.value} dp={rank}: {named_s:.1f} s, {again_s:.1f} s: {named}")
            assert f"rank dp={rank} tp=0 epoch={epoch}" in named
            if action is Action.DIVERGE:
                assert f" step {step}: {altered}: wanted " in named
            assert named_s < 120, told
        # One that has voted dies; then the group that is built loses a rank while it captures.
        load.wait_until_new()
        strike("leaders", app, "mixed", 0, (Place.PLAN, Action.KILL, ""), tmp_path)
        named, _ = wait_for_name(app, "mixed", 2)
        assert "rank dp=0 tp=0 epoch=2 ended: " in named
        # On a busy machine the group may be ready before it was seen to capture: then the next is.
        for epoch in range(3, 8):
            os.kill(wait_for_capture(app, rank=1, epoch=epoch), signal.SIGKILL)
            named, named_s, again_s = wait_for_restart(app, "mixed", epoch + 1)
            told.append(f"capture dp=1: {named_s:.1f} s, {again_s:.1f} s: {named}")
            load.wait_until_new()
            if "ended while loading" in named:
                break
        assert f"rank dp=1 tp=0 epoch={epoch} ended while loading: " in named
    # Who asks while there is no rank at all is told when to come again; what was asked is answered.
    assert not load.failures
    assert load.answers == answers
    with capsys.disabled():
        told.append(f"{load.num_answers} answers, {load.num_refused} asked again, 0 lost, 0 wrong")
        print("\n" + "\n".join(told))


def wait_for_capture(app: Any, *, rank: int, epoch: int) -> int:
    """Wait until the group of this epoch captures its graphs or has; return the rank's process."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        status, body = app.get("/ready")
        is_capturing = any(
            each["what"] == "mixed: capturing graphs" and each["done"] for each in body["loading"]
        )
        [replica] = body["pools"]["mixed"]["replicas"]
        ranks = replica["ranks"]
        if (is_capturing or status == 200) and ranks and ranks[rank]["epoch"] == epoch:
            return int(ranks[rank]["pid"])
        time.sleep(0.01)
    raise AssertionError(f"not captured: {app.log.read_text()}")


@pytest.mark.slow
@pytest.mark.feature("P09", "R06")
def test_health_names_a_rank_that_hangs_until_its_group_is_rebuilt(
    start_app: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB", "watchdog_s=6"]
    app = start_app("health", *options)
    # An idle group sleeps for longer than the watchdog lets a step take, and is well.
    idle_until = time.monotonic() + 9
    while time.monotonic() < idle_until:
        assert app.get("/health") == (200, {"status": "ok"})
        time.sleep(0.25)
    [pid] = [rank["pid"] for rank in app.ranks("decode")]
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    found: tuple[int, dict[str, Any]] = (200, {})
    while found[0] == 200:
        assert time.monotonic() - began < 600, app.log.read_text()
        time.sleep(0.02)
        found = app.get("/health")
    down_s = time.monotonic() - began
    message = found[1]["error"]["message"]
    assert found[0] == 503
    assert message.startswith("decode pool: rank dp=0 tp=0 epoch=0: no heartbeat for ")
    while app.get("/health")[0] != 200:
        assert time.monotonic() - began < 600, app.log.read_text()
        time.sleep(0.02)
    again_s = time.monotonic() - began
    assert [rank["epoch"] for rank in app.ready_ranks("decode")] == [1]
    with openai.OpenAI(base_url=f"{app.url}/v1", api_key="none") as client:
        assert ask(client, QUESTIONS[0])
    with capsys.disabled():
        print(f"\n/health 503 after {down_s:.1f} s, 200 after {again_s:.1f} s: {message}")


@pytest.mark.feature("P07", "P14", "P17")
def test_pools_that_lose_a_rank_while_kv_is_on_its_way_lose_no_request(
    start_app: Callable[..., Any],
    answers: dict[str, set[tuple[int, ...]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    app = start_app("pools", "dtype=float32", "O=0", "max_num_seqs=8", "kv_memory=64MiB")
    told = []
    with Load(app.url) as load:
        for pool in ("prefill", "decode"):
            load.wait_until_new()
            strike("pools", app, pool, 0, (Place.KV, Action.KILL, ""), tmp_path)
            named, named_s, again_s = wait_for_restart(app, pool, 1)
            told.append(f"kv of {pool}: {named_s:.1f} s, {again_s:.1f} s: {named}")
            assert "rank dp=0 tp=0 epoch=0 ended: " in named
        load.wait_until_new()
    assert not load.failures
    assert load.answers == answers
    with capsys.disabled():
        refused = f"{load.num_refused} asked again"
        print("\n" + "\n".join(told), f"\n{load.num_answers} answers, {refused}, 0 lost, 0 wrong")
