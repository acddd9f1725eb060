"""The application that `serve run serve.app:deploy` starts, in a Ray cluster of its own.

Another application may take its place. It answers on a free port of the loopback address, behind
Ray Serve's own proxy or HAProxy. Its processes are told apart by the titles that Ray gives them.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from faults_app import ROOT, SERVE, Cluster, free_port

HOST = "127.0.0.1"
DEFAULT = "serve.app:deploy"
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0

TITLES = {
    "ingress": ("ray::ServeReplica:default:Ingress",),
    "proxy": ("ray::ProxyActor", "ray::HAProxyManager", "haproxy"),
    "ranks": ("ray::RankActor",),
    "rest": ("ray::ServeReplica", "ray::ServeController", "ray::StatusBoard"),
}
"""How the titles of a role's processes begin; the first role that fits is it."""


class DefaultApp:
    """A running application with these arguments of `deploy`; ready when its block begins."""

    def __init__(
        self,
        arguments: tuple[str, ...] = (),
        *,
        has_haproxy: bool = False,
        import_path: str = DEFAULT,
    ) -> None:
        self.address = (HOST, 0)
        self._import_path = import_path
        self._arguments = arguments
        self._has_haproxy = has_haproxy
        self._stack = ExitStack()
        self._log = Path()

    def __enter__(self) -> DefaultApp:
        with ExitStack() as starting:
            directory = Path(starting.enter_context(tempfile.TemporaryDirectory()))
            self._log = directory / "log"
            starting.callback(_end_children)
            if self._has_haproxy:
                os.environ.update(_haproxy_environment(directory))
            cluster = starting.enter_context(Cluster())
            self.address = (HOST, cluster.port)
            process = starting.enter_context(self._serve(cluster))
            starting.callback(_end, process)
            self._wait_until_ready(process)
            self._stack = starting.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stack.__exit__(kind, error, traceback)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Return code and JSON of an answer; code 0 where nothing answers."""
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()

    def num_held(self) -> int:
        """Return the sequences and handoffs that the ranks hold; figures are up to 0.75 s old."""
        _, body = self.get("/ready")
        replicas = [r for pool in body.get("pools", {}).values() for r in pool["replicas"]]
        counts = ("num_running", "num_waiting", "num_handoffs")
        return sum(rank[count] for r in replicas for rank in r["ranks"] for count in counts)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Return the processes of each role."""
        found: dict[str, list[psutil.Process]] = {role: [] for role in TITLES}
        for process in psutil.Process().children(recursive=True):
            if role := _role(process):
                found[role].append(process)
        return found

    def _serve(self, cluster: Cluster) -> subprocess.Popen[bytes]:
        with self._log.open("wb") as out:
            return subprocess.Popen(
                [SERVE, "run", self._import_path, *self._arguments],
                cwd=ROOT,
                env=os.environ | {"RAY_ADDRESS": cluster.address},
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._has_started():
            if process.poll() is not None or time.monotonic() > deadline:
                found = "an end" if process.poll() is not None else f"none in {READY_TIMEOUT_S:g} s"
                log = self._log.read_text(errors="replace")
                raise SystemExit(f"serve run: wanted /ready to be 200, found {found}\n{log}")
            time.sleep(0.1)

    def _has_started(self) -> bool:
        """Whether it serves, and has gone over to what a cold start compiles meanwhile."""
        status, body = self.get("/ready")
        return status == 200 and not body["compiling"]


def _role(process: psutil.Process) -> str | None:
    with suppress(psutil.Error, IndexError):
        title = process.cmdline()[0]
        for role, titles in TITLES.items():
            if title.startswith(titles) or os.path.basename(title) in titles:
                return role
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """End `serve run` as a user does."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _end_children() -> None:
    """Kill the processes that a damaged cluster has left behind."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def _haproxy_environment(directory: Path) -> dict[str, str]:
    """Return the environment in which Ray Serve starts with HAProxy in front.

    Its files and ports are fixed by default; a second cluster on the machine would take them over.
    """
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(directory / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(directory / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(directory / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(directory / "metrics.sock"),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
    }
