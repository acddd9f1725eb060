"""The router: a request's way through the pools.

1. The request is submitted to the leader of the prefill pool that the directory chooses, or of the
   decode pool where that may compute prompts, among those that have the request's adapter. Its
   tokens come back over the same connection.
2. A prefill engine ends with a handoff; the request goes to a leader of the decode pool with the
   handoff and with the tokens so far. An engine that drains does the same: another one of its pool
   goes on, which computes what it cannot read (`Hashes`). What leaves without KV begins again in
   the first pool.
3. If the KV or an output is lost, or a leader's connection ends, it is prefilled again, wherever
   there is one that can take it. Its tokens so far count as output, so the client sees a pause, but
   no gap and nothing twice.
4. A client that leaves ends the generator: every engine that may have some of the request is told.

A request may kill its ranks, and with them the requests beside it: `quarantine.py` finds out which.

A mixed pool is the same with one stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from itertools import count

import msgspec

from cluster.config import CacheConfig
from cluster.engine.blocks import prompt_prefixes
from cluster.engine.prefix_index import Prefix
from cluster.wire.messages import EngineOutput, FinishReason, GenerateRequest
from serve.event_loop import StreamBatcher
from serve.pools.directory import ConnectedLeader, Directory
from serve.pools.leader_load import Stage
from serve.pools.mailbox import Mailbox
from serve.pools.quarantine import CrashHistory, Quarantine
from serve.requests.records import SequenceRecord

log = logging.getLogger("lockstep.router")

HASHED_AT_ONCE = 64
"""Blocks of a prompt that are hashed in the event loop."""
MAX_PAUSE_S = 0.5
"""The longest pause between attempts; the first ones are shorter."""

GOES_ON = (FinishReason.HANDOFF, FinishReason.MOVED)
"""How an engine lets go of a request that another one goes on with."""
LOST = (
    FinishReason.KV_LOST,
    FinishReason.DIED,
    # By the engine, which took the ingress for dead; every other abort ends the generator first.
    FinishReason.ABORT,
)
"""How an attempt ends that is made again."""


class Router:
    def __init__(
        self,
        directory: Directory,
        first_pool: str,
        tick: StreamBatcher,
        quarantine: Quarantine | None = None,
        *,
        cache: CacheConfig | None = None,
    ) -> None:
        """`tick`: which tokens wait for; first_pool: prefill or mixed; cache: of all engines."""
        self._directory = directory
        self._first_pool = first_pool
        self._tick = tick
        self._quarantine = quarantine or Quarantine()
        self._cache = cache or CacheConfig()

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the request's outputs; the last one has a finish reason. Closing the iterator
        aborts the request everywhere. `record` notes its way. NoLeader: none could take it."""
        record = record or SequenceRecord()
        prefixes = await self._prefixes(request)
        outputs = list(request.output_token_ids)
        history = CrashHistory()
        for number in count():
            attempt = msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}.{number}",
                output_token_ids=list(outputs),
            )
            async with self._turn(history, request.adapter_id):
                record.on_attempt()
                async with aclosing(self._attempt(attempt, prefixes, record)) as attempt_outputs:
                    async for output in attempt_outputs:
                        output = _in_place(output, len(outputs))
                        if output.finish_reason in LOST:
                            break
                        outputs.extend(output.token_ids)
                        history.count(len(output.token_ids))
                        yield msgspec.structs.replace(output, request_id=request.request_id)
                        if output.finish_reason:
                            return
                record.on_lost(str(output.finish_reason))
                history.add(output.finish_reason, asyncio.get_running_loop().time())
            if history.is_too_long:
                ends = map(self._directory.last_end, record.attempts[-1].engines)
                error = "; ".join((f"{history}, at last: {output.error}", *filter(None, ends)))
                yield EngineOutput.ended(request.request_id, FinishReason.ERROR, error)
                return
            # Behind the pause, in which a client may turn out to have left.
            await asyncio.sleep(min(MAX_PAUSE_S, 0.05 * 2 ** min(number, 10)))
            log.warning("%s: %s; it is sent again", attempt.request_id, output.error)

    @asynccontextmanager
    async def _turn(self, history: CrashHistory, adapter_id: int) -> AsyncIterator[None]:
        """Wait until an attempt may begin. A suspect never waits for leaders while its trial lasts,
        even if they disappear while it queues for that: all suspects behind it would wait too."""
        while True:
            if history.is_suspect:
                await self._directory.wait(adapter_id)
            async with self._quarantine.attempt(history):
                if not history.is_suspect or self._directory.has_leaders(adapter_id):
                    yield
                    return

    async def _prefixes(self, request: GenerateRequest) -> list[Prefix]:
        """Hash a request's prompt, if that says where it may be cached: some microseconds a block,
        and so those of a long one beside the event loop."""
        size, num_behind = self._cache.block_size, self._cache.num_behind
        if not (self._cache.enable_prefix_caching and self._directory.knows_prefixes):
            return []
        if len(request.prompt_token_ids) <= HASHED_AT_ONCE * size:
            return prompt_prefixes(request, size, num_behind)
        return await asyncio.to_thread(prompt_prefixes, request, size, num_behind)

    async def _attempt(
        self, request: GenerateRequest, prefixes: list[Prefix], record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Run the request on one engine after another; the last output says how it ended."""
        mailbox = Mailbox(request.request_id, self._tick)
        leaders: list[ConnectedLeader] = []
        pool, handoff = self._first_pool, None
        so_far = list(request.output_token_ids)
        has_ended = False
        try:
            while True:
                request = msgspec.structs.replace(request, output_token_ids=list(so_far))
                stage = Stage(
                    request, handoff, self._cache.block_size, prefixes if handoff is None else ()
                )
                leader, why, num_cached = await self._directory.choose(pool, stage)
                record.on_choice(leader.report.engine_id, why, num_cached)
                pool = leader.report.pool
                is_first = all(each.report.pool != pool for each in leaders)
                if not leader.can_read(stage):
                    leaders[-1].abort(request.request_id)  # nobody needs its KV
                leaders.append(leader)
                leader.submit(stage, mailbox)
                while True:
                    output = await mailbox.get()
                    if is_first and output.token_ids:
                        record.on_engine_output(output.queued_us)
                        is_first = False
                    if output.finish_reason not in LOST:
                        # Its KV is here by now. A leader that got it once more may hold it again.
                        for each in leaders[:-1]:
                            if each is not leader:
                                each.release(request.request_id)
                    so_far += output.token_ids
                    if output.finish_reason in GOES_ON:
                        break
                    has_ended = output.finish_reason not in (FinishReason.NONE, *LOST)
                    if output.token_ids or output.finish_reason:
                        yield output
                    if has_ended:
                        return
                handoff = output.handoff
                if output.token_ids:
                    yield msgspec.structs.replace(
                        output, finish_reason=FinishReason.NONE, handoff=None
                    )
                if pool == "prefill" and handoff is not None:
                    record.on_handover()
                    pool = "decode"
                else:
                    record.on_move()
                    pool = self._first_pool if handoff is None else pool
        finally:
            for leader in leaders:
                if has_ended:
                    leader.release(request.request_id)
                else:  # lost, or its client left: engines that hold some of it must let go
                    leader.abort(request.request_id)


def _in_place(output: EngineOutput, num_outputs: int) -> EngineOutput:
    """Return an output that continues those before it, or how the request ends instead. A broken
    connection loses what was on its way; only a bug delivers an output twice."""
    if output.position == num_outputs or output.finish_reason in LOST:
        return output
    reason = FinishReason.KV_LOST if output.position > num_outputs else FinishReason.ERROR
    found = f"wanted those from {num_outputs} on, found from {output.position} on"
    return EngineOutput.ended(output.request_id, reason, f"output tokens: {found}")
