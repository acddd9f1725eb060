"""Why a pool's replica cannot start, kept where whoever started the application finds it.

Ray Serve has a replica that fails replaced, and says so in its own words. `serve run` ends with
ours (`serve/app.py`), after Serve has gone; so they stand in the key-value store of Ray's
control service (`secret.py` says why that one), by deployment.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ray.experimental import internal_kv

from cluster.actors.secret import NAMESPACE


@dataclass(frozen=True)
class FailedStart:
    """The last failure of a pool that has not been ready since."""

    reason: str
    is_final: bool
    """Every other start would fail in the same way."""


class FailedStarts:
    """Those of the deployment with this `config_hash`. Every call blocks for a moment."""

    def __init__(self, config_hash: str) -> None:
        self._prefix = f"failed:{config_hash}:"

    def note(self, pool: str, failed: FailedStart) -> None:
        """Keep a pool's failure in place of the one before."""
        data = json.dumps([failed.reason, failed.is_final]).encode()
        internal_kv._internal_kv_put(self._key(pool), data, overwrite=True, namespace=NAMESPACE)

    def recover(self, pool: str) -> None:
        """Forget a pool's failure because it is ready, unless no start can last."""
        if (failed := self.of(pool)) is not None and not failed.is_final:
            self.forget(pool)

    def forget(self, pool: str) -> None:
        """Forget a pool's failure because it is deployed anew."""
        internal_kv._internal_kv_del(self._key(pool), namespace=NAMESPACE)

    def of(self, pool: str) -> FailedStart | None:
        """Return a pool's failure, if there is one."""
        found = internal_kv._internal_kv_get(self._key(pool), namespace=NAMESPACE)
        return None if found is None else FailedStart(*json.loads(found))

    def _key(self, pool: str) -> bytes:
        return (self._prefix + pool).encode()
