"""Streams outlive what happens to their group: its ranks die, stop, disagree, or go over to graphs.

A rank that fails is named, its group is rebuilt, and no token is lost or wrong. A cold start serves
eagerly while another process compiles, and its groups go over in between.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import openai
import psutil
import pytest

from cluster.wire.messages import StepKind
from compile.config import CUDAGraphMode
from examples.bench.fault_injection import Action, Fault, Place, arm_actor

pytestmark = pytest.mark.ray

QUESTIONS = ["Count from 3 to 9.", "What is 12 + 30?", "Sort 5 2 9.", "Count from 11 to 19."]
MAX_TOKENS = 300
# Streams may have to wait for several groups that a busy machine builds.
PATIENT = ("max_queue_wait_s=3600", "request_timeout_s=3600")
OPTIONS = ("dtype=float32", "kv_memory=64MiB", *PATIENT)
Answers = dict[str, list[int]]


@dataclass
class Streams:
    """A client for each question, which asks for a long answer again and again until told to stop.

    One that is refused because a pool is not ready asks again when the answer says.
    """

    app: Any
    answers: Answers
    """By question: the one right answer, of `MAX_TOKENS`."""
    num_tokens: int = 60
    """Of the first client's answers; the others ask for fewer, so that never all of them pause."""
    wrong: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_tokens_of: list[int] = field(default_factory=lambda: [0] * len(QUESTIONS))
    num_answers_of: list[int] = field(default_factory=lambda: [0] * len(QUESTIONS))
    longest_pause_s: float = 0.0
    """Between two chunks of one answer."""

    def __enter__(self) -> Streams:
        self._is_over = threading.Event()
        ask = [threading.Thread(target=self._ask, args=(i,)) for i in range(len(QUESTIONS))]
        self._threads = ask
        for thread in ask:
            thread.start()
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=900)
            assert not thread.is_alive(), "a stream hangs"
        if kind is None:
            assert not self.failures
            assert not self.wrong
            assert all(self.num_answers_of)

    def _ask(self, client: int) -> None:
        question, num_tokens = QUESTIONS[client], self.num_tokens - client * self.num_tokens // 6
        wanted = self.answers[question][:num_tokens]
        with self.app.client() as api:
            while not self._is_over.is_set():
                try:
                    found = self._stream(api, client, num_tokens)
                except openai.InternalServerError as error:
                    if error.status_code != 503:
                        self.failures.append(f"{question} {error}")
                    self._is_over.wait(float(error.response.headers["Retry-After"]))
                except openai.OpenAIError as error:
                    self.failures.append(f"{question} {error}")
                else:
                    self.num_answers_of[client] += 1
                    if found != wanted:
                        self.wrong.append(f"{question}: wanted {wanted}, found {found}")

    def _stream(self, api: openai.OpenAI, client: int, num_tokens: int) -> list[int]:
        stream = api.chat.completions.create(
            model="lockstep-tiny",
            messages=[{"role": "user", "content": QUESTIONS[client]}],
            temperature=0,
            max_tokens=num_tokens,
            stream=True,
            timeout=900,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        tokens: list[int] = []
        at = math.inf
        for chunk in stream:
            last, at = at, time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, at - last)
            for choice in chunk.choices:
                new = getattr(choice, "token_ids", None) or []
                tokens += new
                self.num_tokens_of[client] += len(new)
        return tokens

    def wait_for_tokens(self, num_tokens: int) -> None:
        """Wait until every client has got as many more."""
        self._wait_for_more(self.num_tokens_of, num_tokens)

    def wait_until_new(self) -> None:
        """Wait until what every client asks for is younger than this call.

        A request that is struck three times is given up: it may be what kills its ranks.
        """
        self._wait_for_more(self.num_answers_of, 1)

    def _wait_for_more(self, counts: list[int], num: int) -> None:
        wanted = [count + num for count in counts]
        self.app.wait_until(
            lambda: all(now >= least for now, least in zip(counts, wanted, strict=True)),
            lambda: (counts, self.failures),
        )


@pytest.fixture(scope="module")
def answers() -> Answers:
    """By question: what the model answers eagerly in one process."""
    from serve.llm import LLM, SamplingParams

    llm = LLM(dtype="float32", max_num_seqs=4, O=0)
    greedy = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.chat([[{"role": "user", "content": each}] for each in QUESTIONS], greedy)
    return {q: each.outputs[0].token_ids for q, each in zip(QUESTIONS, outputs, strict=True)}


# Ranks that fail.


def wait_for_name(app: Any, pool: str, epoch: int) -> str:
    """Return who was named as the end of the group of this epoch."""

    def named() -> str:
        status, body = app.get("/ready")
        [replica] = body["pools"][pool]["replicas"]
        if f"epoch={epoch}" not in (error := replica.get("error", "")):
            return ""
        assert status == 503 and replica["state"] == "restarting"
        return str(error)

    return str(app.wait_until(named))


def wait_for_restart(app: Any, pool: str, epoch: int) -> str:
    """Wait until the group of this epoch serves; return who was named as the end of the last."""
    began = time.monotonic()
    named = wait_for_name(app, pool, epoch - 1)
    # A death is known at once, a stopped process after ten seconds; the machine is busy.
    assert time.monotonic() - began < 300, named

    def is_back() -> bool:
        status, body = app.get("/ready")
        [replica] = body["pools"][pool]["replicas"]
        ranks = replica["ranks"]
        return bool(status == 200 and ranks and all(rank["epoch"] == epoch for rank in ranks))

    app.wait_until(is_back)
    return named


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
    app.wait_until(note.exists)
    return int(note.read_text().split()[0])


def wait_for_capture(app: Any, *, rank: int, epoch: int) -> int:
    """Wait until the group of this epoch captures its graphs or has; return the rank's process."""

    def pid() -> int:
        status, body = app.get("/ready")
        is_capturing = any(
            each["what"] == "mixed: capturing graphs" and each["done"] for each in body["loading"]
        )
        [replica] = body["pools"]["mixed"]["replicas"]
        ranks = replica["ranks"]
        is_there = ranks and ranks[rank]["epoch"] == epoch
        return int(ranks[rank]["pid"]) if is_there and (is_capturing or status == 200) else 0

    return int(app.wait_until(pid, period_s=0.02))


@pytest.mark.slow
@pytest.mark.feature("P09", "P14")
def test_ranks_that_are_killed_or_stopped_are_named_and_no_request_notices(
    start_app: Callable[..., Any], answers: Answers
) -> None:
    options = ["O=0", "max_num_seqs=8", "pools=mixed", "mixed.tensor_parallel_size=2"]
    app = start_app("restart", *OPTIONS, *options)
    with Streams(app, answers) as streams:
        for epoch, (tp_rank, number, reason) in enumerate(
            [
                (0, signal.SIGKILL, "ended: "),
                (1, signal.SIGKILL, "ended: "),
                (1, signal.SIGSTOP, "no heartbeat for "),
            ]
        ):
            streams.wait_until_new()
            [pid] = [r["pid"] for r in app.ranks("mixed") if r["tp_rank"] == tp_rank]
            os.kill(pid, number)
            named = wait_for_restart(app, "mixed", epoch + 1)
            assert f"rank dp=0 tp={tp_rank} epoch={epoch}" in named and reason in named
        streams.wait_until_new()


@pytest.mark.slow
@pytest.mark.feature("P09", "P13", "P14")
def test_leaders_that_fail_inside_a_step_or_a_capture_are_named_and_nothing_is_told_twice(
    start_app: Callable[..., Any], answers: Answers, tmp_path: Path
) -> None:
    # So many graphs that capturing takes long enough to be seen.
    graphs = f"cc.cudagraph_capture_sizes={list(range(1, 33))}"
    options = ["O=0", "max_num_seqs=32", "pools=mixed", "mixed.data_parallel_size=2", graphs]
    app = start_app("leaders", *OPTIONS, *options, "cc.cudagraph_mode=FULL_DECODE_ONLY")
    with Streams(app, answers) as streams:
        for epoch, (rank, place, action, altered) in enumerate(
            [
                (1, Place.PREFILL, Action.KILL, ""),
                (0, Place.DECODE, Action.DIVERGE, "num_tokens_across_dp"),
            ]
        ):
            streams.wait_until_new()
            step = strike("leaders", app, "mixed", rank, (place, action, altered), tmp_path)
            named = wait_for_restart(app, "mixed", epoch + 1)
            assert f"rank dp={rank} tp=0 epoch={epoch}" in named
            if action is Action.DIVERGE:
                assert f" step {step}: {altered}: wanted " in named
        # One that has voted dies; then the group that is built loses a rank while it captures.
        streams.wait_until_new()
        strike("leaders", app, "mixed", 0, (Place.PLAN, Action.KILL, ""), tmp_path)
        named = wait_for_name(app, "mixed", 2)
        assert "rank dp=0 tp=0 epoch=2 ended: " in named
        # On a busy machine the group may be ready before it was seen to capture: then the next is.
        for epoch in range(3, 8):
            os.kill(wait_for_capture(app, rank=1, epoch=epoch), signal.SIGKILL)
            named = wait_for_restart(app, "mixed", epoch + 1)
            streams.wait_until_new()
            if "ended while loading" in named:
                break
        assert f"rank dp=1 tp=0 epoch={epoch} ended while loading: " in named


@pytest.fixture(scope="module")
def pools(start_shared_app: Callable[..., Any]) -> Any:
    """An application with two pools, and too few blocks for as many sequences as may run."""
    options = ("dtype=float32", "O=0", "max_num_seqs=32", "max_model_len=256", "num_kv_blocks=48")
    return start_shared_app("pools", *options, *PATIENT)


@pytest.mark.feature("P07", "P14", "P17")
def test_pools_that_lose_a_rank_while_kv_is_on_its_way_lose_no_request(
    pools: Any, answers: Answers, tmp_path: Path
) -> None:
    with Streams(pools, answers) as streams:
        for pool in ("prefill", "decode"):
            streams.wait_until_new()
            strike("pools", pools, pool, 0, (Place.KV, Action.KILL, ""), tmp_path)
            assert "rank dp=0 tp=0 epoch=0 ended: " in wait_for_restart(pools, pool, 1)
        streams.wait_until_new()


@pytest.mark.slow
@pytest.mark.feature("P08", "P14")
def test_streams_of_a_rank_that_is_killed_go_on_at_another_replica_meanwhile(
    start_app: Callable[..., Any], answers: Answers
) -> None:
    """One choice is made among the engines of all replicas, and nobody waits for the dead one."""
    app = start_app("replicas", *OPTIONS, "O=0", "decode.replicas=2")

    def states() -> dict[str, str]:
        replicas = app.get("/ready")[1]["pools"]["decode"]["replicas"]
        return {replica["id"]: replica["state"] for replica in replicas}

    with Streams(app, answers) as streams:
        for _ in range(2):
            streams.wait_until_new()
            # Four clients at two engines: both have something to do.
            app.wait_until(lambda: all(rank["num_running"] for rank in app.ready_ranks("decode")))
            streams.longest_pause_s = 0.0
            os.kill(app.ready_ranks("decode")[0]["pid"], signal.SIGKILL)
            app.wait_until(lambda: sorted(states().values()) == ["ready", "restarting"])
            streams.wait_for_tokens(20)
            assert sorted(states().values()) == ["ready", "restarting"], "it takes longer"
            app.wait_until(lambda: [*states().values()] == ["ready", "ready"])
            print(f"longest pause {streams.longest_pause_s:.3f} s")
            # A second to notice and a second to go on, or ten times that on a busy machine.
            assert streams.longest_pause_s < 20
        streams.wait_until_new()
    assert sum(rank["epoch"] for rank in app.ready_ranks("decode")) == 2


def drawn_schema(rng: random.Random, depth: int = 2) -> dict[str, Any]:
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
        "properties": {name: drawn_schema(rng, depth - 1) for name in names},
        "required": names,
        "additionalProperties": False,
    }


def ends_within(client: openai.OpenAI, schema: dict[str, Any]) -> bool:
    """Return whether an answer ended, which then fits; the others were cut by their length."""
    while True:
        try:
            answer = client.completions.create(
                model="lockstep-tiny",
                prompt="Say",
                temperature=1.0,
                max_tokens=120,
                extra_body={"structured_outputs": {"json": schema}},
                timeout=900,
            )
        except (openai.InternalServerError, openai.RateLimitError) as error:
            if error.status_code not in (429, 503):
                raise
            # The decode group is being rebuilt, or grammars wait for a busy machine.
            time.sleep(float(error.response.headers["Retry-After"]))
            continue
        [choice] = answer.choices
        if choice.finish_reason == "length":
            return False
        jsonschema.validate(json.loads(choice.text), schema)
        return True


@pytest.mark.slow
@pytest.mark.feature("R09")
def test_hundreds_of_schemas_fit_while_a_rank_is_killed(pools: Any) -> None:
    """32 at a time, each its own, in too few blocks for all; half way the decode rank dies."""
    num_schemas, rng = 200, random.Random(5)
    [before] = pools.ready_ranks("decode")
    with pools.client() as client, ThreadPoolExecutor(32) as threads:
        asked = [threads.submit(ends_within, client, drawn_schema(rng)) for _ in range(num_schemas)]
        pools.wait_until(lambda: sum(each.done() for each in asked) >= num_schemas // 2)
        os.kill(before["pid"], signal.SIGKILL)
        num_ended = sum(each.result() for each in asked)
    assert num_ended > 0.8 * num_schemas, "the others were cut by their length"
    name = "lockstep:num_preemptions_total"
    assert sum(value for (found, _), value in pools.totals().items() if found == name) > 0
    assert [rank["epoch"] for rank in pools.ready_ranks("decode")] == [before["epoch"] + 1]


# Groups that serve while they compile.

TRACED_ALONE = ("compilation.use_inductor=false", "compilation.serve_while_compiling=on")
"""Pieces that run as they were traced: kept in the cache as others, and there within seconds."""


def start_early(start_app: Callable[..., Any], name: str, cache: Path, *more: str) -> Any:
    """Return a strict application with a cache of its own, which still compiles."""
    given = ["pools=mixed", "max_num_seqs=4", "debug=true", "threads_per_rank=1"]
    given += [*OPTIONS, "compilation.sealed=strict", f"compilation.cache_dir={cache}"]
    return start_app(name, *given, *more, is_compiled=False)


COMPILES = "cluster.rank.compile_process"


@pytest.fixture
def let_compilers_go_on(start_app: Callable[..., Any]) -> Iterator[Callable[[], None]]:
    """Stop each process of this run's cluster that compiles as soon as it is there, until what is
    yielded is called: on a busy machine it may otherwise have compiled before a test looks."""
    stopped: dict[int, psutil.Process] = {}
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.2):
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    if process.pid not in stopped and COMPILES in process.cmdline():
                        process.suspend()
                        stopped[process.pid] = process

    def let_go_on() -> None:
        is_over.set()
        thread.join()
        for process in stopped.values():
            with suppress(psutil.Error):
                process.resume()

    thread = threading.Thread(target=watch)
    thread.start()
    yield let_go_on
    let_go_on()


def debug_ranks(app: Any) -> list[dict[str, Any]]:
    _, body = app.get("/debug/ranks")
    [replica] = body["pools"]["mixed"]["replicas"]
    return list(replica["ranks"])


def stages(app: Any) -> list[int]:
    """Return the stage of each rank's last step."""
    return [rank["agreements"][-1]["stage"] for rank in debug_ranks(app) if rank.get("agreements")]


def compiler_of(app: Any, pid: int) -> int:
    """Return the process that compiles for a rank."""

    def found() -> int:
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):
                if COMPILES in child.cmdline():
                    return child.pid
        return 0

    return int(app.wait_until(found, lambda: f"rank {pid}: no process that compiles"))


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until_gone_over(app: Any) -> tuple[list[dict[int, dict[str, Any]]], list[dict[str, Any]]]:
    """Wait until all ranks replay graphs.

    Returns by rank its agreements by step, as far as they were seen: a rank keeps the last
    thousand. And what `/ready` told meanwhile of what it waits for.
    """
    seen: list[dict[int, dict[str, Any]]] = [{} for _ in debug_ranks(app)]
    told: list[dict[str, Any]] = []

    def has_gone_over() -> bool:
        _, body = app.get("/ready")
        is_compiling = body["compiling"]
        told.extend(body["loading"])
        found = [rank.get("agreements", []) for rank in debug_ranks(app)]
        for known, agreements in zip(seen, found, strict=True):
            known.update({each["step"]: each for each in agreements})
        return not is_compiling

    app.wait_until(has_gone_over, lambda: app.get("/ready"), period_s=0.5)
    return seen, told


def check_progress(app: Any, told: list[dict[str, Any]]) -> None:
    """Assert that a start whose pieces were compiled while it served has told how far it was: by
    growing times in `/ready`, and by lines in the log."""
    compiling = [entry for entry in told if entry["what"] == "mixed: compiling"]
    assert compiling[-1]["elapsed_s"] > compiling[0]["elapsed_s"] >= 0
    assert compiling[-1]["done"] > 0
    said = (
        r"loading, \d+ s: .* for \d+ s",
        r"serves after [\d.]+ s, and compiles meanwhile",
        r"compiling while it serves, \d+ s: mixed: compiling \d+/\d+ for \d+ s",
        r"ready after [\d.]+ s",
    )
    for line in said:  # what an ingress logs reaches the console a little later
        app.wait_until(
            lambda line=line: re.search(f"lockstep.ingress: {line}", app.log.read_text())
        )


def first_steps_of_stages(agreements: list[dict[str, Any]]) -> dict[int, int]:
    """Return by stage the first step of it, of those stages whose beginning is logged."""
    return {
        after["stage"]: after["step"]
        for before, after in pairwise(agreements)
        if before["stage"] != after["stage"]
    }


@pytest.mark.slow
@pytest.mark.feature("X06", "N07", "R20")
@pytest.mark.parametrize(
    "more",
    [(), ("mixed.data_parallel_size=2", "mixed.tensor_parallel_size=2", *TRACED_ALONE)],
    ids=["one rank", "2x2"],
)
def test_streams_do_not_notice_that_their_group_goes_over_to_graphs(
    start_app: Callable[..., Any],
    let_compilers_go_on: Callable[[], None],
    answers: Answers,
    tmp_path: Path,
    more: tuple[str, ...],
) -> None:
    app = start_early(start_app, "early", tmp_path / "cache", *more)
    status, body = app.get("/ready")
    assert (status, body["status"], body["compiling"]) == (200, "ready", True)
    with Streams(app, answers, MAX_TOKENS) as streams:
        streams.wait_for_tokens(1)
        assert set(stages(app)) == {0}, "the first tokens come while pieces are compiled"
        let_compilers_go_on()
        found, told = wait_until_gone_over(app)
        streams.wait_for_tokens(2 * MAX_TOKENS)
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
    check_waste(app.get("/debug/ranks")[1])
    if not more:  # what Inductor compiles takes long enough to be told of
        check_progress(app, told)


def check_waste(told: dict[str, Any]) -> None:
    """Assert that `python -m compile.waste` finds the decode steps that a rank tells of."""
    command = [sys.executable, "-m", "compile.waste"]
    run = subprocess.run(
        command, input=json.dumps(told), capture_output=True, text=True, check=True
    )
    found = re.search(r", full graphs: .*?\n +all +(\d+) +(\d+) +(\d+) ", run.stdout, re.DOTALL)
    assert found, run.stdout
    [replica] = told["pools"]["mixed"]["replicas"]
    rank = replica["ranks"][0]
    steps = [step for step in rank["agreements"] if step["kind"] == StepKind.DECODE]
    asked = [max(step["num_scheduled_tokens"]) for step in steps]
    held = [num for num in asked if num <= max(rank["captured"]["full"])]
    padding = [
        step["num_tokens"] - num
        for step, num in zip(steps, asked, strict=True)
        if step["mode"] == CUDAGraphMode.FULL.value
    ]
    assert [int(found[1]), int(found[2])] == [len(held), sum(held)]
    assert int(found[3]) >= sum(padding), "eager steps may have been padded to those sizes"


@pytest.mark.slow
@pytest.mark.feature("X06")
def test_a_rank_that_dies_while_its_group_compiles_costs_no_token_and_leaves_nobody_behind(
    start_app: Callable[..., Any],
    let_compilers_go_on: Callable[[], None],
    answers: Answers,
    tmp_path: Path,
) -> None:
    more = ("mixed.data_parallel_size=2", *TRACED_ALONE)
    app = start_early(start_app, "early-death", tmp_path / "cache", *more)
    with Streams(app, answers, MAX_TOKENS) as streams:
        streams.wait_for_tokens(5)
        pids = [rank["pid"] for rank in app.ready_ranks("mixed")]
        compilers = [compiler_of(app, pid) for pid in pids]
        assert set(stages(app)) == {0}
        let_compilers_go_on()
        os.kill(pids[1], signal.SIGKILL)
        app.wait_until(
            lambda: all(rank["epoch"] == 1 for rank in app.ready_ranks("mixed", 900)),
            lambda: app.get("/ready"),
        )
        app.wait_until(
            lambda: not any(map(is_alive, compilers)),
            lambda: "a process that compiles outlives its rank",
        )
        app.wait_until_ready()
        streams.wait_for_tokens(2 * MAX_TOKENS)
    assert all(sum(rank["replays"].values()) > MAX_TOKENS for rank in debug_ranks(app))


@pytest.mark.slow
@pytest.mark.feature("X06")
def test_a_compiler_that_is_killed_leaves_its_group_serving_eagerly_and_says_why(
    start_app: Callable[..., Any],
    let_compilers_go_on: Callable[[], None],
    answers: Answers,
    tmp_path: Path,
) -> None:
    more = ("mixed.tensor_parallel_size=2", *TRACED_ALONE)
    app = start_early(start_app, "early-loss", tmp_path / "cache", *more)
    with Streams(app, answers, MAX_TOKENS) as streams:
        follower = app.ready_ranks("mixed")[1]
        os.kill(compiler_of(app, follower["pid"]), signal.SIGKILL)
        let_compilers_go_on()
        app.wait_until_ready()  # nothing is waited for any more
        streams.wait_for_tokens(2 * MAX_TOKENS)
    errors = [rank["compile_error"] for rank in app.ranks("mixed")]
    assert errors == ["", "the process that compiles was ended by SIGKILL"]
    assert set(stages(app)) == {0}
    assert app.get("/ready")[1]["loading"] == []
