"""Spread a piece over CUDA streams, so that what does not depend on one another runs side by side.

After TensorRT-LLM's auto multi-stream: list scheduling, the node with the longest path to the end
first, by costs that say no more than that a product takes longer than an addition. The last pass:
nobody looks at a graph behind it. All streams join at the end of the piece.
"""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx import Node

from compile.custom_op import LIBRARY
from compile.passes.graph_pass import AUTO_FUNCTIONALIZED
from compile.passes.storages import Storages, tensors
from compile.passes.stream_ops import (
    fork_streams,
    join_streams,
    record_event,
    set_stream,
    wait_event,
)

EXPERTS_COST, PRODUCT_COST, OTHER_COST = 20, 10, 1
_EXPERTS = {f"{LIBRARY}::routed_experts"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "linear", "matmul", "_scaled_mm", "_int_mm"}
_PRODUCTS |= {"packed_linear", "packed_rows", "scaled_linear"}
_PRODUCTS |= {"unified_attention_with_output", "mla_attention"}

Key = int | str
"""What only one node at a time may write into: memory, or a group of ranks by its name. Collectives
of a group begin in the same order on all ranks."""


@dataclass(frozen=True)
class Spread:
    """How a graph was spread. Costs until the last stream ends, and of all nodes in a row."""

    num_streams: int
    num_events: int
    makespan: int
    serial: int


def spread_over_streams(graph: fx.Graph, max_num_streams: int, storages: Storages) -> Spread | None:
    """Spread a graph of ATen ops, in place, over at most so many streams, and say how; None: it
    stayed as it was, because nothing in it can run beside anything else. `storages` says what
    shares memory."""
    if max_num_streams == 1:
        return None
    nodes = [node for node in graph.nodes if node.op not in ("placeholder", "get_attr", "output")]
    preds = _predecessors(nodes, storages)
    schedule = _Schedule(nodes, preds, max_num_streams)
    schedule.run()
    num_streams = len(set(schedule.stream_of.values()))
    if num_streams < 2:
        return None
    num_events = _Emitter(graph, schedule).emit()
    makespan, serial = max(schedule.end_of.values()), sum(map(cost, nodes))
    return Spread(num_streams, num_events, makespan, serial)


def cost(node: Node) -> int:
    """Return about how long a node keeps the device busy; 0 if it does not."""
    if not _launches(node):
        return 0
    name = _name(node)
    if name in _EXPERTS:
        return EXPERTS_COST
    kind = name.partition("::")[2]
    if kind.startswith(("empty", "new_empty")):
        return 0
    return PRODUCT_COST if kind in _PRODUCTS else OTHER_COST


def _name(node: Node) -> str:
    target = node.target
    return str(target._schema.name) if isinstance(target, torch._ops.OpOverload) else ""


def _launches(node: Node) -> bool:
    """Return whether a node allocates or computes on the device. Views, numbers and the parts of a
    tuple do not."""
    if node.target is operator.getitem or not _has_tensors(node):
        return False
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return True
    return bool(tensors(node)) and any(each.alias_info is None for each in target._schema.returns)


def _has_tensors(node: Node) -> bool:
    return any(tensors(each) for each in (node, *node.all_input_nodes))


# --- what comes before what -----------------------------------------------------------------------


def _predecessors(nodes: Sequence[Node], storages: Storages) -> dict[Node, set[Node]]:
    """Return of each node what must come before it: what makes its arguments, who wrote them last,
    and, if it writes, who has read them since."""
    found: dict[Node, set[Node]] = {}
    writer: dict[Key, Node] = {}
    readers: dict[Key, list[Node]] = {}
    last_unknown: Node | None = None
    for node in nodes:
        before = {each for each in node.all_input_nodes if each in found}
        written = _written(node, storages)
        if written is None:
            before.update(found)
            last_unknown = node
            written = set()
        elif last_unknown is not None:
            before.add(last_unknown)
        given = map(storages.of, node.all_input_nodes)
        touched: set[Key] = {storage for storage in given if storage is not None}
        for key in touched | written:
            if key in writer:
                before.add(writer[key])
        for key in written:
            before.update(readers.pop(key, ()))
            writer[key] = node
        for key in touched - written:
            readers.setdefault(key, []).append(node)
        found[node] = before
    return found


def _written(node: Node, storages: Storages) -> set[Key] | None:
    """Return what a node writes into; None: there is no telling."""
    target = node.target
    if target is operator.getitem or target is AUTO_FUNCTIONALIZED or not _has_tensors(node):
        return set()
    if not isinstance(target, torch._ops.OpOverload):
        return None
    found: set[Key] = set()
    for argument, value in _arguments(target._schema, node):
        if argument.name == "group_name":
            found.add(value)
        elif argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, tuple | list) else (value,)
            found |= {each for each in map(storages.of, values) if each is not None}
    return found


def _arguments(schema: Any, node: Node) -> Iterator[tuple[Any, Any]]:
    for index, argument in enumerate(schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


# --- which stream ---------------------------------------------------------------------------------


class _Schedule:
    def __init__(
        self, nodes: Sequence[Node], preds: dict[Node, set[Node]], max_num_streams: int
    ) -> None:
        self.nodes = nodes
        self.preds = preds
        self.order: list[Node] = []
        """The nodes as they are given to their streams."""
        self.stream_of: dict[Node, int] = {}
        self.end_of: dict[Node, int] = {}
        self._free = [0] * max_num_streams
        """When each stream has done what it was given."""

    def run(self) -> None:
        """Give each node to a stream."""
        index = {node: i for i, node in enumerate(self.nodes)}
        users: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node, before in self.preds.items():
            for pred in before:
                users[pred].append(node)
        distance: dict[Node, int] = {}
        for node in reversed(self.nodes):
            distance[node] = max((cost(user) + distance[user] for user in users[node]), default=0)
        missing = {node: len(before) for node, before in self.preds.items()}
        ready = [(-distance[node], index[node]) for node in self.nodes if not missing[node]]
        heapq.heapify(ready)
        while ready:
            node = self.nodes[heapq.heappop(ready)[1]]
            self._place(node)
            for user in users[node]:
                missing[user] -= 1
                if not missing[user]:
                    heapq.heappush(ready, (-distance[user], index[user]))

    def _place(self, node: Node) -> None:
        start = max((self.end_of[pred] for pred in self.preds[node]), default=0)
        if _launches(node):
            stream = self._first_free(start, {self.stream_of[pred] for pred in self.preds[node]})
        else:
            makers = (self.stream_of[each] for each in node.all_input_nodes if each in self.preds)
            stream = next(makers, 0)
        if takes := cost(node):
            start = max(start, self._free[stream])
            self._free[stream] = start + takes
        self.stream_of[node] = stream
        self.end_of[node] = start + takes
        self.order.append(node)

    def _first_free(self, start: int, before: set[int]) -> int:
        """Return an idle stream, if possible of those that the node would otherwise wait for."""
        idle = [stream for stream, free in enumerate(self._free) if free <= start]
        if not idle:
            return self._free.index(min(self._free))
        return next((stream for stream in idle if stream in before), idle[0])


# --- the graph ------------------------------------------------------------------------------------


class _Emitter:
    """Puts a graph's nodes into the order in which they are launched, with what keeps streams in
    step: an event is recorded before anything waits for it."""

    def __init__(self, graph: fx.Graph, schedule: _Schedule) -> None:
        self._graph = graph
        self._schedule = schedule
        self._stream_of = schedule.stream_of
        num_streams = 1 + max(self._stream_of.values())
        self._queues: list[deque[Node]] = [deque() for _ in range(num_streams)]
        for node in schedule.order:
            self._queues[self._stream_of[node]].append(node)
        [self._output] = graph.find_nodes(op="output")
        self._events: dict[Node, int] = {}

    def emit(self) -> int:
        """Rewrite the graph, and return how many events it has."""
        waits = self._waits()
        recorded = {pred for preds in waits.values() for pred in preds}
        held: dict[Node, None] = {}
        current = 0
        done: set[Node] = set()
        self._call(fork_streams, len(self._queues))
        while any(self._queues):
            for stream, queue in enumerate(self._queues):
                while queue and self._schedule.preds[queue[0]] <= done:
                    node = queue.popleft()
                    if stream != current:
                        self._call(set_stream, stream)
                        current = stream
                    for pred in waits.get(node, ()):
                        self._call(wait_event, self._events[pred])
                    self._output.prepend(node)
                    done.add(node)
                    if node in recorded:
                        self._events[node] = len(self._events)
                        self._call(record_event, self._events[node])
                    held |= dict.fromkeys(self._crossing(node))
        self._call(join_streams, *held)
        return len(self._events)

    def _call(self, function: Any, *args: Any) -> None:
        with self._graph.inserting_before(self._output):
            self._graph.call_function(function, args)

    def _crossing(self, node: Node) -> Iterator[Node]:
        """Return what a node uses of other streams' memory. What the graph is given is stream 0's,
        and who calls it holds that until the end, as a result of it later."""
        for each in node.all_input_nodes:
            if tensors(each) and self._stream_of.get(each, 0) != self._stream_of[node]:
                yield each

    def _waits(self) -> dict[Node, list[Node]]:
        """Return of each node what it waits for on other streams: of each only the last, and
        nothing that its stream has waited for before."""
        position = {node: i for queue in self._queues for i, node in enumerate(queue)}
        found: dict[Node, list[Node]] = {}
        for stream, queue in enumerate(self._queues):
            known = [-1] * len(self._queues)
            for node in queue:
                last: dict[int, Node] = {}
                for pred in self._launched_before(node):
                    other = self._stream_of[pred]
                    if other != stream and position[pred] > known[other]:
                        known[other] = position[pred]
                        last[other] = pred
                if last:
                    found[node] = list(last.values())
        return found

    def _launched_before(self, node: Node) -> Iterator[Node]:
        """Yield what a node has to wait for; in place of a view, what that has to."""
        for pred in sorted(self._schedule.preds[node], key=lambda each: each.name):
            if _launches(pred):
                yield pred
            else:
                yield from self._launched_before(pred)
