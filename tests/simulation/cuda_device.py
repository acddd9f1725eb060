"""The order of a CUDA device's work on a CPU: streams, events, graphs and memory.

A stream is a queue of work. What is put into it runs when an event, a synchronisation or a read by
the host needs it (`late`), at random legal moments (`random`), or at once (`eager`). So a host
array that is filled again too early, a result that is read before its event, and memory of a pool
that a later graph has taken, give wrong numbers here, or an error. `cuda_torch.py` puts in what
torch is asked for.

Memory that nothing has written holds `RUBBISH`. Nothing is said of kernels, of time, or of how
large memory is: `FREE_BYTES` never runs out.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.multiprocessing.reductions import StorageWeakRef

Order = Literal["late", "random", "eager"]
Work = Callable[[], object]
RUBBISH = 0x7B
RUN_SHARES = (0.3, 0.03, 0.003)
"""How often a stream runs a part of its queue by itself, in random order. The seed chooses one: the
last lets the device lag behind by steps."""
FREE_BYTES, TOTAL_BYTES = 2**34, 2**36
EVENT_WAITS, STREAM_WAITS, DEVICE_WAITS = "event waits", "stream waits", "device waits"
HIDDEN_READS = "hidden reads"
"""Times that the host waited for the device to learn a value or to copy."""
PINNED, PAGEABLE, TO_HOST = "pinned copies", "pageable copies", "copies to the host"
REPLAYS, CAPTURES, REUSED = "replays", "captures", "blocks taken again"


class NotSimulated(RuntimeError):
    """The code under test asked for what this device does not model; the message names it."""


class CaptureInvalid(RuntimeError):
    """A capture met what CUDA forbids in one."""


class Event:
    """A point in a stream, once it is recorded."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._stream: Stream | None = None
        self._end = 0
        self._captured: tuple[Graph, frozenset[int]] | None = None

    def record(self, stream: Stream | None = None) -> None:
        """Mark the end of what the stream holds now, or of what a capture has taken from it."""
        self._stream = stream or self._device.current
        self._end = self._stream.num_put
        capture = self._device.capture
        self._captured = None if capture is None else (capture, capture.end_of(self._stream))

    def reach(self) -> None:
        if self._stream is not None:
            self._stream.run_to(self._end)

    def query(self) -> bool:
        self._device.let_run()
        return self._stream is None or self._stream.num_run >= self._end

    def synchronize(self) -> None:
        self._device.wait(EVENT_WAITS)
        self.reach()

    def wait(self, stream: Stream | None = None) -> None:
        """Run nothing that the stream is given from now on before the mark is reached. What is
        recorded later is another mark."""
        stream = stream or self._device.current
        if (capture := self._device.capture) is not None:
            if self._captured is None or self._captured[0] is not capture:
                raise CaptureInvalid("a wait for an event that was recorded outside of the capture")
            capture.follow(stream, self._captured[1])
        elif self._stream is not None:
            stream.put(partial(self._stream.run_to, self._end))


class Stream:
    """Work in order. Invariant: `num_run` of the `num_put` pieces have run, the first ones."""

    device = torch.device("cuda", 0)

    def __init__(self, simulated: CudaDevice) -> None:
        self._simulated = simulated
        self._queue: deque[Work] = deque()
        self.num_put = self.num_run = 0
        simulated.streams.append(self)

    def put(self, work: Work) -> None:
        self._queue.append(work)
        self.num_put += 1
        self._simulated.let_run()

    def run_to(self, end: int) -> None:
        while self.num_run < end:
            self.num_run += 1
            self._queue.popleft()()

    def query(self) -> bool:
        self._simulated.let_run()
        return self.num_run == self.num_put

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._simulated)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        """Run nothing that is put from now on before the event."""
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        """Run nothing that is put from now on before what the other stream holds."""
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self._simulated.wait(STREAM_WAITS)
        self.run_to(self.num_put)


@dataclass
class Block:
    """A piece of a graph pool's memory, which lives as long as the device."""

    memory: torch.Tensor
    """uint8"""
    tenant: StorageWeakRef
    """The storage that has it. Once that is gone, another takes the block on the same stream."""
    stream: Stream


class Graph:
    """A captured piece of work, on aliases of the tensors it was captured on. Work of several
    streams runs in any order that their events leave open."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._work: list[Work] = []
        self._before: list[frozenset[int]] = []
        """Of each piece of work those that it directly follows."""
        self._ends: dict[Stream, frozenset[int]] = {}
        """Of each stream that takes part what its next work follows; the first began."""
        self.pool: tuple[int, int] = (0, 0)

    def add(self, work: Work) -> None:
        stream = self._device.current
        self._before.append(self.end_of(stream))
        self._ends[stream] = frozenset([len(self._work)])
        self._work.append(work)

    def end_of(self, stream: Stream) -> frozenset[int]:
        if stream not in self._ends:
            raise CaptureInvalid("work of a stream that waits for nothing in the capture")
        return self._ends[stream]

    def follow(self, stream: Stream, before: frozenset[int]) -> None:
        """Let what a stream is given from now on follow this as well."""
        self._ends[stream] = self._ends.get(stream, frozenset()) | before

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Take up what is put into the current stream, without running it."""
        device = self._device
        if device.capture is not None:
            raise CaptureInvalid("a capture inside of a capture")
        if device.current is device.default:
            raise CaptureInvalid("a capture on the default stream")
        if pool is None:
            raise NotSimulated("a graph without a pool")
        self.pool, device.capture = pool, self
        self._ends = {device.current: frozenset()}
        device.counts[CAPTURES] += 1

    def capture_end(self) -> None:
        self._device.capture = None
        last = set(range(len(self._work))).difference(*self._before)
        if not last <= next(iter(self._ends.values())):
            raise CaptureInvalid("a stream that the one which began does not wait for")

    def replay(self) -> None:
        if self._device.capture is not None:
            raise NotSimulated("a replay inside of a capture")
        self._device.counts[REPLAYS] += 1
        for index in self._device.legal_order(self._before):
            self._device.current.put(self._work[index])


@dataclass
class Memory:
    """Which storages lie in some memory, by their addresses. That of a dead one may be reused."""

    _storages: dict[int, StorageWeakRef] = field(default_factory=dict)

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor, or one that it is an alias of, lies here."""
        found = self._storages.get(tensor.untyped_storage().data_ptr())
        return found is not None and not found.expired()


class CudaDevice:
    """Streams, and the memory that their work reads and writes."""

    def __init__(self, order: Order, seed: int = 0) -> None:
        self.reorder(order, seed)
        self.streams: list[Stream] = []
        self.counts: Counter[str] = Counter()
        self.default = self.current = Stream(self)
        self.capture: Graph | None = None
        self.memory, self.pinned = Memory(), Memory()
        self._pools: dict[tuple[int, int], list[Block]] = {}

    def reorder(self, order: Order, seed: int = 0) -> None:
        """Let work that is put in from now on run in another order."""
        self._order = order
        self._random = random.Random(seed)
        self._run_share = self._random.choice(RUN_SHARES)

    def let_run(self) -> None:
        if self._order == "late":
            return
        for stream in self.streams:
            if self._order == "eager":
                stream.run_to(stream.num_put)
            elif self._random.random() < self._run_share:
                left = stream.num_put - stream.num_run
                stream.run_to(stream.num_run + self._random.randint(0, left))

    def legal_order(self, before: Sequence[frozenset[int]]) -> Iterator[int]:
        """Yield each piece of work behind those that it follows; by `late` the last ones first."""
        followers: list[list[int]] = [[] for _ in before]
        for index, each in enumerate(before):
            for other in each:
                followers[other].append(index)
        missing = [len(each) for each in before]
        ready = [index for index, each in enumerate(before) if not each]
        while ready:
            chosen = {"eager": min, "late": max, "random": self._random.choice}[self._order](ready)
            ready.remove(chosen)
            yield chosen
            for index in followers[chosen]:
                missing[index] -= 1
                if not missing[index]:
                    ready.append(index)

    def wait(self, what: str) -> None:
        """Count a wait of the host. In a capture nothing runs that could be waited for."""
        if self.capture is not None:
            raise CaptureInvalid(f"{what}: not permitted while a stream is capturing")
        self.counts[what] += 1

    def read(self, what: str) -> None:
        """Make the host wait for the current stream, without being asked to in so many words."""
        self.wait(f"{HIDDEN_READS}: {what}")
        self.current.run_to(self.current.num_put)

    def synchronize(self, _device: Any = None) -> None:
        self.wait(DEVICE_WAITS)
        for stream in self.streams:
            stream.run_to(stream.num_put)

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    def holds(self, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return False
        is_traced = isinstance(value, FakeTensor | FunctionalTensor)
        return not (is_traced or torch._is_functional_tensor(value)) and self.memory.holds(value)

    def allocate(self, like: torch.Tensor) -> torch.Tensor:
        """Return memory with a meta tensor's layout. A capture takes it from its pool."""
        # Empty tensors have an address too: of no use to anyone, but on this device.
        num_bytes = max(like.untyped_storage().nbytes(), 1)
        if self.capture is None:
            memory = self._unset(num_bytes)
            storage = memory.untyped_storage()
        else:
            block = self._block(self.capture.pool, num_bytes)
            storage = bare_storage(block.memory.untyped_storage())
            block.tenant = StorageWeakRef(storage)
        empty = torch.empty(0, dtype=like.dtype)
        return empty.set_(storage, like.storage_offset(), like.shape, like.stride())

    def _unset(self, num_bytes: int) -> torch.Tensor:
        return self.memory.add(torch.full((num_bytes,), RUBBISH, dtype=torch.uint8))

    def _block(self, pool: tuple[int, int], num_bytes: int) -> Block:
        """Return the first block that nothing uses and that is large enough, or a new one."""
        blocks = self._pools.setdefault(pool, [])
        for block in blocks:
            is_free = block.tenant.expired() and block.stream is self.current
            if is_free and len(block.memory) >= num_bytes:
                self.counts[REUSED] += 1
                return block
        memory = self._unset(num_bytes)
        blocks.append(Block(memory, StorageWeakRef(memory.untyped_storage()), self.current))
        return blocks[-1]

    def new_pool(self) -> tuple[int, int]:
        pool = (0, 1 + len(self._pools))
        self._pools[pool] = []
        return pool

    def snapshot(self) -> list[dict[str, Any]]:
        """Return what each pool has taken, as torch's allocator tells it."""
        return [
            {"segment_pool_id": pool, "total_size": sum(len(block.memory) for block in blocks)}
            for pool, blocks in self._pools.items()
        ]


def bare_storage(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Return a storage in the same memory that does not own it."""
    construct = torch._C._construct_storage_from_data_pointer
    return construct(storage.data_ptr(), torch.device("cpu"), storage.nbytes())


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same elements that does not own them."""
    empty = torch.empty(0, dtype=tensor.dtype)
    storage = bare_storage(tensor.untyped_storage())
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def refuse(name: str) -> NoReturn:
    """Raise that something is not modelled."""
    raise NotSimulated(name)
