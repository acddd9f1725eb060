"""What outlives processes: an application's secret, its totals, the adapters that it has loaded,
and why its pools cannot start. It is kept in the key-value store of Ray's control service, through
`ray.experimental.internal_kv`, as Ray itself does; the functions are older than Ray 1.0. Every call
blocks for a moment."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass

import msgspec
from ray.experimental import internal_kv

from cluster.actors.adapter_set import StoredAdapters
from cluster.observe.counts import Ledger
from cluster.wire.credentials import SECRET_BYTES

STORE_NAMESPACE = b"lockstep"


def _get(key: str) -> bytes | None:
    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=STORE_NAMESPACE)
    return found


def _put(key: str, data: bytes, *, overwrite: bool = True) -> None:
    internal_kv._internal_kv_put(key.encode(), data, overwrite=overwrite, namespace=STORE_NAMESPACE)


def application_secret(app_name: str) -> bytes:
    """Return the secret of an application: random, and one for all processes and deployments of it.
    The first process to look for it puts it there. A random argument of deployments would differ at
    each `serve deploy`, and Serve would restart every replica."""
    if not internal_kv._internal_kv_initialized():
        raise RuntimeError("secret: wanted a process that is connected to Ray, found none")
    key = f"secret:{app_name}"
    _put(key, secrets.token_bytes(SECRET_BYTES), overwrite=False)
    if (found := _get(key)) is None:
        raise RuntimeError(f"secret: wanted that of application {app_name!r}, found none")
    return found


class KeptTotals:
    """One application's ledger: the status board ends with the ingress that made it."""

    def __init__(self, app_name: str) -> None:
        self._key = f"totals:{app_name}"

    def load(self) -> Ledger:
        found = _get(self._key)
        return Ledger() if found is None else msgspec.msgpack.decode(found, type=Ledger)

    def save(self, ledger: Ledger) -> None:
        _put(self._key, msgspec.msgpack.encode(ledger))


class KeptAdapters:
    """The adapters that one application has loaded while it serves."""

    def __init__(self, app_name: str) -> None:
        self._key = f"adapters:{app_name}"

    def load(self) -> StoredAdapters:
        found = _get(self._key)
        return (
            StoredAdapters()
            if found is None
            else msgspec.msgpack.decode(found, type=StoredAdapters)
        )

    def save(self, stored: StoredAdapters) -> None:
        _put(self._key, msgspec.msgpack.encode(stored))


@dataclass(frozen=True)
class FailedStart:
    reason: str
    is_final: bool
    """Every other start would fail in the same way."""


class FailedStarts:
    """By pool why the deployment with this `config_hash` cannot start, for `serve run` to say."""

    def __init__(self, config_hash: str) -> None:
        self._prefix = f"failed:{config_hash}:"

    def note(self, pool: str, failed: FailedStart) -> None:
        _put(self._prefix + pool, json.dumps([failed.reason, failed.is_final]).encode())

    def recover(self, pool: str) -> None:
        """Forget a pool's failure because it is ready, unless no start can last."""
        if (failed := self.of(pool)) is not None and not failed.is_final:
            self.forget(pool)

    def forget(self, pool: str) -> None:
        """Forget a pool's failure because it is deployed anew."""
        internal_kv._internal_kv_del((self._prefix + pool).encode(), namespace=STORE_NAMESPACE)

    def of(self, pool: str) -> FailedStart | None:
        found = _get(self._prefix + pool)
        return None if found is None else FailedStart(*json.loads(found))
