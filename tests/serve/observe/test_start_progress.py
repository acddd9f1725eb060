"""Progress of a start on a terminal: one line, drawn over, and nothing else is lost."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SERVE = Path(sys.executable).with_name("serve")
COLUMNS = 100
PREFIX = "\x1b[36m(ServeReplica:default:Ingress pid=1)\x1b[0m 2026-11-24 02:22:50,923 INFO"
PRINTS = """
import logging
import sys
from serve.observe.start_progress import draw_on_terminal

logging.getLogger("ray.serve").addHandler(logging.StreamHandler())  # holds today's sys.stderr
draw_on_terminal()
prefix = sys.argv[1]
print("before")
print(f"{prefix} lockstep.ingress: loading, 2 s: mixed: starting for 2 s")
print(f"{prefix} lockstep.ingress: loading, 7 s: mixed: " + "compiling " * 30, file=sys.stderr)
print("half a line, ", end="")
print("and the rest")
print(f"{prefix} lockstep.ingress: compiling while it serves, 9 s: mixed: compiling 1/5 for 2 s")
logging.getLogger("ray.serve").warning("is ready at /")
print(f"{prefix} lockstep.ingress: compiling while it serves, 9 s: mixed: compiling 2/5 for 3 s")
print(f"{prefix} lockstep.ingress: ready after 12.0 s", file=sys.stderr)
print()
print("behind", flush=True)
"""


class Terminal:
    """A pseudo terminal, and what a process has written to it."""

    def __init__(self) -> None:
        self._master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        os.set_blocking(self._master, False)
        self.written = ""

    def read(self) -> str:
        """Return all that was written so far."""
        try:
            while piece := os.read(self._master, 1 << 16):
                self.written += piece.decode()
        except (BlockingIOError, OSError):  # nothing more yet, or ever
            pass
        return self.written

    def screen(self) -> list[str]:
        """Return the lines as they look at last: each from where it was cleared."""
        lines = self.written.replace("\r\n", "\n").split("\n")
        return [line.split("\r\x1b[2K")[-1] for line in lines]

    def close(self) -> None:
        os.close(self.slave)
        os.close(self._master)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal()
    yield opened
    opened.close()


def test_progress_is_drawn_over_itself_and_other_lines_stay(terminal: Terminal) -> None:
    command = [sys.executable, "-c", PRINTS, PREFIX]
    env = os.environ | {"COLUMNS": str(COLUMNS)}
    subprocess.run(
        command, cwd=ROOT, env=env, stdout=terminal.slave, stderr=terminal.slave, check=True
    )
    written = terminal.read()
    ready = f"{PREFIX} lockstep.ingress: ready after 12.0 s"
    others = ["before", "half a line, and the rest", "is ready at /", ready, "", "behind", ""]
    assert terminal.screen() == others
    assert "loading, 2 s: mixed: starting for 2 s" in written
    assert "compiling while it serves, 9 s" in written
    drawn = re.findall(r"\r\x1b\[2K(loading[^\r\n]*)", written)
    assert [len(line) < COLUMNS for line in drawn] == [True, True]  # it would wrap


def test_a_pipe_gets_every_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, PREFIX], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "\r" not in done.stdout + done.stderr
    assert "loading, 2 s" in done.stdout and "loading, 7 s" in done.stderr


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.feature("R20")
def test_a_start_on_a_terminal_is_one_line(
    ray_cluster: Any, http_port: int, terminal: Terminal, tmp_path: Path
) -> None:
    from ray import serve as ray_serve

    env = os.environ | {
        "RAY_ADDRESS": ray_cluster.address_info["gcs_address"],
        "COLUMNS": str(COLUMNS),
    }
    options = ["--name", "drawn", "--route-prefix", "/drawn"]
    # A warm start may be over before there is a second line.
    arguments = ["pools=mixed", f"compilation.cache_dir={tmp_path}"]
    started = subprocess.Popen(
        [SERVE, "run", *options, "serve.app:deploy", *arguments],
        cwd=ROOT,
        env=env,
        stdout=terminal.slave,
        stderr=terminal.slave,
    )
    try:
        deadline = time.monotonic() + 300
        while "lockstep.ingress: ready after" not in terminal.read():
            assert started.poll() is None and time.monotonic() < deadline, terminal.written
            time.sleep(0.1)
        time.sleep(1)
        terminal.read()
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=60)
        ray_serve.delete("drawn")
    drawn = re.findall(
        r"\r\x1b\[2K((?:loading|compiling while it serves), \d+ s: [^\r\n]*)", terminal.written
    )
    assert len(drawn) > 1
    screen = terminal.screen()
    assert not [line for line in screen if re.search(r"(loading|it serves), \d+ s: ", line)]
    assert [line for line in screen if "lockstep.ingress: ready after" in line]
