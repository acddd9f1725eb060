"""Sequences that leave their engine in the middle, and go on at another one, with their KV if that
can be read there."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import msgspec
import pytest
import sim_engine as sim
from hypothesis import given, note, settings
from hypothesis import strategies as st

from cluster.config import Role
from cluster.kv.handoff import HandoffMetadata, KVHolder
from cluster.wire.messages import EngineOutput, GenerateRequest, KVSource, RankProcess


class Line:
    """Engines on one clock, of which each reads what the one before it holds. What one lets go of
    goes on at the next, and what was lost on its way begins again there. A line, because two that
    drain into each other could wait for each other's blocks; an engine that drains takes nothing.
    """

    def __init__(
        self,
        shapes: list[sim.Shape],
        weather: sim.Weather,
        lease_s: float,
        *,
        first: Role = Role.DECODE,
        is_overlapped: bool = False,
    ) -> None:
        self.now = 0.0
        self.holders = [KVHolder(lease_s, lambda: self.now) for _ in shapes]
        self.readers = [None, *(sim.FakeReader(holder, weather) for holder in self.holders[:-1])]
        source = KVSource(0, "boot", 1, -1, "tcp://p", RankProcess(1, ""))
        self.engines = [
            sim.FakeEngine(
                shape,
                Role.DECODE if i else first,
                is_overlapped,
                holder=self.holders[i],
                reader=self.readers[i],
                metadata=HandoffMetadata([source], 64, "kv", lease_s),
            )
            for i, shape in enumerate(shapes)
        ]
        for i in range(1, len(shapes)):
            self.readers[i].connect(self.engines[i - 1], self.engines[i])
        self.requests: dict[str, GenerateRequest] = {}
        self.texts: dict[str, list[int]] = {}
        self.ends: dict[str, str] = {}
        self.at: dict[str, int] = {}
        """Where each request is."""
        self.num_moves = {"handoff": 0, "moved": 0, "kv_lost": 0}

    def submit(self, request: GenerateRequest, to: int) -> None:
        name = request.request_id
        self.requests[name], self.at[name] = request, to
        self.texts[name] = list(request.output_token_ids)
        self.engines[to].submit(request)

    def leave(self, name: str, *, with_kv: bool = True) -> None:
        if self.at[name] < len(self.engines) - 1:
            self.engines[self.at[name]].scheduler.leave([name], with_kv=with_kv)

    def abort(self, name: str) -> None:
        for engine in self.engines:
            engine.scheduler.abort([name])

    def tick(self) -> None:
        for i, engine in enumerate(self.engines):
            for output in engine.step():
                self._on_output(i, output)
        for reader in self.readers[1:]:
            reader.tick(self.now)
        self.now += 1
        for holder in self.holders:
            holder.tick()

    @property
    def has_unfinished(self) -> bool:
        return any(engine.scheduler.has_unfinished for engine in self.engines)

    def _on_output(self, at: int, output: EngineOutput) -> None:
        name, reason = output.request_id, str(output.finish_reason)
        assert output.position == len(self.texts[name]), "a token is missing, or came twice"
        self.texts[name] += output.token_ids
        if reason in self.num_moves:
            self.num_moves[reason] += 1
            self.at[name] = to = at if reason == "kv_lost" else at + 1
            resumed = msgspec.structs.replace(
                self.requests[name], output_token_ids=list(self.texts[name])
            )
            self.engines[to].submit(resumed, output.handoff)
        elif reason:
            assert name not in self.ends
            self.ends[name] = reason


NUM_TRACES = 400
"""Times the factor of `--fuzz`."""


def test_every_text_survives_any_number_of_moves(fuzz: Callable[[int], settings]) -> None:
    fuzz(NUM_TRACES)(given(data=st.data())(survive_moves))()


def survive_moves(data: st.DataObject) -> None:
    trace = data.draw(sim.arrivals())
    window = data.draw(st.sampled_from(sim.WINDOWS))
    shapes = [data.draw(sim.shapes(trace, window)) for _ in range(3)]
    for i in (1, 2):  # all have blocks of one size
        num_blocks = shapes[i].num_blocks * shapes[i].block_size // shapes[0].block_size + 2
        shapes[i] = dataclasses.replace(
            shapes[i], num_blocks=num_blocks, block_size=shapes[0].block_size
        )
    weather = sim.Weather(
        rng=random.Random(data.draw(st.integers(0, 1 << 32))),
        until=data.draw(st.sampled_from([0, 30, 80])),
        p_fail=data.draw(st.sampled_from([0.0, 0.3])),
        p_no_renew=data.draw(st.sampled_from([0.0, 0.5])),
        max_delay=data.draw(st.integers(0, 3)),
    )
    line = Line(
        shapes,
        weather,
        data.draw(st.integers(2, 12)),
        first=data.draw(st.sampled_from([Role.PREFILL, Role.DECODE])),
        is_overlapped=data.draw(st.booleans()),
    )
    names = [arrival.request.request_id for arrival in trace]
    a_leave = st.tuples(st.integers(0, 40), st.sampled_from(names), st.booleans())
    leaves = data.draw(st.lists(a_leave, max_size=30))
    per_request = 2 * sim.MAX_MODEL_LEN + 12 + 6 * weather.max_delay
    max_ticks = weather.until + 60 + 3 * per_request * len(trace)
    while line.has_unfinished or line.now <= 41:
        assert line.now < max_ticks, f"unfinished after {max_ticks} ticks"
        for arrival in trace:
            if arrival.at == line.now:
                line.submit(arrival.request, data.draw(st.integers(0, 2)))
            if arrival.abort_at == line.now:
                line.abort(arrival.request.request_id)
        for at, name, with_kv in leaves:
            if at == line.now and name in line.at:
                line.leave(name, with_kv=with_kv)
        line.tick()
    note(f"{line.num_moves}")
    for arrival in trace:
        name = arrival.request.request_id
        if name in line.ends:
            sim.check_end(arrival.request, line.texts[name], line.ends[name])
        else:
            assert arrival.abort_at is not None, f"{name} never ended"
    for engine in line.engines:
        assert engine.finished == engine.submitted
        assert engine.blocks.num_free_blocks == engine.shape.num_blocks
    assert not any(holder.num_held for holder in line.holders)


def test_what_runs_leaves_with_its_kv_and_what_waits_without() -> None:
    shape = sim.Shape(max_num_seqs=1)
    line = Line([shape, shape], sim.Weather(random.Random(0)), 20)
    runs, waits = (sim.make_request(name, [3, 1, 4, 1, 5], max_tokens=8) for name in ("a", "b"))
    for request in (runs, waits):
        line.submit(request, 0)
    for _ in range(3):
        line.tick()
    for name in ("a", "b", "a"):  # once more changes nothing
        line.leave(name)
    for _ in range(100):
        line.tick()
    assert not line.has_unfinished
    assert line.num_moves == {"handoff": 1, "moved": 1, "kv_lost": 0}
    assert line.texts == {r.request_id: sim.continuation(r) for r in (runs, waits)}
    # Each prompt was computed once, and nothing of what ran twice.
    computed = [engine.scheduler.stats().prompt_tokens_computed for engine in line.engines]
    assert computed == [5, 5]


@pytest.mark.feature("X08")
@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize(("role", "end"), [(Role.DECODE, "moved"), (Role.PREFILL, "handoff")])
def test_kv_that_nobody_reads_is_not_held(role: Role, end: str, is_overlapped: bool) -> None:
    """That of a prompt is for another pool, whatever becomes of this one."""
    shape = sim.Shape(budget=4)
    line = Line(
        [shape, shape], sim.Weather(random.Random(0)), 20, first=role, is_overlapped=is_overlapped
    )
    request = sim.make_request("a", [3, 1, 4, 1, 5], max_tokens=8)
    line.submit(request, 0)
    line.tick()  # a part of its prompt
    line.leave("a", with_kv=False)
    most_held = 0
    for _ in range(100):
        line.tick()
        most_held = max(most_held, line.holders[0].num_held)
    assert not line.has_unfinished
    assert line.num_moves == {"handoff": 0, "moved": 0, "kv_lost": 0, end: 1}
    assert most_held == (end == "handoff")
    assert line.texts["a"] == sim.continuation(request)
