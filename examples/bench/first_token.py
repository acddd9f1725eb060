"""Seconds from `serve run` to the first streamed token, for several starts in a row.

    python examples/bench/first_token.py [--starts 2] [key=value ...]

Each start is a fresh Ray cluster, as on a machine where nothing runs. Port 8000 must be free. What
the first start finds compiled is what `LOCKSTEP_CACHE_ROOT` holds (default `~/.cache/lockstep`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVE = Path(sys.executable).with_name("serve")
PORT = 8000


def main() -> None:
    """Start, ask, stop, as often as asked for; print one JSON line per start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=2)
    parser.add_argument("arguments", nargs="*", help="arguments of deploy")
    options = parser.parse_args()
    for start in range(1, options.starts + 1):
        print(json.dumps({"start": start, **measure(options.arguments)}), flush=True)


def measure(arguments: list[str]) -> dict[str, float]:
    """Return the seconds of one start: ingress up, all ready, first token."""
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", PORT)) == 0:
            raise SystemExit(f"port {PORT}: wanted it free, found a server that listens")
    began = time.monotonic()
    process = subprocess.Popen(
        [SERVE, "run", "serve.app:deploy", *arguments],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": "local"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        seconds = {"ingress_s": wait(process, began, {200, 503})}
        seconds["ready_s"] = wait(process, began, {200})
        asked = time.monotonic()
        first_token()
        now = time.monotonic()
        return seconds | {"first_token_s": now - began, "of_it_request_s": now - asked}
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def wait(process: subprocess.Popen[bytes], began: float, wanted: set[int]) -> float:
    """Wait until `/ready` answers with one of the wanted codes."""
    while process.poll() is None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=5)
            connection.request("GET", "/ready")
            answer = connection.getresponse()
            is_ours = answer.read().startswith(b"{")
            if is_ours and answer.status in wanted:
                return round(time.monotonic() - began, 2)
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit(f"serve run: wanted a server, found exit code {process.returncode}")


def first_token() -> None:
    """Return when the first token of a streamed answer has come."""
    body = {
        "messages": [{"role": "user", "content": "What is 12 + 30?"}],
        "stream": True,
        "temperature": 0,
    }
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    answer = connection.getresponse()
    for line in answer:
        if b'"content":"' in line and b'"content":""' not in line:
            return
    raise SystemExit("wanted a token in the stream, found none")


if __name__ == "__main__":
    main()
