"""Garbage collection in a process that serves."""

from __future__ import annotations

import gc


def keep_what_is_loaded() -> None:
    """Never again look for garbage among what there is now, a process being ready.

    Libraries and a model are some hundred thousand objects. A full collection goes through all of
    them while no Python runs, and steps, or all clients' tokens, wait.
    """
    gc.collect()
    gc.freeze()
