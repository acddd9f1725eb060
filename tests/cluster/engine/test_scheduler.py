"""The scheduler's choices: chunked prefill (T02), pre-emption (T03), limits, aborts and errors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sim_engine as sim

from cluster.engine import scheduler as scheduler_module
from cluster.engine.scheduler import (
    MAX_EARLY_ABORTS,
    MIN_PROMPT_TOKENS,
    MIN_TOKENS_PER_DECODE,
)
from cluster.engine.sequence import SampledTokens, Sequence
from cluster.wire.messages import TokenLogprobs
from compile.config import CompilationConfig, CUDAGraphMode
from compile.resolve import StepLimits, resolve


def test_a_long_prompt_is_computed_in_chunks_beside_decodes() -> None:
    engine = sim.FakeEngine(sim.Shape(budget=8))
    short, long = (
        sim.make_request("s", [1, 2], max_tokens=9),
        sim.make_request("l", list(range(20))),
    )
    engine.submit(short)
    engine.step()
    engine.submit(long)
    for _ in range(3):
        engine.step()
    assert [plan.num_new for plan in engine.plans] == [[2], [1, 7], [1, 7], [1, 6]]
    assert [plan.output_index for plan in engine.plans] == [[0], [1, -1], [2, -1], [3, 0]]
    assert [plan.num_decodes for plan in engine.plans] == [0, 1, 1, 1]


def test_prompts_are_computed_in_chunks_that_take_no_longer_than_a_step_should() -> None:
    """Where they hold others up, and as long as they go on at all."""
    token_s = 0.001
    engine = sim.FakeEngine(
        sim.Shape(num_blocks=40, budget=40),
        max_step_s=0.036,
        tokens_within=lambda seconds: int(seconds / token_s),
    )
    engine.submit(sim.make_request("first", [1] * 36, max_tokens=4))
    engine.step()
    assert engine.plans[-1].num_new == [36], "nobody waits for it"
    engine.submit(sim.make_request("second", [2] * 38, max_tokens=2))
    engine.step()
    assert engine.plans[-1].num_new == [1, 35]
    token_s = 300.0
    engine.step()
    assert engine.plans[-1].num_new == [1, 3], "what is left is less than the least chunk"
    engine.submit(sim.make_request("third", [3] * 38, max_tokens=2))
    engine.step()
    assert engine.plans[-1].num_new == [1, 1, MIN_PROMPT_TOKENS]
    engine.run()


def test_the_more_sequences_decode_the_more_of_a_prompt_a_step_computes_at_least() -> None:
    engine = sim.FakeEngine(
        sim.Shape(num_blocks=100, budget=60, max_num_seqs=20),
        max_step_s=0.001,
        tokens_within=lambda _: 1,
    )
    for i in range(17):
        engine.submit(sim.make_request(f"stream {i}", [i], max_tokens=3))
    engine.step()
    engine.submit(sim.make_request("prompt", [2] * 38, max_tokens=2))
    engine.step()
    assert engine.plans[-1].num_new == [*[1] * 17, 17 * MIN_TOKENS_PER_DECODE]
    engine.run()


@pytest.mark.feature("T03")
def test_a_pre_empted_sequence_goes_on_before_those_that_came_after_it() -> None:
    engine = sim.FakeEngine(sim.Shape(num_blocks=6, max_num_seqs=2, caching=False))
    for i, name in enumerate("abc"):
        engine.submit(sim.make_request(name, [i] * 4, max_tokens=10))
    order: list[str] = []
    while engine.scheduler.has_unfinished:
        had = engine.scheduler.stats().num_preemptions
        outputs = engine.step()
        if engine.scheduler.stats().num_preemptions > had:
            order = []  # of outputs since b lost its blocks
        order += [output.request_id for output in outputs]
    assert engine.scheduler.stats().num_preemptions == 1
    assert 0 < order.index("b") < order.index("c")


def test_a_chunk_shrinks_to_the_free_blocks_before_anyone_is_pre_empted() -> None:
    engine = sim.FakeEngine(sim.Shape(num_blocks=6, block_size=2, max_num_seqs=2, budget=4))
    engine.submit(sim.make_request("a", list(range(9)), max_tokens=2))
    engine.step()
    engine.submit(sim.make_request("b", [90, 91, 92], max_tokens=1))
    engine.step()
    assert engine.scheduler.stats().num_preemptions == 0
    engine.run()


def test_a_request_resumed_at_its_limit_ends_at_once() -> None:
    engine = sim.FakeEngine(sim.Shape())
    engine.submit(sim.make_request("a", [1], output=[1, 2], max_tokens=2))
    (output,) = engine.step()
    assert (output.finish_reason, output.token_ids) == ("length", [])


def test_an_abort_that_overtakes_its_request_wins_once() -> None:
    engine = sim.FakeEngine(sim.Shape())
    engine.scheduler.abort(["a"])
    for _ in range(2):
        engine.submit(sim.make_request("a", [1, 2], max_tokens=1))
    assert [o.finish_reason for o in engine.step()] == ["abort", "length"]


def test_early_aborts_are_remembered_up_to_a_bound() -> None:
    engine = sim.FakeEngine(sim.Shape())
    engine.scheduler.abort([f"r{i}" for i in range(MAX_EARLY_ABORTS + 1)])
    for name in ("r0", "r1"):
        engine.submit(sim.make_request(name, [1], max_tokens=1))
    ends = {o.request_id: o.finish_reason for o in engine.step()}
    assert ends == {"r0": "length", "r1": "abort"}


def test_an_abort_while_the_step_runs_drops_its_token() -> None:
    engine = sim.FakeEngine(sim.Shape())
    for name in "ab":
        engine.submit(sim.make_request(name, [1, 2]))
    plan = engine.scheduler.schedule()
    engine.scheduler.abort(["a"])
    logprobs = [TokenLogprobs(-1.0, 1, [], []), TokenLogprobs(-2.0, 1, [], [])]
    outputs = engine.scheduler.update(plan, SampledTokens([7, 8], logprobs, [], []))
    assert [(o.request_id, o.token_ids) for o in outputs] == [("a", []), ("b", [8])]
    assert outputs[1].logprobs == logprobs[1:]
    sim.check_scheduler(engine.scheduler)


def count_matches(engine: SimpleNamespace) -> list[str]:
    """Return the list to which every look-up in the prefix cache adds its request."""
    found: list[str] = []
    match = engine.blocks.match

    def counted(seq: Sequence) -> list[int]:
        found.append(seq.request_id)
        return match(seq)

    engine.blocks.match = counted
    return found


def test_a_head_that_does_not_fit_is_looked_up_once() -> None:
    engine = sim.FakeEngine(sim.Shape(num_blocks=10, max_num_seqs=3, budget=40))
    for name in "ab":  # two blocks each, and four when they end
        engine.submit(sim.make_request(name, [ord(name)] * 7, max_tokens=9))
    engine.step()
    matches = count_matches(engine)
    engine.submit(sim.make_request("head", [3] * 30, max_tokens=2))  # eight blocks
    engine.submit(sim.make_request("tail", [4], max_tokens=2))
    for _ in range(7):
        assert "head" not in [output.request_id for output in engine.step()]
    assert matches == ["head"]
    outputs = engine.run()
    assert matches == ["head", "head", "tail"]
    assert set(outputs) == {"a", "b", "head", "tail"}


def test_a_head_is_looked_up_again_when_more_of_it_is_cached() -> None:
    """It then needs fewer blocks than it did: those of another sequence that begins alike."""
    engine = sim.FakeEngine(sim.Shape(num_blocks=9, max_num_seqs=2, budget=40))
    other = sim.make_request("a", [7] * 4, max_tokens=20)
    engine.submit(other)
    engine.step()
    matches = count_matches(engine)
    shared = [*other.prompt_token_ids, *sim.continuation(other)[:8]]
    engine.submit(sim.make_request("head", [*shared, *[3] * 22], max_tokens=1))  # nine blocks
    looked_up_at = []
    for step in range(2, 14):
        before = len(matches)
        engine.step()
        looked_up_at += [step] * (len(matches) - before)
    # The second and the third block of it are full, and cached, from these steps on.
    assert looked_up_at == [2, 6, 10]
    engine.run()


def test_many_are_aborted_in_one_pass_and_the_queue_keeps_its_order() -> None:
    engine = sim.FakeEngine(sim.Shape(max_num_seqs=1))
    names = [f"r{i}" for i in range(40)]
    for name in names:
        engine.submit(sim.make_request(name, [1], max_tokens=1))
    engine.scheduler.abort(names[::2])
    sim.check_scheduler(engine.scheduler)
    finished = [o.request_id for _ in range(30) for o in engine.step() if o.token_ids]
    assert finished == names[1::2]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error"),
    [
        ([], 1, "prompt_token_ids: wanted at least 1 token, found none"),
        (
            [1] * 40,
            1,
            "prompt_token_ids: wanted at most 39 tokens (max_model_len less one to generate), "
            "found 40",
        ),
        ([1] * 10, 4, "num_kv_blocks: wanted at least 4 for 13 tokens, found 3"),
        ([5, -1], 1, "prompt_token_ids: wanted ids from 0 up, found -1"),
    ],
)
def test_a_request_that_cannot_be_served_ends_with_what_was_wanted(
    prompt: list[int], max_tokens: int, error: str
) -> None:
    engine = sim.FakeEngine(sim.Shape(num_blocks=3))
    engine.submit(sim.make_request("a", prompt, max_tokens=max_tokens))
    (output,) = engine.step()
    assert (output.finish_reason, output.error) == ("error", error)
    assert not engine.scheduler.has_unfinished


def test_more_than_can_ever_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "MAX_UNFINISHED_TIMES", 3)
    engine = sim.FakeEngine(sim.Shape(max_num_seqs=2))
    for i in range(8):
        engine.submit(sim.make_request(f"r{i}", [1, 2], max_tokens=1))
    errors = {o.request_id: o.error for outputs in engine.run().values() for o in outputs}
    wanted = "requests: wanted at most 6 unfinished ones, found one more"
    assert [name for name, error in errors.items() if error] == ["r6", "r7"]
    assert errors["r6"] == wanted


def test_an_unfinished_id_is_refused() -> None:
    engine = sim.FakeEngine(sim.Shape())
    for _ in range(2):
        engine.submit(sim.make_request("a", [1]))
    assert engine.step()[0].error == "request_id: wanted a new one, found 'a' unfinished"


@pytest.mark.feature("C03")
@pytest.mark.parametrize(("max_num_seqs", "budget"), [(1, 1), (4, 4), (5, 16), (8, 9)])
def test_the_scheduler_fills_the_largest_captured_batch_and_none_above(
    max_num_seqs: int, budget: int
) -> None:
    shape = sim.Shape(num_blocks=64, max_num_seqs=max_num_seqs, budget=budget, caching=False)
    engine = sim.FakeEngine(shape)
    for i in range(12):
        engine.submit(sim.make_request(str(i), [i], max_tokens=16))
    engine.run()
    decodes = {len(plan.rows) for plan in engine.plans if plan.num_decodes == len(plan.rows)}
    asked = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL, cudagraph_capture_sizes=tuple(range(1, 17))
    )
    captured = resolve(asked, StepLimits(max_num_seqs, budget)).graph_bs
    assert max(decodes) == max(captured)


@pytest.mark.feature("P08")
def test_queued_tokens_are_those_that_no_step_has_computed_or_plans() -> None:
    engine = sim.FakeEngine(sim.Shape(budget=8, max_num_seqs=2))
    queued = []
    for name in "ab":
        engine.submit(sim.make_request(name, [ord(name)] * 12, max_tokens=3))
    while engine.scheduler.has_unfinished:
        queued.append(engine.scheduler.stats().num_queued_tokens)
        engine.step()
    # Eight of the first; its rest and four of the second; and that one's rest beside a decode.
    assert queued[:4] == [24, 16, 8, 0] and not any(queued[3:]), queued
