"""The router: a request's way through the pools.

1. The request is submitted to a prefill replica by a handle call that stays open until its engine
   is done with it: so Serve's routing, draining and accounting see it.
2. Its tokens arrive on the token socket, straight from the engine.
3. A prefill engine ends with a handoff; the request goes to a decode replica with the handoff and
   with the tokens so far.
4. If the KV or an output is lost, a rank group or its replica dies, or an engine drops the request,
   it is prefilled again, wherever Serve sends it. Its tokens so far count as output, so the client
   sees a pause, but no gap and nothing twice.
5. A client that leaves ends the generator: every engine that may have the request is told at
   once, and calls that do not return then are cancelled.

The end of a stage is reported twice: by the last output on the token socket, which counts, and by
the return of the handle call. A call that fails, or returns without a last output, means that the
stage was lost.

A request may kill its ranks, and with them the requests beside it: `quarantine.py` finds out which.

A mixed pool is the same with one stage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import count
from typing import Any, Protocol

import msgspec

from cluster.observe.logs import last_line
from cluster.wire.messages import (
    EngineOutput,
    FinishReason,
    GenerateRequest,
    KVHandoff,
    Submit,
    encode,
)
from serve.pools.mailboxes import Mailbox, TokenMailboxes
from serve.pools.pool_core import PoolUnavailable
from serve.pools.quarantine import CrashHistory, Quarantine
from serve.requests.records import SequenceRecord

log = logging.getLogger("lockstep.router")

MAX_PAUSE_S = 2.0
"""The longest pause between attempts; the first ones are shorter."""
LAST_OUTPUT_GRACE_S = 2.0
"""How long a last output may still be on its way after the call has returned, unless it waits
behind others."""
LEAVING_GRACE_S = 0.2
"""Between the cancelling of a call and that of its request, where a client leaves."""
MAX_ERROR_CHARS = 300
"""Of what a call's error says."""
CANCEL_AFTER_S = 1.0
"""A call that has not returned so long after its abort is cancelled."""

LOST = (
    FinishReason.KV_LOST,
    FinishReason.REFUSED,
    FinishReason.DIED,
    # By the engine, which took the ingress for dead; every other abort ends the generator first.
    FinishReason.ABORT,
)
"""How an attempt ends that is made again."""


class PoolHandle(Protocol):
    """A pool's `generate` as a handle call: what the router needs of Ray Serve."""

    def generate(self, request_id: str, frame: bytes) -> Any:
        """The result is awaitable and has `cancel()`."""


class Router:
    def __init__(
        self,
        pools: dict[str, PoolHandle],
        tokens: TokenMailboxes,
        quarantine: Quarantine | None = None,
    ) -> None:
        self._pools = pools
        self._first = "mixed" if "mixed" in pools else "prefill"
        self._tokens = tokens
        self._quarantine = quarantine or Quarantine()

    async def generate(
        self, request: GenerateRequest, record: SequenceRecord | None = None
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield the request's outputs; the last one has a finish reason. Closing the iterator
        aborts the request everywhere. `record` notes its way."""
        record = record or SequenceRecord()
        outputs = list(request.output_token_ids)
        history = CrashHistory()
        for number in count():
            attempt = msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}.{number}",
                output_token_ids=list(outputs),
                reply_to=self._tokens.address,
            )
            async with self._quarantine.attempt(history):
                record.on_attempt()
                async with aclosing(self._attempt(attempt, record)) as attempt_outputs:
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
                history.add(output.finish_reason)
            if history.is_too_long:
                error = f"{history}, at last: {output.error}"
                yield EngineOutput.ended(request.request_id, FinishReason.ERROR, error)
                return
            # Behind the pause, in which a client may turn out to have left.
            await asyncio.sleep(min(MAX_PAUSE_S, 0.05 * 2 ** min(number, 10)))
            log.warning("%s: %s; it is sent again", attempt.request_id, output.error)

    async def _attempt(
        self, request: GenerateRequest, record: SequenceRecord
    ) -> AsyncGenerator[EngineOutput, None]:
        """Run one prefill and what follows; the last output tells how it ended, or was lost."""
        mailbox = self._tokens.open(request.request_id)
        calls: list[_Call] = []
        has_ended, is_first = False, True
        try:
            calls.append(self._submit(self._first, request, None, mailbox))
            while not has_ended:
                output = await mailbox.get()
                if is_first and output.token_ids:
                    record.on_engine_output(output.queued_us)
                    is_first = False
                if output.finish_reason == FinishReason.HANDOFF:
                    record.on_handover()
                    is_first = True
                    so_far = [*request.output_token_ids, *output.token_ids]
                    request = msgspec.structs.replace(request, output_token_ids=so_far)
                    calls.append(self._submit("decode", request, output.handoff, mailbox))
                    output = msgspec.structs.replace(
                        output, finish_reason=FinishReason.NONE, handoff=None
                    )
                has_ended = output.finish_reason not in (FinishReason.NONE, *LOST)
                yield output
        finally:
            record.on_engines(self._tokens.engines_of(mailbox))
            self._tokens.close(mailbox)
            if not has_ended:
                # Lost, or its client left: engines that hold some of it must let go.
                self._tokens.abort(mailbox)
                for call in calls:
                    call.let_go()

    def _submit(
        self, pool: str, request: GenerateRequest, handoff: KVHandoff | None, mailbox: Mailbox
    ) -> _Call:
        frame = encode(Submit(request, handoff))
        response = self._pools[pool].generate(request.request_id, frame)
        stage = 1 if handoff is None else 2
        return _Call(response, pool, mailbox, self._tokens, stage=stage)


class _Call:
    """An open handle call. If it ends with its stage lost, it puts an output that says so. A
    prefill replica may end when it has handed over: if that lost the KV, its reader says so."""

    def __init__(
        self, response: Any, pool: str, mailbox: Mailbox, tokens: TokenMailboxes, *, stage: int
    ) -> None:
        self._tokens = tokens
        self._response = response
        self._pool = pool
        self._mailbox = mailbox
        self._stage = stage
        self._is_let_go = False
        self._task = asyncio.ensure_future(self._watch())

    def let_go(self) -> None:
        """Stop waiting for the call, and cancel it if it does not return soon. Engines were told to
        drop the request, which ends the call; cancelling costs milliseconds of this process for
        each, and hundreds of clients may leave at once."""
        self._is_let_go = True
        if not self._task.done():
            asyncio.get_running_loop().call_later(CANCEL_AFTER_S, self._cancel)

    def _cancel(self) -> None:
        if not self._task.done():
            self._response.cancel()
            self._task.cancel()

    async def _watch(self) -> None:
        try:
            finish_reason = await self._response
        except asyncio.CancelledError:
            # Our own, or that of the call alone: Serve reports some ends of a replica in this way.
            if not self._is_let_go and not _is_cancelled():
                # If a client leaves, Serve cancels its calls before the task that waits for them.
                await asyncio.sleep(LEAVING_GRACE_S)
                if self._mailbox.num_ends < self._stage and not self._is_let_go:
                    self._lose(FinishReason.KV_LOST, "replica: the call was cancelled")
        except PoolUnavailable as error:
            self._lose(FinishReason.REFUSED, f"pool: {last_line(error)[:MAX_ERROR_CHARS]}")
        except Exception as error:  # whatever Ray raises, the request must not hang
            if self._mailbox.num_ends < self._stage:
                self._lose(FinishReason.DIED, f"replica: {last_line(error)[:MAX_ERROR_CHARS]}")
        else:
            if self._is_let_go or self._mailbox.num_ends >= self._stage:
                return
            await asyncio.sleep(LAST_OUTPUT_GRACE_S)
            await self._tokens.caught_up()
            if self._mailbox.num_ends < self._stage:
                missing = f"ended it with {finish_reason}, but no last output came"
                self._lose(FinishReason.KV_LOST, missing)

    def _lose(self, reason: FinishReason, error: str) -> None:
        lost = EngineOutput.ended(self._mailbox.request_id, reason, f"{self._pool} {error}")
        self._mailbox.put(lost)


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _in_place(output: EngineOutput, num_outputs: int) -> EngineOutput:
    """Return an output that continues those before it, or how the request ends instead. A broken
    connection loses what was on its way; only a bug delivers an output twice."""
    if output.position == num_outputs or output.finish_reason in LOST:
        return output
    reason = FinishReason.KV_LOST if output.position > num_outputs else FinishReason.ERROR
    found = f"wanted those from {num_outputs} on, found from {output.position} on"
    return EngineOutput.ended(output.request_id, reason, f"output tokens: {found}")
