"""Every attack of `hostile.py` by name; as a program, one of them against any server.

    python examples/bench/hostile_attacks.py NAME HOST PORT SECONDS

It runs in a process of its own, at the lowest priority: attackers come from other machines, and
must not take the processor from the server on this one, nor from what watches it.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys

import hostile_bodies
import hostile_grammars
import hostile_prompts
import hostile_shapes
import hostile_wire
import msgspec
from hostile_target import Attack, Target

ATTACKS: dict[str, Attack] = (
    hostile_bodies.ATTACKS
    | hostile_prompts.ATTACKS
    | hostile_shapes.ATTACKS
    | hostile_wire.ATTACKS
    | hostile_grammars.ATTACKS
)


class Attacked(msgspec.Struct, frozen=True):
    """What an attack did."""

    seconds: float
    outcomes: dict[str, int]
    most_bytes: int
    """Of requests that were under way at the same time."""
    num_answer_bytes: int


def main() -> None:
    """Run one attack and print what it did, as JSON."""
    name, host, port, seconds = sys.argv[1:]
    os.nice(19)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    attack = ATTACKS[name]
    to = Target((host, int(port)), attack.times * float(seconds))
    took_s = asyncio.run(to.run(attack.run))
    found = Attacked(took_s, dict(to.outcomes), to.most_bytes, to.num_answer_bytes)
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
