"""Prompts that decode leaders compute themselves. Leaders are scripted: those of the prefill pool
hand over, those of the decode pool answer."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import msgspec
import pytest
from scripted import Connections, ScriptedConnection, output_of, report_of, request_of

from cluster.group.context import LoadedAdapters
from cluster.wire.messages import FIRST_LOADED_ID, KVHandoff, Submit
from serve.event_loop import StreamBatcher
from serve.observe.request_log import line_of
from serve.pools.chooser import Routing
from serve.pools.directory import MAX_UNMEASURED, NoLeader
from serve.pools.router import Router
from serve.requests.records import IngressCounts, RequestRecord, SequenceRecord

TRANSFER_S = 0.02
TOKEN_S = {1: 0.001, 9: 1e-5}
SHORT, LONG = 20, 1000
SLOW_S = {1: 0.02, 9: 0.02}
"""Where prompts take 30 sequences more than a transfer does, however busy the machine is."""


class Application:
    """One leader a pool, which answers at once; one that reads KV after `TRANSFER_S`."""

    def __init__(self, max_on_decode: int, *pools: str, token_s: dict[int, float]) -> None:
        self.connections = Connections(
            dict.fromkeys(("prefill", "decode"), Routing.COST),
            0.05,
            self._on_submit,
            max_on_decode,
        )
        reports = [replace(report_of(pool), token_s=token_s) for pool in pools]
        self.connections.see(*reports)
        self.router = Router(self.connections.directory, "prefill", StreamBatcher())
        self.records: list[SequenceRecord] = []

    def _on_submit(self, to: ScriptedConnection, submit: Submit) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(TRANSFER_S * (submit.handoff is not None), self._answer, to, submit)

    def _answer(self, to: ScriptedConnection, submit: Submit) -> None:
        name = submit.request.request_id
        position = len(submit.request.output_token_ids)
        if to.leader.report.pool == "decode":
            return to.leader.deliver(output_of(position, [7], "length", name))
        handoff = KVHandoff(7, name, [], [], [], 2, 1, "kv", 30.0)
        output = output_of(position, [5], "handoff", name)
        to.leader.deliver(msgspec.structs.replace(output, handoff=handoff))

    async def ask(self, num_tokens: int) -> list[str]:
        """Return the pools that a request goes through, of whose prompt nothing is cached."""
        record = SequenceRecord()
        self.records.append(record)
        prompt = [len(self.records)] * num_tokens
        async with aclosing(self.router.generate(request_of("r", prompt), record)) as outputs:
            assert [output async for output in outputs][-1].finish_reason == "length"
        return [choice.engine.split("/")[0] for choice in record.engine_choices]

    def busy(self, num_running: int) -> None:
        """Let the decode leader run so many sequences of others."""
        told = replace(report_of("decode", load=(num_running, 0)), token_s=SLOW_S)
        self.connections.see(replace(report_of("prefill"), token_s=SLOW_S), told)


@pytest.mark.feature("R21")
async def test_new_prompts_run_in_the_prefill_pool_alone_unless_others_may_compute_them() -> None:
    application = Application(0, "prefill", "decode", token_s=TOKEN_S)
    for num_tokens in (SHORT, LONG) * 3:
        assert await application.ask(num_tokens) == ["prefill", "decode"]
    alone = Application(0, "decode", token_s=TOKEN_S)
    with pytest.raises(NoLeader, match="prefill pool"):
        await alone.ask(SHORT)


@pytest.mark.feature("R21")
async def test_once_a_transfer_was_measured_prompts_run_where_that_costs_less() -> None:
    application = Application(512, "prefill", "decode", token_s=SLOW_S)
    assert await application.ask(SHORT) == ["prefill", "decode"]  # it might have cost nothing
    assert await application.ask(SHORT) == ["decode"]
    application.busy(30)
    assert await application.ask(SHORT) == ["prefill", "decode"]
    application.busy(0)
    assert await application.ask(SHORT) == ["decode"]
    alone = Application(512, "decode", token_s=TOKEN_S)
    assert await alone.ask(LONG) == ["decode"]


@pytest.mark.feature("R21")
async def test_what_a_transfer_takes_is_measured_again_after_many_that_were_not_made() -> None:
    application = Application(512, "prefill", "decode", token_s=TOKEN_S)
    ways = [await application.ask(SHORT) for _ in range(MAX_UNMEASURED + 4)]
    assert ways[0] == ["prefill", "decode"] and ways.count(ways[0]) == 2


@pytest.mark.feature("R15", "R19")
async def test_a_log_line_and_a_metric_tell_why_engines_were_chosen() -> None:
    application = Application(512, "prefill", "decode", token_s=TOKEN_S)
    for _ in range(2):
        await application.ask(SHORT)
    record = RequestRecord("client-1", "/v1/completions")
    counts = IngressCounts(100)
    lines = []
    for sequence in application.records:
        record.sequences = [sequence]
        counts.on_end(record, sequence, "length")
        lines.append(line_of(record, 0.0))
    told = [(line["engines"], line["why"], line["moves"]) for line in lines]
    assert told == [
        ("prefill/r/0,decode/r/0", "only,only", 0),
        ("decode/r/0", "on_decode", 0),
    ]
    found = {key[1:]: n for key, n in counts.counts().items() if key[0] == "choices_total"}
    assert found == {("prefill", "only"): 1, ("decode", "only"): 1, ("decode", "on_decode"): 1}


@pytest.mark.feature("S10")
async def test_every_stage_of_a_request_is_where_its_adapter_is() -> None:
    """Also a prompt that a decode leader would compute in less time."""
    application = Application(1000, token_s=TOKEN_S)
    adapter_id = FIRST_LOADED_ID
    reports = [
        replace(
            report_of(pool, replica),
            token_s=TOKEN_S,
            adapters=LoadedAdapters(frozenset({adapter_id}) if replica == has_it else frozenset()),
        )
        for pool, has_it in (("prefill", "a"), ("decode", "b"))
        for replica in "ab"
    ]
    application.connections.see(*reports)

    async def engines(lora: int) -> list[str]:
        record = SequenceRecord()
        request = msgspec.structs.replace(request_of("r", [1] * SHORT), adapter_id=lora)
        async with aclosing(application.router.generate(request, record)) as outputs:
            async for _ in outputs:
                pass
        return [choice.engine for choice in record.engine_choices]

    assert await engines(adapter_id) == ["prefill/a/0", "decode/b/0"]  # which measures a transfer
    for _ in range(4):
        assert await engines(adapter_id) == ["decode/b/0"]
    bare = [replace(each, adapters=LoadedAdapters()) for each in reports[2:]]
    application.connections.see(*reports[:2], *bare)
    with pytest.raises(NoLeader, match=r"^decode pool: .* has the adapter of this one"):
        await engines(adapter_id)
    application.connections.see(*reports)
    application = Application(0, token_s=TOKEN_S)
    application.connections.see(*reports)
    for _ in range(4):
        assert await engines(adapter_id) == ["prefill/a/0", "decode/b/0"]
