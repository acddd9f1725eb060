"""Who must be named when a group ends: what each fault looks like to the owner.

Where nobody can tell which of several ranks is at fault, any of them will do, and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sim_schedule import LOST, Fault

from cluster.engine.watchdog import Phase
from cluster.group.context import RankPlace

NAMED = {
    "kill": (" ended: ",),
    "stop": (": no heartbeat for ", ": does not advance in step "),
    "stall": (": does not advance in step ",),
    "drain": (" ended: stopped",),
    "diverge": (": wanted ",),
    "altered plan": (": wanted ",),
    "lost link": (": does not advance in step ", ": wanted "),
    "lost frame": (": does not advance in step ", ": wanted "),
}
"""What a group's end says of a fault."""


def is_named(fault: Fault, places: Sequence[RankPlace], reason: str) -> bool:
    """Tell whether a group's end is what a fault must look like."""
    names = [f"rank dp={at.dp_rank} tp={at.tp_rank} epoch={at.epoch}" for at in places]
    is_rank_right = any(reason.startswith(names[i]) for i in _suspects(fault, len(places)))
    return is_rank_right and any(text in reason for text in NAMED[fault.kind])


def _suspects(fault: Fault, num_ranks: int) -> Iterable[int]:
    if fault.kind in LOST:
        return fault.rank, fault.peer
    if fault.kind == "altered plan":
        return (fault.peer,)
    # Nobody can tell who of a collective has not entered it, and of two votes which one is wrong.
    is_in_collective = fault.kind == "stall" and fault.phase is Phase.RUNNING
    return (
        range(num_ranks)
        if is_in_collective or fault.kind in ("drain", "diverge")
        else (fault.rank,)
    )
