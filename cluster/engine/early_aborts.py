"""Aborts that came without a request: each may have overtaken its own.

The one thing to know: most never meet a request (theirs has just ended), so only so many are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_EARLY_ABORTS = 4096


class EarlyAborts:
    """The ids of the last `MAX_EARLY_ABORTS` of them."""

    def __init__(self) -> None:
        self._ids: OrderedDict[str, None] = OrderedDict()

    def remember(self, request_ids: Iterable[str]) -> None:
        """Keep these, as the latest; the oldest give way."""
        for request_id in request_ids:
            self._ids[request_id] = None
            self._ids.move_to_end(request_id)
        while len(self._ids) > MAX_EARLY_ABORTS:
            self._ids.popitem(last=False)

    def take(self, request_id: str) -> bool:
        """Tell whether the request was aborted before it came, and forget that."""
        if request_id not in self._ids:
            return False
        del self._ids[request_id]
        return True
