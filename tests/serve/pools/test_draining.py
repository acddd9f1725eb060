"""SIGTERM and SIGHUP: `serve run` answers what runs, refuses what comes, and ends."""

from __future__ import annotations

import atexit
import json
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray

from serve import serve_run
from serve.serve_run import drain, drain_at_exit

NUM_STREAMS = 4
NUM_TOKENS = 1200
"""So many that streams still run when what drains says so."""
TOO_MANY_TOKENS = 1900
"""For the time that is left."""


@pytest.fixture
def run(
    start_serve: Any, tmp_path: Path, new_port: Callable[[], int]
) -> Iterator[Callable[..., Any]]:
    """Return a function that starts an application on a cluster of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str, target: str = "serve.app:deploy") -> Any:
        port = new_port()
        command = [target, "pools=mixed", "O=0", f"port={port}", *arguments]
        app = start_serve(command, address="local", port=port, log=tmp_path / "log")
        started.append(app.process)
        app.wait_until_ready(is_compiled=False)
        return app

    yield start
    for process in started:
        if process.poll() is None:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()
            process.kill()
            process.wait()  # or the next test finds it unwaited for


class Stream(threading.Thread):
    """A streamed completion of a fixed length."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body = {
            "prompt": "Count from 3 to 9.",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.has_begun = threading.Event()
        self.num_tokens = 0
        self.is_whole = False

    def run(self) -> None:
        url = self._url + "/v1/completions"
        with (
            suppress(httpx.HTTPError),
            httpx.stream("POST", url, json=self._body, timeout=900) as answer,
        ):
            answer.raise_for_status()
            for line in answer.iter_lines():
                self.has_begun.set()
                if line.startswith("data: {"):
                    usage = json.loads(line[6:]).get("usage")
                    self.num_tokens = usage["completion_tokens"] if usage else self.num_tokens
                self.is_whole |= line == "data: [DONE]"


def begin(url: str, max_tokens: int, number: int) -> list[Stream]:
    streams = [Stream(url, max_tokens) for _ in range(number)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.has_begun.wait(600)
    return streams


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_hangup_ends_the_process_in_order_unless_it_is_ignored(is_ignored: bool) -> None:
    """In order: as `sys.exit`, so that `drain` is called. Ignored: as `nohup` does."""
    wanted = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, wanted)
    try:
        drain_at_exit(1.0)
        if is_ignored:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        else:
            with pytest.raises(SystemExit) as exited:
                signal.raise_signal(signal.SIGHUP)
            assert exited.value.code == signal.SIGHUP
    finally:
        atexit.unregister(drain)
        signal.signal(signal.SIGHUP, before)


class Ingress:
    """The handle of an ingress whose calls end in an error, or tell a number of requests."""

    def __init__(self, told: Exception | int) -> None:
        self.drain = self
        self._told = told

    def remote(self) -> Ingress:
        return self

    def result(self, timeout_s: float) -> int:
        if isinstance(self._told, Exception):
            raise self._told
        return self._told


@pytest.fixture
def drained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """What is printed where this process, whose application has these ingresses, drains them."""

    def run(timeout_s: float, *ingresses: Ingress) -> str:
        monkeypatch.setattr(serve_run, "_ingresses", lambda: [*ingresses])
        monkeypatch.setattr(serve_run, "has_started_cluster", lambda: True)
        monkeypatch.setattr(ray, "is_initialized", lambda: True)
        drain(timeout_s)
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize(
    "error", [TimeoutError("no answer"), ray.exceptions.ActorDiedError()], ids=["hangs", "died"]
)
def test_an_ingress_that_does_not_answer_is_one_line_and_no_trace(
    error: Exception, drained: Callable[..., str]
) -> None:
    said = drained(60, Ingress(error))
    assert said.startswith("draining: an ingress did not say what it answers, which is cut off: ")
    assert said.count("\n") == 1


@pytest.mark.feature("R02")
def test_what_runs_when_the_time_to_drain_is_over_is_cut_off(drained: Callable[..., str]) -> None:
    assert drained(0.5, Ingress(3), Ingress(1)).splitlines() == [
        "draining: 4 running, at most 0.5 s",
        "drain_timeout_s: 4 cut off after 0.5 s",
    ]


REFUSES_THREADS = """
import atexit, threading
from ray import serve
from serve.serve_run import drain_at_exit, listen

def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")

def deploy(args):
    @serve.deployment(name="Ingress")
    class Ingress:
        num_running = 3

        def __call__(self):
            return {}

        def drain(self):
            self.num_running -= 1
            return self.num_running

    listen(None, int(args["port"]))
    drain_at_exit(60)
    atexit.register(setattr, threading.Thread, "start", refuse)
    return Ingress.bind()
"""
"""An application that refuses threads at exit, as Python 3.12 does, in every version."""


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("R02")
def test_draining_starts_no_thread_once_the_interpreter_ends(run: Any, tmp_path: Path) -> None:
    (tmp_path / "refuses.py").write_text(REFUSES_THREADS)
    app = run(f"--app-dir={tmp_path}", target="refuses:deploy")
    app.process.send_signal(signal.SIGHUP)
    app.process.wait(300)
    assert "draining: 2 running, at most 60 s" in app.log.read_text()
    assert "cut off" not in app.log.read_text()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("R02")
def test_streams_that_run_at_sigterm_end_whole_and_what_comes_is_refused(run: Any) -> None:
    app = run("drain_timeout_s=900")
    streams = begin(app.url, NUM_TOKENS, NUM_STREAMS)
    children = psutil.Process(app.process.pid).children(recursive=True)
    app.process.send_signal(signal.SIGTERM)
    app.wait_until(lambda: app.get("/ready")[1]["status"] == "draining")
    assert any(stream.is_alive() for stream in streams)
    refused = httpx.post(app.url + "/v1/completions", json={"prompt": "2"}, timeout=300)
    assert refused.status_code == 503
    assert int(refused.headers["Retry-After"]) >= 1
    assert "/ready tells why" in refused.json()["error"]["message"]
    for stream in streams:
        stream.join(900)
    assert all(stream.is_whole for stream in streams), app.log.read_text()
    assert [stream.num_tokens for stream in streams] == [NUM_TOKENS] * NUM_STREAMS
    app.process.wait(900)
    assert f"draining: {NUM_STREAMS} running" in app.log.read_text()
    _, alive = psutil.wait_procs(children, timeout=600)
    assert not alive


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("R02")
def test_a_second_signal_cuts_streams_off(run: Any) -> None:
    app = run("drain_timeout_s=1000")
    streams = begin(app.url, TOO_MANY_TOKENS, NUM_STREAMS)
    app.process.send_signal(signal.SIGTERM)
    app.wait_until(lambda: f"draining: {NUM_STREAMS} running" in app.log.read_text())
    app.process.send_signal(signal.SIGTERM)
    app.process.wait(900)
    for stream in streams:
        stream.join(600)
    assert not any(stream.is_whole for stream in streams)
    assert "cut off" not in app.log.read_text()
