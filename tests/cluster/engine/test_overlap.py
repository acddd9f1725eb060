"""The overlapped loop: a device that never waits for the host, and never runs what it must not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import sim_engine as sim
from local_ranks import run, tokens_of

from cluster.config import Role
from cluster.engine.compile_switch import CompileSwitch
from cluster.engine.engine import Engine, OverlappedEngine
from cluster.engine.lockstep import AloneLockstep
from cluster.engine.sequence import SampledTokens
from cluster.kv.handoff import HandoffMetadata, KVHolder
from cluster.wire.messages import PENDING, StepAgreement, StepPlan, Submit, Vote


class Device:
    """Runs steps one after the other on a clock of its own: the host's time when it is free."""

    def __init__(self, model: Any, host_s: float, device_s: float) -> None:
        self._model = model
        self._host_s, self._device_s = host_s, device_s
        self.now = 0.0
        """Of the host."""
        self.free_at = 0.0
        self.idle_s: list[float] = []
        """Between two steps."""
        self.plans: list[StepPlan] = []
        self.switch = CompileSwitch()

    def launch(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None]
    ) -> tuple[float, Callable[[], list[int]]]:
        confirm()
        self.now += self._host_s  # to plan the step and to build its inputs
        if self.plans:
            self.idle_s.append(max(self.now - self.free_at, 0.0))
        self.plans.append(plan)
        self.free_at = max(self.now, self.free_at) + self._device_s
        return self.free_at, self._model.launch(plan)

    def wait(self, launched: tuple[float, Callable[[], list[int]]]) -> SampledTokens:
        ends_at, run = launched
        self.now = max(self.now, ends_at)
        return SampledTokens(run(), [], [], [])

    def execute(
        self, plan: StepPlan, agreed: StepAgreement, confirm: Callable[[], None]
    ) -> SampledTokens:
        return self.wait(self.launch(plan, agreed, confirm))


def engine_on(
    loop: type[Engine],
    host_s: float = 0.001,
    device_s: float = 0.002,
    lockstep: Any = None,
    **arguments: Any,
) -> tuple[Engine, Device]:
    """Return an engine over a fake rank with its device."""
    fake = sim.FakeEngine(sim.Shape(num_blocks=40), **arguments)
    device = Device(fake.model, host_s, device_s)
    return loop(fake.scheduler, lockstep or AloneLockstep(), None, device), device


@pytest.mark.feature("T04")
def test_a_device_is_never_idle_between_steps_while_its_host_is_faster() -> None:
    requests = [sim.make_request(name, [i, 3, 5], max_tokens=20) for i, name in enumerate("abcd")]
    texts, devices = {}, {}
    for loop in (Engine, OverlappedEngine):
        engine, devices[loop] = engine_on(loop)
        outputs = run(engine, requests)
        texts[loop] = {name: tokens_of(each) for name, each in outputs.items()}
    plain, overlapped = devices[Engine], devices[OverlappedEngine]
    assert texts[Engine] == texts[OverlappedEngine]
    assert len(plain.plans) == len(overlapped.plans) == 20
    assert overlapped.idle_s == [0.0] * 19
    assert plain.idle_s == pytest.approx([0.001] * 19)
    assert overlapped.now == pytest.approx(0.001 + 20 * 0.002)


def test_a_host_that_is_slower_than_its_device_never_waits_for_it() -> None:
    engine, device = engine_on(OverlappedEngine, host_s=0.003, device_s=0.002)
    run(engine, [sim.make_request("a", [1, 2], max_tokens=10)])
    assert device.idle_s == pytest.approx([0.001] * 9)
    assert device.now == pytest.approx(10 * 0.003 + 0.002)


def test_what_ends_with_its_first_token_is_waited_for() -> None:
    """On a prefill engine, and at a limit: nothing is computed behind the last token."""
    source: Any = []
    holder = KVHolder(30.0, lambda: 0.0)
    metadata = HandoffMetadata(source, 64, "kv", 30.0)
    roles: list[dict[str, Any]] = [
        {},
        {"role": Role.PREFILL, "holder": holder, "metadata": metadata},
    ]
    for arguments, max_tokens in zip(roles, (1, 9), strict=True):
        engine, device = engine_on(OverlappedEngine, **arguments)
        engine.submit(Submit(sim.make_request("a", [1, 2, 3], max_tokens=max_tokens), None))
        assert engine.step() == []
        [output] = engine.step()
        assert output.finish_reason == ("handoff" if arguments else "length")
        assert [plan.num_new for plan in device.plans] == [[3]]
        assert engine.step() == [] and engine.is_idle


def test_others_run_while_a_prompt_ends_with_its_first_token() -> None:
    engine, device = engine_on(OverlappedEngine)
    engine.submit(Submit(sim.make_request("a", [1, 2, 3], max_tokens=1), None))
    engine.step()
    engine.submit(Submit(sim.make_request("b", [4, 5], max_tokens=3), None))
    [output] = engine.step()
    assert (output.request_id, output.finish_reason) == ("a", "length")
    while engine.has_unfinished:
        engine.step()
    assert [plan.token_ids for plan in device.plans] == [[1, 2, 3], [4, 5], [PENDING], [PENDING]]


class Draining:
    """Other leaders that agree to end in a step."""

    def __init__(self, last_step: int) -> None:
        self._alone = AloneLockstep()
        self._last_step = last_step

    def agree(self, vote: Vote) -> StepAgreement:
        is_last = vote.step == self._last_step
        return self._alone.agree(msgspec.structs.replace(vote, draining=is_last))

    def wait_for_peers(self) -> None:
        """All are of one mind."""


def test_tokens_of_the_step_in_flight_leave_before_the_group_ends() -> None:
    engine, device = engine_on(OverlappedEngine, lockstep=Draining(3))
    request = sim.make_request("a", [1, 2], max_tokens=9)
    engine.submit(Submit(request, None))
    outputs = [output.token_ids for _ in range(3) for output in engine.step()]
    assert engine.has_ended and len(device.plans) == 2
    assert [token for each in outputs for token in each] == sim.continuation(request)[:2]
