"""What a process does for itself once it has loaded what it serves with."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Exclude what a ready process has loaded from garbage collection.

    Libraries and a model are some hundred thousand objects. A full collection goes through all of
    them while no other Python runs, so steps, or all clients' tokens, wait.
    """
    gc.collect()
    gc.freeze()
