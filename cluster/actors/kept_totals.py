"""Where an application's totals survive the actor that adds them up.

The status board ends with the ingress that made it. So it keeps its ledger in the key-value store
of Ray's control service (`secret.py` says why that one), and the next board goes on from there.
"""

from __future__ import annotations

from ray.experimental import internal_kv

from cluster.actors.secret import NAMESPACE
from cluster.observe.counts import Ledger


class KeptTotals:
    """The place of one application's ledger."""

    def __init__(self, app_name: str) -> None:
        self._key = f"totals:{app_name}".encode()

    def load(self) -> Ledger:
        """Return the ledger that was saved last, or a new one. Blocks for a moment."""
        found = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return Ledger() if found is None else Ledger.from_bytes(found)

    def save(self, ledger: Ledger) -> None:
        """Keep a ledger in place of the one before. Blocks for a moment."""
        data = ledger.to_bytes()
        internal_kv._internal_kv_put(self._key, data, overwrite=True, namespace=NAMESPACE)
