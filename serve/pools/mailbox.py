"""`Mailbox`: what engines have produced for an attempt of a request, until the request takes it."""

from __future__ import annotations

import asyncio
from collections import deque

import msgspec

from cluster.wire.messages import EngineOutput, TokenLogprobs
from serve.event_loop import StreamBatcher


class Mailbox:
    """One request's outputs that were not taken yet, in order. The first of them and every end of a
    stage can be taken at once. Others wait for the next tick, and those that only bring tokens
    become one output meanwhile."""

    def __init__(self, request_id: str, tick: StreamBatcher) -> None:
        self.request_id = request_id
        self._tick = tick
        self._waiting: deque[EngineOutput] = deque()
        self._can_take = asyncio.Event()
        self._has_begun = self._is_ringing = False
        self._prompt_logprobs: list[TokenLogprobs] = []
        """Of pieces of the prompt, which come ahead of the first output."""

    def put(self, output: EngineOutput) -> None:
        if output.prompt_logprobs and not output.token_ids and not output.finish_reason:
            self._prompt_logprobs += output.prompt_logprobs
            return
        if self._prompt_logprobs:
            ahead, self._prompt_logprobs = self._prompt_logprobs, []
            together = ahead + output.prompt_logprobs
            output = msgspec.structs.replace(output, prompt_logprobs=together)
        if self._waiting and _continues(self._waiting[-1], output):
            output = _together(self._waiting.pop(), output)
        self._waiting.append(output)
        if output.finish_reason or not self._has_begun:
            self._has_begun = True
            self._can_take.set()
        elif not self._is_ringing and not self._can_take.is_set():
            self._is_ringing = True
            self._tick.call(self._ring)

    async def get(self) -> EngineOutput:
        await self._can_take.wait()
        output = self._waiting.popleft()
        if not self._waiting:
            self._can_take.clear()
        return output

    def _ring(self) -> None:
        self._is_ringing = False
        if self._waiting:
            self._can_take.set()


def _continues(before: EngineOutput, output: EngineOutput) -> bool:
    only_tokens = not (before.finish_reason or output.finish_reason or output.prompt_logprobs)
    return only_tokens and output.position == before.position + len(before.token_ids)


def _together(before: EngineOutput, output: EngineOutput) -> EngineOutput:
    token_ids = [*before.token_ids, *output.token_ids]
    logprobs = [*before.logprobs, *output.logprobs]
    queued_us = before.queued_us + output.queued_us  # which the first tokens alone tell
    return msgspec.structs.replace(
        before, token_ids=token_ids, logprobs=logprobs, queued_us=queued_us
    )
