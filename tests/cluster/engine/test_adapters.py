"""Which adapter is in which slot, and for how long sequences keep it there (S10)."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest
import sim_engine as sim
from hypothesis import given
from hypothesis import strategies as st

from cluster.engine.adapters import AdapterSlots
from cluster.wire.group_messages import AdapterLoaded, LoadAdapter
from cluster.wire.messages import FIRST_LOADED_ID, FrameError, LoraAdapter

NUM_STATIC, NUM_SLOTS, NUM_RANKS = 1, 3, 2
IDS = range(FIRST_LOADED_ID, FIRST_LOADED_ID + 5)


def adapter_of(lora: int) -> LoraAdapter:
    return LoraAdapter(lora, f"name {lora}", f"/adapters/{lora}", b"f")


def load(slots: AdapterSlots, error: str = "") -> LoadAdapter:
    """Let all ranks read what is next, the last one with this error; return the order."""
    order = slots.start_next()
    assert order is not None
    for rank in range(NUM_RANKS):
        slots.on_loaded(rank, AdapterLoaded(order.adapter.id, error * (rank == NUM_RANKS - 1)))
    return order


class Model:
    """What happened to an engine's slots, and its sequences."""

    def __init__(self) -> None:
        self.slots = AdapterSlots(NUM_STATIC, NUM_SLOTS, NUM_RANKS)
        self.wanted: set[int] = set()
        self.sequences: list[tuple[int, int]] = []
        """Of each its adapter and the place that it got."""
        self.order: LoadAdapter | None = None
        self.missing: list[int] = []
        self.has_failed = False
        self.failed: set[int] = set()
        """Since they were wanted last."""

    def want(self, data: Any) -> None:
        self.wanted = data.draw(st.sets(st.sampled_from(IDS)))
        self.slots.want(map(adapter_of, sorted(self.wanted)))
        self.failed &= self.wanted

    def start(self, data: Any) -> None:
        order = self.slots.start_next()
        if order is None:
            return
        assert self.order is None, "one is read at a time"
        assert order.adapter.id in self.wanted - self.failed and order.slot >= NUM_STATIC
        self.order, self.missing, self.has_failed = order, list(range(NUM_RANKS)), False

    def report(self, data: Any) -> None:
        if self.order is None:
            return
        rank = self.missing.pop(data.draw(st.integers(0, len(self.missing) - 1)))
        lora = self.order.adapter.id
        has_failed = data.draw(st.booleans())
        self.has_failed |= has_failed
        end = self.slots.on_loaded(rank, AdapterLoaded(lora, "no" * has_failed))
        assert (end is None) == bool(self.missing)
        if not self.missing:
            assert end is not None and bool(end[1]) == self.has_failed
            self.failed |= {lora} & self.wanted if self.has_failed else set()
            self.order = None

    def add(self, data: Any) -> None:
        lora = data.draw(st.sampled_from([0, NUM_STATIC, *IDS]))
        place = self.slots.place(lora)
        assert place is not None or lora > NUM_STATIC
        if place is not None:
            self.sequences.append((lora, place))

    def end(self, data: Any) -> None:
        if self.sequences:
            self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))

    def free(self, data: Any) -> None:
        used = {lora for lora, _ in self.sequences}
        freed = {adapter.id for adapter in self.slots.free_unused(used.__contains__)}
        assert not freed & (used | self.wanted)
        assert self.slots.loaded_ids <= used | self.wanted

    def check(self) -> None:
        slots = self.slots
        assert slots.errors.keys() == self.failed and not slots.loaded_ids & self.failed
        for lora, place in self.sequences:
            assert slots.place(lora) == place, "a sequence's slot has changed"
        taken = Counter(place for lora in IDS if (place := slots.place(lora)) is not None)
        if self.order is not None:
            assert slots.place(self.order.adapter.id) is None, "not every rank has it"
            taken[self.order.slot + 1] += 1
        assert set(taken.values()) <= {1}, "two have one slot"
        assert all(NUM_STATIC < place <= NUM_SLOTS for place in taken)
        assert slots.place(NUM_STATIC) == NUM_STATIC

    def settle(self) -> None:
        """All sequences end and all reads end well: what is wanted is loaded, as slots last."""
        self.sequences.clear()
        while self.order is not None or not self.slots.is_settled:
            if self.order is not None:
                for rank in self.missing:
                    self.slots.on_loaded(rank, AdapterLoaded(self.order.adapter.id, ""))
                if self.has_failed:
                    self.failed |= {self.order.adapter.id} & self.wanted
                self.order = None
            self.free(None)
            self.start(None)
        wanted = self.wanted - self.failed
        assert self.slots.loaded_ids <= wanted
        assert len(self.slots.loaded_ids) == min(len(wanted), NUM_SLOTS - NUM_STATIC)


@pytest.mark.feature("S10")
@given(data=st.data())
def test_a_slot_is_one_adapters_for_as_long_as_a_sequence_has_it(data: Any) -> None:
    model = Model()
    steps = (model.want, model.start, model.report, model.add, model.end, model.free)
    for step in data.draw(st.lists(st.sampled_from(steps), max_size=60)):
        step(data)
        model.check()
    model.settle()
    model.check()


def test_an_error_stands_and_is_not_retried_until_the_adapter_is_wanted_anew() -> None:
    slots = AdapterSlots(0, 1, NUM_RANKS)
    first, second = map(adapter_of, IDS[:2])
    slots.want([first, second])
    assert load(slots, "no such file").adapter == first
    assert slots.errors == {first.id: "tp=1: no such file"}
    assert load(slots).adapter == second and slots.place(second.id) == 1
    slots.want([first])
    assert slots.free_unused(lambda lora: False) == [second]
    assert slots.start_next() is None and slots.is_settled and slots.errors
    slots.want([])
    assert not slots.errors
    slots.want([first])
    assert not slots.is_settled and load(slots).adapter == first
    assert (slots.place(first.id), slots.place(second.id)) == (1, None)


def test_what_was_not_asked_for_is_refused_by_name() -> None:
    slots = AdapterSlots(0, 2, NUM_RANKS)
    slots.want(map(adapter_of, IDS[:2]))
    for lora in IDS[:2]:
        with pytest.raises(FrameError, match=f"wanted one that is being read, found {lora}"):
            slots.on_loaded(1, AdapterLoaded(lora, ""))
    assert slots.start_next() is not None
    slots.on_loaded(1, AdapterLoaded(IDS[0], ""))
    for rank, lora in ((1, IDS[0]), (0, IDS[1])):
        with pytest.raises(FrameError, match=f"found {lora}"):
            slots.on_loaded(rank, AdapterLoaded(lora, ""))


# --- of sequences ---------------------------------------------------------------------------------


def request_of(name: str, n: int, **fields: Any) -> Any:
    """Return a request that has the adapter of id 1, with which fake engines start."""
    return msgspec.structs.replace(sim.make_request(name, list(range(n)), **fields), adapter_id=1)


@pytest.mark.feature("S10")
def test_an_adapter_that_is_not_loaded_here_is_refused_by_its_id() -> None:
    engine = sim.FakeEngine(sim.Shape())
    request = msgspec.structs.replace(request_of("r", 3), adapter_id=FIRST_LOADED_ID)
    engine.submit(request)
    [output] = engine.step()
    wanted = "the id of an adapter that is loaded here"
    assert output.error == f"adapter_id: wanted {wanted}, found {FIRST_LOADED_ID}"
    assert not engine.scheduler.uses_adapter(FIRST_LOADED_ID)


def test_a_waiting_and_a_pre_empted_sequence_have_their_adapter() -> None:
    engine = sim.FakeEngine(sim.Shape(num_blocks=6, max_num_seqs=2, caching=False))
    for name in "abc":
        engine.submit(request_of(name, 6))
    scheduler = engine.scheduler
    while scheduler.stats().num_running + scheduler.stats().num_waiting:
        assert scheduler.uses_adapter(1)
        engine.step()
    assert scheduler.stats().num_preemptions and not scheduler.uses_adapter(1)


@pytest.mark.feature("S10")
def test_a_step_in_flight_keeps_the_adapter_of_a_sequence_that_has_ended() -> None:
    engine = sim.FakeEngine(sim.Shape(), is_overlapped=True)
    engine.submit(request_of("r", 3))
    engine.step()
    engine.step()
    assert engine.in_flight is not None
    engine.scheduler.abort(["r"])
    assert engine.scheduler.stats().num_running == 0
    assert engine.scheduler.uses_adapter(1)
    engine.step()
    assert engine.in_flight is None and not engine.scheduler.uses_adapter(1)


def test_a_sequence_that_is_handed_over_has_its_adapter_on_both_sides() -> None:
    pair = sim.Pair(sim.Shape(), sim.Shape(), sim.Weather(Random(0)), lease_s=20)
    prefill, decode = pair.prefill.scheduler, pair.decode.scheduler
    request = request_of("r", 9)
    pair.prefill.submit(request)
    [output] = pair.prefill.step()
    assert output.finish_reason == "handoff" and prefill.uses_adapter(1)
    going_on = sim.make_request("r", request.prompt_token_ids, output=output.token_ids)
    pair.decode.submit(msgspec.structs.replace(going_on, adapter_id=1), output.handoff)
    assert decode.uses_adapter(1)
    pair.decode.step()
    assert decode.stats().num_waiting_for_kv == 1 and decode.uses_adapter(1)
    pair.run()
    pair.prefill.step()
    assert not prefill.uses_adapter(1) and not decode.uses_adapter(1)
