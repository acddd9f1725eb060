"""The beginning and the end of `serve run`: where it listens, and what it answers before it ends.

`serve run` calls `deploy`, then `ray.init` with its own options, then starts Serve on its default
address unless it runs already. Ray's post-init hooks are called in between: there Serve is started
on the address that was asked for, or the process ends with one line.

SIGTERM makes Ray end the process like `sys.exit`. What is called as the command's context closes
may start threads, as the handles of Serve do at their first call; from Python 3.12 on a function of
`atexit` may not. Ray's own function of `atexit`, which ends the cluster, comes later.
"""

from __future__ import annotations

import atexit
import errno
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import ray
from ray import serve as ray_serve
from ray.exceptions import RayError
from ray.serve._private.constants import RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from compile.errors import FieldError

log = logging.getLogger("lockstep.serve")

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""
INGRESS = "Ingress"
"""The deployment that takes requests, in every application."""
POLL_PERIOD_S = 0.2
"""How often ingresses are asked how much still runs."""
CALL_TIMEOUT_S = 30.0
"""How long an ingress may take to say so. The first call of a handle looks for its replicas, which
takes seconds on a busy machine."""
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
"""After how many seconds HAProxy cuts the connections that it had when the replicas changed."""


def listen(host: str | None, port: int | None) -> None:
    """Have this `serve run` listen there once it has called `ray.init`; None: where Serve does.
    FieldError where one is given, and Serve's address is not for `deploy` to choose."""
    fields = {"host": host, "port": port}
    given = {name: value for name, value in fields.items() if value is not None}
    context = click.get_current_context(silent=True)
    if context is None or context.command.name != "run":
        _refuse(given, "outside of `serve run` (name it in http_options, in YAML or serve.start)")
    elif "://" in (context.params.get("address") or ""):
        # A Ray client calls no post-init hooks.
        _refuse(given, "through a Ray client (name it where Serve is started on the cluster)")
    elif not ray.is_initialized():  # it is when `--reload` builds the application again
        ray._private.worker._post_init_hooks.append(partial(_start, given))


def outlast(request_timeout_s: float) -> None:
    """Have the HAProxy of the cluster that this process starts cut no request that is in time."""
    os.environ.setdefault(HARD_STOP, str(math.ceil(request_timeout_s) + 1))


def warn_of_cuts(request_timeout_s: float) -> None:
    """Say it where the HAProxy of a cluster would cut requests that are in time."""
    if request_timeout_s > RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S:
        log.warning(
            "%s: wanted more than request_timeout_s, %g, in the environment of Ray's nodes, found "
            "%d: a request that takes longer is cut off if replicas change meanwhile",
            HARD_STOP,
            request_timeout_s,
            RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S,
        )


def _refuse(given: dict[str, str | int], where: str) -> None:
    for name, value in given.items():
        raise FieldError(name, f"nothing {where}", value)


def _start(given: dict[str, str | int]) -> None:
    try:
        client = _get_global_client(raise_if_no_controller_running=False)
        if client is not None:
            check_same(given, client.http_config)
            return
        if has_started_cluster():
            options = HTTPOptions(**given)
            check_free(options.host, options.port)
    except FieldError as error:
        print(error, file=sys.stderr)
        raise SystemExit(1) from None
    if given:
        ray_serve.start(http_options=given)


def check_same(given: dict[str, str | int], running: HTTPOptions) -> None:
    """Raise `FieldError` unless Serve, which runs, listens where this is to."""
    for name, value in given.items():
        if (runs := getattr(running, name)) != value:
            raise FieldError(name, f"{runs}, where Serve runs in this cluster already", value)


def check_free(host: str, port: int) -> None:
    """Raise `FieldError` unless a server can listen there. HAProxy itself would not notice: it
    shares a port with another HAProxy of the same user."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Connections of a server that has ended do not count: SO_REUSEADDR is set.
        socket.create_server(address[:2], family=family).close()
    except PermissionError:
        raise FieldError("port", "one that this user may listen on", port) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise FieldError("host", "an address of this machine", host) from None
        wanted = f"one that is free (end {_listener(port)}, or name another one with port=)"
        raise FieldError("port", wanted, port) from None


def _listener(port: int) -> str:
    """Return name and pid of the process that listens on a port, as far as /proc tells."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == LISTENING and int(local.rsplit(":", 1)[1], 16) == port:
                    inodes.add(f"socket:[{rest[5]}]")
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()}, pid {process.name}"
    return "what has it"


def drain_at_exit(timeout_s: float) -> None:
    """Drain when this process exits, as it then does on SIGHUP unless that is ignored (nohup)."""
    context = click.get_current_context(silent=True)
    if context is not None and context.command.name == "run":
        context.call_on_close(partial(drain, timeout_s))
    else:  # a program of the user's own; before Ray's function, since the order is reversed
        atexit.register(drain, timeout_s)
    is_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    if is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, _: sys.exit(number))


def drain(timeout_s: float) -> None:
    """Have every application refuse new requests; return once those that run have ended. What still
    runs after `timeout_s` is cut off. Does nothing where the cluster does not end with this
    process, or no application is left, as after Ctrl-C."""
    if not (ray.is_initialized() and has_started_cluster()):
        return
    signal.alarm(0)  # with which Ray would abort a process 3 s after its SIGTERM
    try:
        _wait_for(_ingresses(), timeout_s)
    except (TimeoutError, RayError, RayServeException) as error:
        why = str(error).strip().partition("\n")[0]
        _say(f"draining: an ingress did not say what it answers, which is cut off: {why}")


def _wait_for(ingresses: list[DeploymentHandle], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    if num_running := _num_running(ingresses):
        _say(f"draining: {num_running} running, at most {timeout_s:g} s")
    while num_running:
        if time.monotonic() > deadline:
            _say(f"drain_timeout_s: {num_running} cut off after {timeout_s:g} s")
            return
        time.sleep(POLL_PERIOD_S)
        num_running = _num_running(ingresses)


def _ingresses() -> list[DeploymentHandle]:
    applications = ray_serve.status().applications
    names = [name for name, found in applications.items() if INGRESS in found.deployments]
    return [ray_serve.get_deployment_handle(INGRESS, name) for name in names]


def _num_running(ingresses: list[DeploymentHandle]) -> int:
    """Tell all ingresses to drain; return how many requests they still answer."""
    calls = [ingress.drain.remote() for ingress in ingresses]
    return sum(int(call.result(timeout_s=CALL_TIMEOUT_S)) for call in calls)


def _say(line: str) -> None:
    with suppress(OSError):  # the terminal may have gone, which is what SIGHUP says
        print(line, file=sys.stderr)


def has_started_cluster() -> bool:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, name, rest = stat.read_text().replace("(", ")", 1).split(")", 2)
            if name == "raylet" and int(rest.split()[1]) == os.getpid():
                return True
    return False
