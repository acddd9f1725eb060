"""Where `serve run` listens: the arguments `host` and `port` of `deploy`, and a port that is taken.

`serve run` calls `deploy`, then `ray.init` with its own options, then starts Serve on its default
address unless it runs already. Ray's post-init hooks are called in between: there Serve is started
on the address that was asked for, or the process ends with one line.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import click
import ray
from ray import serve as ray_serve
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client

from compile.errors import FieldError
from serve.pools.draining import has_started_cluster

LISTENING = "0A"
"""The state of a socket in /proc/net/tcp."""


def listen(host: str | None, port: int | None) -> None:
    """Have this `serve run` listen there once it has called `ray.init`; None: where Serve does.

    FieldError where one is given, and Serve's address is not for `deploy` to choose.
    """
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


def _refuse(given: dict[str, str | int], where: str) -> None:
    for name, value in given.items():
        raise FieldError(name, f"nothing {where}", value)


def _start(given: dict[str, str | int]) -> None:
    """Start Serve where it is to listen, or end this process with one line."""
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
    """Raise `FieldError` unless a server can listen there.

    HAProxy itself would not notice: it shares a port with another HAProxy of the same user.
    """
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
