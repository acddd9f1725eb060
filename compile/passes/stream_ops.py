"""What a graph calls that runs on several CUDA streams. Nothing reads what these functions return,
so they are marked as having side effects, or torch would take them out as dead code.

Streams and events are numbers here. Stream 0 is the one that is current where the graph begins.
"""

from __future__ import annotations

import threading

import torch
from torch.fx.node import has_side_effect


class PerThread(threading.local):
    def __init__(self) -> None:
        self.streams: list[torch.cuda.Stream] = []
        """Of the graph that runs; the first is not ours."""
        self.sides: list[torch.cuda.Stream] = []
        self.events: list[torch.cuda.Event] = []


own = PerThread()
"""What this thread has made; kept, as making them takes a device longer than using them."""


@has_side_effect
def fork_streams(num_streams: int) -> None:
    """Begin. Side streams wait for what the current one holds, and so become part of a capture."""
    while len(own.sides) < num_streams - 1:
        own.sides.append(torch.cuda.Stream())
    main = torch.cuda.current_stream()
    own.streams = [main, *own.sides[: num_streams - 1]]
    begun = main.record_event()
    for side in own.streams[1:]:
        side.wait_event(begun)


@has_side_effect
def set_stream(stream: int) -> None:
    torch.cuda.set_stream(own.streams[stream])


@has_side_effect
def record_event(event: int) -> None:
    while len(own.events) <= event:
        own.events.append(torch.cuda.Event())
    own.events[event].record()


@has_side_effect
def wait_event(event: int) -> None:
    torch.cuda.current_stream().wait_event(own.events[event])


@has_side_effect
def join_streams(*held: torch.Tensor) -> None:
    """End on stream 0, which waits for all others.

    held: what one stream allocated and another used. An allocator gives memory to the next who asks
    on its own stream as soon as Python lets go of it; from here on that comes after its last use.
    `record_stream` would do as well, but memory that was marked so is of no use to the rest of a
    capture.
    """
    main, *sides = own.streams
    torch.cuda.set_stream(main)
    for side in sides:
        main.wait_stream(side)
