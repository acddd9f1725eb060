"""The order of a CUDA device's work on a CPU: streams, events and copies that run late.

A stream is a queue. What is put into it runs when an event, a synchronisation or a read by the host
needs it, at random legal moments, or at once. So a host array that is filled again too early, and
a result that is read before its event, give wrong bytes here. Memory that nothing has written holds
`RUBBISH`.

Modelled so far: what `BlockStore` uses, which is streams, events, and copies between pinned memory
and the device. Graphs and computing ops are not modelled: an op that writes device memory, other
than a copy, raises. Nothing is said of kernels, of time, or of how large memory is.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch

Order = Literal["late", "random", "eager"]
RUBBISH = 0x7B
RUN_SHARE = 0.3
"""How often a stream runs a part of its queue by itself, in random order."""


class NotSimulated(RuntimeError):
    """The code under test asked for what this device does not model; the message names it."""


class Event:
    """A point in a stream, once it is recorded."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._end = 0

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what the stream holds now."""
        self._stream = stream or self._device.current
        self._end = self._stream.num_put

    def reach(self) -> None:
        """Run the stream up to the mark."""
        if self._stream is not None:
            self._stream.run_to(self._end)

    def query(self) -> bool:
        """Return whether the mark is reached."""
        self._device.let_run()
        return self._stream is None or self._stream.num_run >= self._end

    def synchronize(self) -> None:
        """Keep the host waiting until the mark is reached."""
        self._device.counts["event waits"] += 1
        self.reach()


class Stream:
    """Work in order. Invariant: `num_run` of the `num_put` pieces have run, the first ones."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._queue: deque[Callable[[], object]] = deque()
        self.num_put = self.num_run = 0
        device.streams.append(self)

    def put(self, work: Callable[[], object]) -> None:
        """Put a piece of work behind all others."""
        self._queue.append(work)
        self.num_put += 1
        self._device.let_run()

    def run_to(self, end: int) -> None:
        """Run until `end` pieces have run in all."""
        while self.num_run < end:
            self.num_run += 1
            self._queue.popleft()()

    def wait_event(self, event: Event) -> None:
        """Run nothing that is put from now on before the event."""
        self.put(event.reach)

    def wait_stream(self, other: Stream) -> None:
        """Run nothing that is put from now on before what the other stream holds."""
        event = Event(self._device)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        """Keep the host waiting until all has run."""
        self._device.counts["stream waits"] += 1
        self.run_to(self.num_put)


class CudaDevice:
    """Streams and the memory they copy."""

    def __init__(self, order: Order, seed: int = 0) -> None:
        self._order = order
        self._random = random.Random(seed)
        self.streams: list[Stream] = []
        self.counts: Counter[str] = Counter()
        self.current = Stream(self)

    def let_run(self) -> None:
        """Run what the order lets run now."""
        for stream in self.streams:
            if self._order == "eager":
                stream.run_to(stream.num_put)
            elif self._order == "random" and self._random.random() < RUN_SHARE:
                left = stream.num_put - stream.num_run
                stream.run_to(stream.num_run + self._random.randint(0, left))

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make `stream` the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class DeviceTensor(torch.Tensor):
    """Device memory. Copies of it, and of its views, are put into the current stream."""

    simulated: CudaDevice
    _VIEWS = frozenset({"reshape", "view", "__getitem__"})
    _FACTS = frozenset({"shape", "dtype"})

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Model the call, or raise by its name."""
        device = next(t.simulated for t in args if isinstance(t, cls))
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            name = func.__self__.__name__
        plain = [t.as_subclass(torch.Tensor) if isinstance(t, cls) else t for t in args]
        if name == "copy_":
            is_late = (kwargs or {}).get("non_blocking", False)
            if not is_late:
                raise NotSimulated("copy_ without non_blocking")
            device.counts["copies"] += 1
            device.current.put(lambda: torch.Tensor.copy_(*plain))
            return args[0]
        if name == "device":
            return torch.device("cuda", 0)
        if name in cls._FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args)
        if name not in cls._VIEWS:
            raise NotSimulated(name)
        return on_device(func(*plain, **(kwargs or {})), device)


def on_device(tensor: torch.Tensor, device: CudaDevice) -> DeviceTensor:
    """Return a tensor of the host as memory of the device."""
    found = tensor.as_subclass(DeviceTensor)
    found.simulated = device
    return found


@contextmanager
def simulated(order: Order, seed: int = 0) -> Iterator[CudaDevice]:
    """Stand in for torch's streams, events and pinned memory."""
    device, empty = CudaDevice(order, seed), torch.empty

    def rubbish(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        if pin_memory:
            tensor.view(torch.uint8).fill_(RUBBISH)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", rubbish)
        patch.setattr(torch.cuda, "Stream", lambda _=None: Stream(device))
        patch.setattr(torch.cuda, "Event", lambda: Event(device))
        patch.setattr(torch.cuda, "stream", device.stream)
        yield device
