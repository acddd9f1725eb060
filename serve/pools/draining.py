"""What runs is answered to its end before `serve run` ends with the cluster that it started.

SIGTERM makes Ray end the process like `sys.exit`. What is called as the command's context closes
may start threads, as the handles of Serve do at their first call; from Python 3.12 on a function of
`atexit` may not. Ray's own function of `atexit`, which ends the cluster, comes later.
"""

from __future__ import annotations

import atexit
import os
import signal
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
from ray.serve.handle import DeploymentHandle

INGRESS = "Ingress"
"""The deployment that takes requests, in every application."""
POLL_PERIOD_S = 0.2
"""How often ingresses are asked how much still runs."""
CALL_TIMEOUT_S = 30.0
"""How long an ingress may take to say so. The first call of a handle looks for its replicas, which
takes seconds on a busy machine."""


def drain_at_exit(timeout_s: float) -> None:
    """Drain when this process exits, as it then does on SIGHUP unless that is ignored (nohup)."""
    if (context := click.get_current_context(silent=True)) is not None:
        context.call_on_close(partial(drain, timeout_s))
    else:  # a program of the user's own; before Ray's function, since the order is reversed
        atexit.register(drain, timeout_s)
    is_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    if is_main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda number, _: sys.exit(number))


def drain(timeout_s: float) -> None:
    """Have every application refuse new requests; return once those that run have ended.

    What still runs after `timeout_s` is cut off. Does nothing where the cluster does not end with
    this process, or no application is left, as after Ctrl-C.
    """
    if not (ray.is_initialized() and has_started_cluster()):
        return
    signal.alarm(0)  # with which Ray would abort a process 3 s after its SIGTERM
    try:
        _wait_for(_ingresses(), timeout_s)
    except (TimeoutError, RayError) as error:
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
    """Return whether a raylet is a child of this process."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            _, name, rest = stat.read_text().replace("(", ")", 1).split(")", 2)
            if name == "raylet" and int(rest.split()[1]) == os.getpid():
                return True
    return False
