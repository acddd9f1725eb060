"""Progress of a start on a terminal: one line, drawn over, and nothing else is lost."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from serve.observe.page import FILES

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "serve" / "observe" / "page"
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
@pytest.mark.feature("R19", "R20")
def test_a_cold_start_tells_how_far_it_is_in_one_line_and_on_a_page_that_needs_no_key(
    ray_cluster: Any, http_port: int, terminal: Terminal, tmp_path: Path
) -> None:
    """While pieces are compiled the times in `/ready` grow. A warm start may be over too soon."""
    from ray import serve as ray_serve

    env = os.environ | {
        "RAY_ADDRESS": ray_cluster.address_info["gcs_address"],
        "COLUMNS": str(COLUMNS),
    }
    options = ["--name", "drawn", "--route-prefix", "/drawn"]
    arguments = ["pools=mixed", "api_keys=sesame", f"compilation.cache_dir={tmp_path}"]
    started = subprocess.Popen(
        [SERVE, "run", *options, "serve.app:deploy", *arguments],
        cwd=ROOT,
        env=env,
        stdout=terminal.slave,
        stderr=terminal.slave,
    )
    url = f"http://127.0.0.1:{http_port}/drawn"
    seen: list[dict[str, Any]] = []
    try:
        deadline = time.monotonic() + 900
        is_checked = False
        while "lockstep.ingress: ready after" not in terminal.read():
            assert started.poll() is None and time.monotonic() < deadline, terminal.written
            status, body = get(f"{url}/ready")
            if status == 200 and not is_checked:
                assert_needs_no_key(url)
                is_checked = True
            with suppress(ValueError, KeyError):  # as long as the proxy answers by itself
                seen += json.loads(body)["loading"]
            time.sleep(0.1)
        assert is_checked
        time.sleep(1)
        terminal.read()
    finally:
        started.send_signal(signal.SIGTERM)
        started.wait(timeout=600)
        ray_serve.delete("drawn")
    drawn = re.findall(
        r"\r\x1b\[2K((?:loading|compiling while it serves), \d+ s: [^\r\n]*)", terminal.written
    )
    assert len(drawn) > 1
    screen = terminal.screen()
    assert not [line for line in screen if re.search(r"(loading|it serves), \d+ s: ", line)]
    assert [line for line in screen if "lockstep.ingress: ready after" in line]
    said = (
        r"\nloading, \d+ s: .* for \d+ s",
        r"serves after [\d.]+ s, and compiles meanwhile",
        r"\ncompiling while it serves, \d+ s: mixed: compiling \d+/\d+ for \d+ s",
        r"ready after [\d.]+ s",
    )
    lines = "\n".join(["", *drawn, *screen])
    assert [line for line in said if not re.search(line, lines)] == [], lines
    compiling = [entry for entry in seen if entry["what"] == "mixed: compiling"]
    assert compiling[-1]["elapsed_s"] > compiling[0]["elapsed_s"] >= 0
    assert compiling[-1]["done"] > 0
    assert (compiling[0]["dp_rank"], compiling[0]["tp_rank"]) == (0, 0)
    for field in re.findall(r'\bread\(entry, "(\w+)"\)', (PAGE / "page.js").read_text()):
        assert all(field in entry for entry in seen), field


def assert_needs_no_key(url: str) -> None:
    """The page is there for everybody, and tells that the rest needs a key."""
    for path in (*FILES, "/status"):
        assert get(url + path)[0] == 200
    assert json.loads(get(url + "/status")[1])["needs_key"] is True
    assert get(url + "/v1/models")[0] == 401
    assert get(url + "/v1/models", "sesame")[0] == 200


def get(url: str, key: str = "") -> tuple[int, bytes]:
    """Return code and body; code 0 where nothing answers."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()
    except OSError:
        return 0, b""
