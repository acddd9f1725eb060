"""What two engines make of handoffs and leases."""

from __future__ import annotations

from random import Random
from types import SimpleNamespace

import msgspec
import pytest
import sim_engine as sim

from cluster.engine.sequence import Sequence
from cluster.wire.messages import KVHandoff, KVSource, RankProcess


@pytest.fixture
def pair() -> SimpleNamespace:
    return sim.Pair(sim.Shape(), sim.Shape(), sim.Weather(Random(0)), lease_s=20)


def prefill(pair: SimpleNamespace, request: object) -> KVHandoff:
    """Run a request through the prefill engine; return its handoff."""
    pair.prefill.submit(request)
    (output,) = pair.prefill.step()
    assert output.finish_reason == "handoff"
    return output.handoff


def take_over(pair: SimpleNamespace, name: str, n: int) -> tuple:
    """Prefill a prompt of `n` tokens; return the request as decode gets it, and its handoff."""
    request = sim.make_request(name, [ord(name[0]) % 7, *range(1, n)])
    handoff = prefill(pair, request)
    first = sim.continuation(request)[:1]
    return sim.make_request(name, request.prompt_token_ids, output=first), handoff


def begin_to_read(pair: SimpleNamespace) -> tuple:
    """Prefill `a` and let decode begin to read its KV; return what `take_over` does."""
    request, handoff = take_over(pair, "a", 9)
    pair.decode.submit(request, handoff)
    pair.decode.step()
    return request, handoff


def test_a_handoff_covers_exactly_the_computed_tokens(pair: SimpleNamespace) -> None:
    handoff = prefill(pair, sim.make_request("r", list(range(9))))
    assert handoff.num_tokens == 9
    assert len(handoff.block_ids) == len(handoff.generations) == 3
    assert pair.prefill.scheduler.running == [] and pair.prefill.scheduler.stats().num_handoffs == 1
    assert pair.prefill.blocks.num_free_blocks == 13


def test_a_sequence_that_ends_with_its_first_token_holds_no_handoff(pair: SimpleNamespace) -> None:
    pair.prefill.submit(sim.make_request("r", [1, 2, 3], max_tokens=1))
    (output,) = pair.prefill.step()
    assert (output.finish_reason, output.handoff) == ("length", None)
    assert pair.holder.num_held == 0 and not pair.prefill.scheduler.has_unfinished


def test_blocks_found_on_the_decode_side_are_not_read_again(pair: SimpleNamespace) -> None:
    for num_read in (3, 5):  # the second sequence shares two of its five blocks
        pair.now += 1
        name = f"a{num_read}"
        request, handoff = take_over(pair, name, num_read * 4 - 1)
        pair.decode.submit(request, handoff)
        outputs = pair.run()
        assert [t for o in outputs for t in o.token_ids] == sim.continuation(request)[1:]
        assert (outputs[0].token_ids, outputs[0].position) == ([], 1), "its KV was read"
    assert pair.holder.num_blocks_sent == 3 + 3
    assert pair.decode.scheduler.stats().prompt_tokens_computed == 0


def test_a_read_that_needs_no_block_still_releases_its_handoff(pair: SimpleNamespace) -> None:
    for i in range(2):
        request, handoff = take_over(pair, f"a{i}", 8)
        pair.decode.submit(request, handoff)
        pair.run()
    assert pair.holder.num_blocks_sent == 2
    assert pair.holder.num_held == 0


def test_a_lost_read_discards_its_blocks_and_says_so(pair: SimpleNamespace) -> None:
    request, _ = begin_to_read(pair)
    pair.now += 100
    outputs = [output for _ in range(6) for output in pair.tick()]
    assert [(o.finish_reason, o.error) for o in outputs] == [("kv_lost", "handoff: lost")]
    assert pair.decode.blocks.match(Sequence(request, max_model_len=40)) == []
    assert pair.decode.blocks.num_free_blocks == 16


def test_an_aborted_read_keeps_its_blocks_until_it_writes_no_more(pair: SimpleNamespace) -> None:
    begin_to_read(pair)
    pair.decode.scheduler.abort(["a"])
    (output,) = pair.decode.step()
    assert output.finish_reason == "abort"
    assert pair.decode.blocks.num_free_blocks == 13
    pair.reader.tick(pair.now)
    pair.decode.step()
    assert pair.decode.blocks.num_free_blocks == 16
    assert not pair.decode.scheduler.has_unfinished and pair.holder.num_held == 0


def test_a_new_request_may_take_the_id_of_an_aborted_read(pair: SimpleNamespace) -> None:
    request, handoff = begin_to_read(pair)
    pair.decode.scheduler.abort(["a"])
    pair.decode.submit(request, handoff)  # the reader could not tell its reads apart
    pair.decode.submit(request)
    pair.decode.scheduler.abort(["a"])
    outputs = pair.decode.step()
    assert [o.finish_reason for o in outputs] == ["abort", "error", "abort"]
    pair.run()


@pytest.mark.parametrize("is_ahead", [False, True], ids=["before the read", "ahead of the request"])
def test_an_abort_before_the_read_releases_the_handoff(
    pair: SimpleNamespace, is_ahead: bool
) -> None:
    request, handoff = take_over(pair, "a", 9)
    if is_ahead:
        pair.decode.scheduler.abort(["a"])
    pair.decode.submit(request, handoff)
    if not is_ahead:
        pair.decode.scheduler.abort(["a"])
    assert pair.holder.num_held == 0
    assert [o.finish_reason for o in pair.decode.step()] == ["abort"]


def test_an_aborted_handoff_frees_its_blocks(pair: SimpleNamespace) -> None:
    prefill(pair, sim.make_request("a", list(range(9))))
    pair.prefill.scheduler.abort(["a"])
    assert pair.prefill.step() == [], "its last output was the handoff"
    assert pair.prefill.blocks.num_free_blocks == 16
    assert not pair.prefill.scheduler.has_unfinished


def test_a_request_may_come_again_while_its_old_handoff_is_held(pair: SimpleNamespace) -> None:
    request = sim.make_request("a", list(range(9)))
    first, second = prefill(pair, request), prefill(pair, request)
    assert first.handoff_id != second.handoff_id
    assert pair.holder.num_held == 2


def test_a_read_waits_rather_than_take_the_blocks_that_others_grow_into() -> None:
    shape = sim.Shape(num_blocks=6, caching=False)
    pair = sim.Pair(sim.Shape(), shape, sim.Weather(Random(0)), lease_s=20)
    for name, n in (("a", 7), ("b", 15)):
        request, handoff = take_over(pair, name, n)
        pair.decode.submit(request, handoff)
        pair.tick()
    pair.run()
    assert pair.decode.scheduler.stats().num_preemptions == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"kv_hash": "other"}, "handoff.kv_hash: wanted 'kv', found 'other'"),
        ({"block_bytes": 65}, "handoff.block_bytes: wanted 64, found 65"),
        ({"num_tokens": 8}, "handoff.num_tokens: wanted 9, found 8"),
        ({"block_ids": [1]}, "handoff.block_ids: wanted 3, found 1"),
        ({"generations": [1]}, "handoff.generations: wanted 3, found 1"),
        (
            {"sources": [KVSource(0, "boot", 1, -1, "", RankProcess(1, ""))]},
            "handoff.sources: wanted an address of each, found one without",
        ),
    ],
)
def test_a_handoff_that_does_not_fit_is_refused_by_name(
    pair: SimpleNamespace, change: dict[str, object], error: str
) -> None:
    request, handoff = take_over(pair, "a", 9)
    pair.decode.submit(request, msgspec.structs.replace(handoff, **change))
    assert [(o.finish_reason, o.error) for o in pair.decode.step()] == [("error", error)]


def test_a_handoff_on_an_engine_without_reader_is_refused(pair: SimpleNamespace) -> None:
    request, handoff = take_over(pair, "a", 9)
    engine = sim.FakeEngine(sim.Shape())
    engine.submit(request, handoff)
    (output,) = engine.step()
    assert output.error.startswith("handoff: wanted none")


def test_reads_wait_their_turn_behind_an_older_large_one(pair: SimpleNamespace) -> None:
    small, large = sim.Shape(num_blocks=6, max_num_seqs=4), sim.Shape(num_blocks=40)
    pair = sim.Pair(large, small, sim.Weather(Random(0)), lease_s=500)
    names = ["p", "big", *(f"s{i}" for i in range(20))]
    for name in names:
        request, handoff = take_over(pair, name, 17 if name == "big" else 5)
        pair.decode.submit(request, handoff)
    ends = [output.request_id for output in pair.run() if output.finish_reason]
    assert ends[:2] == ["p", "big"], "small ones did not slip past the large one"
