"""Random traces against an oracle without cache, batches or pools; every step is checked.

`FakeEngine.step` asserts the invariants of a step, so a trace only has to run to its end. A failure
prints the trace and a blob that replays it.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from types import SimpleNamespace

import sim_engine as sim
from hypothesis import given, note, settings
from hypothesis import strategies as st

NUM_TRACES = 400
"""Of a test of texts, times the factor of `--fuzz`."""
Fuzz = Callable[[int], settings]


def run_mixed(
    trace: list,
    shape: object,
    *,
    forgets: bool = False,
    is_overlapped: bool = False,
    num_drafts: int = 0,
) -> SimpleNamespace:
    """Run a trace on one engine. One that forgets looks up the head of its queue in every step."""
    drafter = sim.drafter(num_drafts) if num_drafts else None
    engine = sim.FakeEngine(shape, is_overlapped=is_overlapped, drafter=drafter)
    if forgets:
        engine.scheduler._is_worth_a_try = lambda seq, batch: True
    texts = {a.request.request_id: list(a.request.output_token_ids) for a in trace}
    ends: dict[str, object] = {}
    # The first running sequence is never pre-empted and gains a token in every step.
    num_tokens = sum(sim.longest_len(a.request) for a in trace)
    # A step that cannot be planned ahead takes two calls.
    max_steps = 2 + max(a.at for a in trace) + num_tokens * (2 if is_overlapped else 1)
    now = 0
    while engine.scheduler.has_unfinished or now <= 41:
        engine.scheduler.abort([a.request.request_id for a in trace if a.abort_at == now])
        for arrival in trace:
            if arrival.at == now:
                engine.submit(arrival.request)
        for output in engine.step():
            texts[output.request_id] += output.token_ids
            if output.finish_reason:
                ends[output.request_id] = output
        now += 1
        assert now <= max(max_steps, 42), f"unfinished after {max_steps} steps"
    return SimpleNamespace(engine=engine, texts=texts, ends=ends)


def test_every_text_is_the_oracles_whatever_the_pool(fuzz: Fuzz) -> None:
    fuzz(NUM_TRACES)(given(data=st.data())(run_through_a_pool))()


def run_through_a_pool(data: st.DataObject) -> None:
    trace = data.draw(sim.arrivals())
    shape = data.draw(sim.shapes(trace, data.draw(st.sampled_from(sim.WINDOWS))))
    is_overlapped = data.draw(st.booleans())
    num_drafts = 0 if is_overlapped else data.draw(st.integers(0, 9))
    result = run_mixed(trace, shape, is_overlapped=is_overlapped, num_drafts=num_drafts)
    for arrival in trace:
        request_id = arrival.request.request_id
        end = result.ends[request_id]
        sim.check_end(arrival.request, result.texts[request_id], end.finish_reason)
        assert 0 <= end.num_cached_tokens <= shape.caching * len(arrival.request.prompt_token_ids)
    assert result.engine.finished == result.engine.submitted
    assert result.engine.blocks.num_free_blocks == shape.num_blocks


def test_every_text_survives_prefill_handoff_and_loss(fuzz: Fuzz) -> None:
    fuzz(NUM_TRACES)(given(data=st.data())(survive_handoff_and_loss))()


def survive_handoff_and_loss(data: st.DataObject) -> None:
    trace = data.draw(sim.arrivals())
    window = data.draw(st.sampled_from(sim.WINDOWS))
    prefill, decode = (data.draw(sim.shapes(trace, window)) for _ in range(2))
    decode = sim.Shape(
        decode.num_blocks * decode.block_size // prefill.block_size + 2,
        prefill.block_size,
        decode.max_num_seqs,
        decode.budget,
        decode.caching,
        window,
    )
    weather = sim.Weather(
        rng=random.Random(data.draw(st.integers(0, 1 << 32))),
        until=data.draw(st.sampled_from([0, 30, 80])),
        p_fail=data.draw(st.sampled_from([0.0, 0.3, 0.9])),
        p_no_renew=data.draw(st.sampled_from([0.0, 0.5, 0.9])),
        max_delay=data.draw(st.integers(0, 6)),
    )
    lease_s, is_overlapped = data.draw(st.integers(2, 12)), data.draw(st.booleans())
    num_drafts = 0 if is_overlapped else data.draw(st.integers(0, 5))
    drafter = sim.drafter(num_drafts) if num_drafts else None
    pair = sim.Pair(prefill, decode, weather, lease_s, is_overlapped, drafter)
    router = sim.Router(pair, trace)
    # Every token, and every block that is read, may have to wait for one tick of anything else.
    per_request = 2 * sim.MAX_MODEL_LEN + 12 + 6 * weather.max_delay
    router.run(max_ticks=weather.until + 60 + 2 * per_request * len(trace))
    note(f"{router.num_lost} reads lost, {pair.reader.num_cancelled} cancelled")
    for arrival in trace:
        request_id = arrival.request.request_id
        if request_id in router.ends:
            sim.check_end(arrival.request, router.texts[request_id], router.ends[request_id])
        else:
            assert arrival.abort_at is not None, f"{request_id} never ended"
    for engine in (pair.prefill, pair.decode):
        assert engine.finished == engine.submitted
        assert engine.blocks.num_free_blocks == engine.shape.num_blocks
    assert pair.holder.num_held == 0 and not pair.reader.reads


def test_rows_are_wasted_on_ends_that_nobody_can_foresee_alone(fuzz: Fuzz) -> None:
    """A token that is drawn and dropped is one behind a stop token, or of an aborted request."""
    fuzz(200)(given(data=st.data())(waste_few_rows))()


def waste_few_rows(data: st.DataObject) -> None:
    trace = data.draw(sim.arrivals())
    shape = data.draw(sim.shapes(trace, data.draw(st.sampled_from(sim.WINDOWS))))
    result = run_mixed(trace, shape, is_overlapped=True)
    num_drawn = sum(i >= 0 for plan in result.engine.plans for i in plan.output_index)
    texts = result.texts.values()
    num_resumed = sum(len(a.request.output_token_ids) for a in trace)
    num_wasted = num_drawn - (sum(map(len, texts)) - num_resumed)
    reasons = [end.finish_reason for end in result.ends.values()]
    assert 0 <= num_wasted <= reasons.count("stop") + reasons.count("abort")
    plain = run_mixed(trace, shape)
    num_drawn = sum(i >= 0 for plan in plain.engine.plans for i in plan.output_index)
    assert num_drawn == sum(map(len, plain.texts.values())) - num_resumed


def test_what_is_remembered_of_the_head_changes_no_plan_where_nothing_is_cached(
    fuzz: Fuzz,
) -> None:
    """Blocks of a cached head that others take count as needed until they have ended."""
    fuzz(200)(given(data=st.data())(plan_alike))()


def plan_alike(data: st.DataObject) -> None:
    trace = data.draw(sim.arrivals())
    shape = data.draw(sim.shapes(trace, data.draw(st.sampled_from(sim.WINDOWS))))
    shape = dataclasses.replace(shape, caching=False)
    remembering = run_mixed(trace, shape)
    forgetting = run_mixed(trace, shape, forgets=True)
    assert remembering.engine.plans == forgetting.engine.plans
