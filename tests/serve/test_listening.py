"""A `serve run` says in one line where it cannot listen, and ends where a pool fails for good."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path

import click
import pytest
import ray
from ray.serve.config import HTTPOptions

from cluster.actors.gcs_store import FailedStart
from compile.errors import FieldError
from serve import app, serve_run
from serve.app import StartWatch
from serve.serve_run import check_free, check_same, listen


@pytest.mark.parametrize("given", ["port=9000", "host=0.0.0.0"])
def test_an_address_is_refused_outside_of_serve_run(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # other tests start a cluster
    name, value = given.split("=")
    with pytest.raises(SystemExit):
        app.deploy({name: value})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{name}: wanted nothing outside of `serve run` (name it in http_opt")


@pytest.mark.parametrize("address", ["ray://head:10001", None])
def test_a_ray_client_cannot_choose_the_address(address: str | None) -> None:
    context = click.Context(click.Command("build" if address is None else "run"))
    context.params["address"] = address
    where = "outside of `serve run`" if address is None else "through a Ray client"
    with context, pytest.raises(FieldError, match=f"^host: wanted nothing {where}"):
        listen("127.0.0.1", 9000)


def test_a_port_that_is_taken_is_named_with_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        comm = Path("/proc/self/comm").read_text().strip()
        whole = f"(end {comm}, pid {os.getpid()}, or name another one with port=), found {port}"
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            with pytest.raises(FieldError) as refused:
                check_free(host, port)
            assert str(refused.value) == f"port: wanted one that is free {whole}"
    check_free("127.0.0.1", port)


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_refused(host: str) -> None:
    with pytest.raises(FieldError, match=r"^host: wanted an address of this machine, found"):
        check_free(host, 0)


def test_what_runs_already_is_joined_where_it_listens() -> None:
    running = HTTPOptions(host="127.0.0.1", port=8000)
    check_same({}, running)
    check_same({"host": "127.0.0.1", "port": 8000}, running)
    with pytest.raises(FieldError, match=r"^host: wanted 127.0.0.1, where Serve runs .* '::'$"):
        check_same({"host": "::", "port": 8000}, running)


@pytest.mark.feature("R02")
def test_a_taken_port_ends_serve_run_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve_run, "_get_global_client", lambda **_: None)
    monkeypatch.setattr(serve_run, "has_started_cluster", lambda: True)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        serve_run._start({"host": "127.0.0.1", "port": taken.getsockname()[1]})
    assert "wanted one that is free" in capsys.readouterr().err


class Failed:
    """The notes of pools of which each has failed for good."""

    def __init__(self, config_hash: str) -> None:
        self._failed = FailedStart("CannotCompile: no", is_final=True)

    def forget(self, pool: str) -> None:
        pass

    def of(self, pool: str) -> FailedStart:
        return self._failed


@pytest.mark.feature("R01")
@pytest.mark.parametrize("is_ignored", [False, True], ids=["terminal", "background of a script"])
def test_a_start_that_fails_for_good_ends_the_process(
    is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It interrupts `serve run`, also where SIGINT is ignored."""
    monkeypatch.setattr(app, "FailedStarts", Failed)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    wanted = signal.SIG_IGN if is_ignored else signal.default_int_handler
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, wanted),
        signal.SIGUSR1: signal.getsignal(signal.SIGUSR1),
    }
    try:
        with pytest.raises(KeyboardInterrupt):
            StartWatch("hash", ["mixed"]).start()
            time.sleep(10)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
