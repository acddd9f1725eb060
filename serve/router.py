"""The router: a request's way through the pools.

1. The request is submitted to a prefill replica by a handle call that stays open, without items,
   until its engine is done with it: so Serve's routing, draining and accounting see it.
2. Its tokens arrive on the token socket, straight from the engine.
3. A prefill engine ends with a handoff; the request goes to a decode replica with the ticket and
   with the tokens so far.
4. If the KV or an output is lost or a replica dies on the way, the request is prefilled again
   elsewhere; its tokens so far count as output, so that the client sees a pause, no gap and
   nothing twice.
5. A client that leaves ends the generator: every engine that may have the request is told at
   once; calls that do not return then are cancelled.

The end of a stage is told twice: by the last output on the token socket, which counts, and by the
return of the handle call. A call that fails, or that returns although no last output came, means
that the stage was lost.

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

from cluster.messages import EngineOutput, GenerateRequest, KVHandoff, Submit, encode
from serve.tokens import Mailbox, TokenSocket

log = logging.getLogger("lockstep.router")

MAX_ATTEMPTS = 3
"""Losses of one request; after so many the trouble may be the request. A pool that refuses it,
because it is being restarted, does not count: the request waits."""
MAX_PAUSE_S = 2.0
"""Between attempts; the first come faster."""
LAST_OUTPUT_GRACE_S = 2.0
"""A last output may be on its way when the call returns, but not for so long."""
LEAVING_GRACE_S = 0.2
"""From the cancelling of a call to that of its request, where a client leaves."""
CANCEL_AFTER_S = 1.0
"""A call whose engine got the abort has returned long before."""

KV_LOST = "kv_lost"
REFUSED = "refused"


class PoolUnavailable(RuntimeError):
    """A pool's replica has no ranks at the moment; the request did not reach an engine."""


class PoolHandle(Protocol):
    """A pool's `generate` as a handle call: what the router needs of Ray Serve."""

    def generate(self, request_id: str, frame: bytes) -> Any:
        """Start the call; the result is awaitable and has `cancel()`."""


class Router:
    """Runs requests through prefill and decode pools, or through a mixed one."""

    def __init__(self, pools: dict[str, PoolHandle], tokens: TokenSocket) -> None:
        self._pools = pools
        self._first = "mixed" if "mixed" in pools else "prefill"
        self._tokens = tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        """Yield the request's outputs; the last one has a finish reason.

        Closing the iterator aborts the request everywhere.
        """
        outputs = list(request.output_token_ids)
        num_losses = 0
        for number in count():
            attempt = msgspec.structs.replace(
                request,
                request_id=f"{request.request_id}.{number}",
                output_token_ids=list(outputs),
                reply_to=self._tokens.address,
            )
            async with aclosing(self._attempt(attempt)) as attempt_outputs:
                async for output in attempt_outputs:
                    output = _in_place(output, len(outputs))
                    if output.finish_reason in (KV_LOST, REFUSED):
                        break
                    outputs.extend(output.token_ids)
                    yield msgspec.structs.replace(output, request_id=request.request_id)
                    if output.finish_reason:
                        return
            num_losses += output.finish_reason == KV_LOST
            if num_losses >= MAX_ATTEMPTS:
                error = f"lost {num_losses} times on its way, at last: {output.error}"
                yield _ended(request.request_id, "error", error)
                return
            log.warning("%s: %s; it is prefilled again", attempt.request_id, output.error)
            await asyncio.sleep(min(MAX_PAUSE_S, 0.05 * 2 ** min(number, 10)))

    async def _attempt(self, request: GenerateRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run one prefill and what follows; the last output tells how it ended, or was lost."""
        mailbox = self._tokens.open(request.request_id)
        calls: list[_Call] = []
        has_ended = False
        try:
            calls.append(self._submit(self._first, request, None, mailbox))
            while not has_ended:
                output = await mailbox.get()
                if output.finish_reason == "handoff":
                    request = _with_outputs(request, output)
                    calls.append(self._submit("decode", request, output.handoff, mailbox))
                    output = msgspec.structs.replace(output, finish_reason="", handoff=None)
                has_ended = output.finish_reason not in ("", KV_LOST, REFUSED)
                yield output
        finally:
            self._tokens.close(mailbox)
            if not has_ended:
                # Lost or left: engines that hold something of it must let go.
                self._tokens.abort(mailbox)
                for call in calls:
                    call.let_go()

    def _submit(
        self, pool: str, request: GenerateRequest, handoff: KVHandoff | None, mailbox: Mailbox
    ) -> _Call:
        frame = encode(Submit(request, handoff))
        response = self._pools[pool].generate(request.request_id, frame)
        return _Call(response, pool, mailbox, stage=1 if handoff is None else 2)


class _Call:
    """An open handle call. Where it tells that its stage was lost, it becomes an output."""

    def __init__(self, response: Any, pool: str, mailbox: Mailbox, *, stage: int) -> None:
        self._response = response
        self._pool = pool
        self._mailbox = mailbox
        self._stage = stage
        self._is_let_go = False
        self._task = asyncio.ensure_future(self._watch())

    def let_go(self) -> None:
        """Expect nothing more of the call, and cancel it if it does not return soon.

        Engines were told to drop the request, which ends the call; cancelling costs
        milliseconds of this process for each, and hundreds of clients may leave at once.
        """
        self._is_let_go = True
        if not self._task.done():
            asyncio.get_running_loop().call_later(CANCEL_AFTER_S, self._cancel)

    def _cancel(self) -> None:
        """Cancel the call, which makes its replica abort the request."""
        if not self._task.done():
            self._response.cancel()
            self._task.cancel()

    async def _watch(self) -> None:
        request_id = self._mailbox.request_id
        try:
            finish_reason = await self._response
        except asyncio.CancelledError:
            # Our own, or of the call alone: Serve tells some ends of a replica in this way.
            if not self._is_let_go and not _is_cancelled():
                await self._lose_unless_left()
            return
        except PoolUnavailable as error:
            self._mailbox.put(_ended(request_id, REFUSED, f"{self._pool} pool: {_line(error)}"))
            return
        except Exception as error:  # whatever Ray raises, the request must not hang
            self._mailbox.put(_ended(request_id, KV_LOST, f"{self._pool} replica: {_line(error)}"))
            return
        if self._is_let_go:
            return
        await asyncio.sleep(LAST_OUTPUT_GRACE_S)
        if self._mailbox.num_ends < self._stage:
            missing = f"{self._pool} ended it with {finish_reason}, but no last output came"
            self._mailbox.put(_ended(request_id, KV_LOST, missing))

    async def _lose_unless_left(self) -> None:
        """Take a call that Serve cancelled for lost, unless its client has left.

        Serve cancels the calls of a client that leaves before it cancels who waits for them.
        """
        await asyncio.sleep(LEAVING_GRACE_S)
        if not self._is_let_go:
            error = f"{self._pool} replica: the call was cancelled"
            self._mailbox.put(_ended(self._mailbox.request_id, KV_LOST, error))


def _is_cancelled() -> bool:
    """Tell whether the running task was told to end."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _line(error: Exception) -> str:
    """Return the last line that says something: Ray puts the remote traceback before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def _in_place(output: EngineOutput, num_outputs: int) -> EngineOutput:
    """Return an output that continues those before it, or how the request ends instead.

    What a broken connection had on its way is lost; nothing brings an output twice but a mistake.
    """
    if output.position == num_outputs or output.finish_reason in (KV_LOST, REFUSED):
        return output
    reason = KV_LOST if output.position > num_outputs else "error"
    found = f"wanted those from {num_outputs} on, found from {output.position} on"
    return _ended(output.request_id, reason, f"output tokens: {found}")


def _with_outputs(request: GenerateRequest, output: EngineOutput) -> GenerateRequest:
    return msgspec.structs.replace(
        request, output_token_ids=[*request.output_token_ids, *output.token_ids]
    )


def _ended(request_id: str, reason: str, error: str) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        position=0,
        token_ids=[],
        logprobs=[],
        finish_reason=reason,
        stop_token_id=-1,
        num_cached_tokens=0,
        handoff=None,
        error=error,
        prompt_logprobs=[],
    )
