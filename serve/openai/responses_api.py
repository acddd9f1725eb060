"""POST /v1/responses: items in, items out, in one answer or as typed events.

An answer's output is one list, whether it is sent whole or item by item: reasoning, a message,
calls, each where it began. Both come from `_Output`, which the events tell the life of.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from serve.event_loop import Check
from serve.openai.answer_parser import AnswerDelta, AnswerFormat, AnswerParser
from serve.openai.chat import chat_size, check_chat, encode_chat, prompt_end
from serve.openai.endpoint import Serving, Stamp
from serve.openai.errors import BadRequest
from serve.openai.generation import Choice, Generation
from serve.openai.reasoning import ReasoningFormat
from serve.openai.responses import Usage
from serve.openai.responses_request import ResponsesChat, ResponsesRequest, parse_responses
from serve.openai.tool_parser import CallDelta
from serve.openai.tools import new_call_id, with_forced_calls
from serve.requests.tokenizer import Tokenizer

Json = dict[str, Any]


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event of a stream, with the fields that its type has."""

    type: str
    sequence_number: int
    response: Json | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: Json | UnsetType = UNSET
    part: Json | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET


class _Item:
    """An item of an output that is being written."""

    def __init__(self, kind: str, index: int, **fields: Any) -> None:
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        self.kind = kind
        self.id = f"{prefix}_{secrets.token_hex(16)}"
        self.index = index
        self.status = "in_progress"
        self._fields = fields
        self._parts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def add(self, text: str) -> None:
        self._parts.append(text)

    def part(self, text: str) -> Json:
        """Return the item's content: one part."""
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def json(self) -> Json:
        """Return the item as it is now."""
        found = {"id": self.id, "type": self.kind, "status": self.status, **self._fields}
        if self.kind == "function_call":
            return {**found, "arguments": self.text}
        return {**found, "content": [self.part(self.text)] if self._parts else []}


class _Output:
    """The items of one answer, with the events of their lives."""

    def __init__(self, answers: AnswerFormat) -> None:
        self.items: list[_Item] = []
        self._answers = answers
        self._num_events = 0
        self._open: dict[str, _Item] = {}
        """By kind: the item that is not done."""

    def event(self, kind: str, **fields: Any) -> Event:
        """Return the next event."""
        self._num_events += 1
        return Event(type=f"response.{kind}", sequence_number=self._num_events - 1, **fields)

    def add(self, delta: AnswerDelta) -> Iterator[Event]:
        """Add what is new of an answer."""
        if delta.reasoning:
            yield from self._add("reasoning", delta.reasoning, "reasoning_text", summary=[])
        before = [call for call in delta.calls if call.number < delta.content_at]
        yield from self._add_calls(before)
        if delta.content:
            yield from self._close("reasoning", "completed")
            yield from self._add("message", delta.content, "output_text", role="assistant")
        yield from self._add_calls(delta.calls[len(before) :])

    def end(self, finish_reason: str | None) -> Iterator[Event]:
        """Close what is open; after an answer that was cut it is incomplete."""
        if not self.items:
            yield from self._add("message", "", "output_text", role="assistant")
        status = "completed" if finish_reason == "stop" else "incomplete"
        for item in sorted(self._open.values(), key=lambda item: item.index):
            yield from self._close(item.kind, status)

    def _add_calls(self, calls: list[CallDelta]) -> Iterator[Event]:
        for call in calls:
            fields = {}
            if call.name is not None:
                yield from self._close("reasoning", "completed")
                yield from self._close("function_call", "completed")
                assert self._answers.tools is not None
                fields = {"call_id": new_call_id(self._answers.tools), "name": call.name}
            yield from self._add(
                "function_call", call.arguments, "function_call_arguments", **fields
            )

    def _add(self, kind: str, text: str, what: str, **fields: Any) -> Iterator[Event]:
        """Add text to the open item of a kind, or to a new one."""
        item = self._open.get(kind)
        if item is None:
            item = self._open[kind] = _Item(kind, len(self.items), **fields)
            self.items.append(item)
            yield self.event("output_item.added", output_index=item.index, item=item.json())
            if kind == "message":
                yield self._of_item(item, "content_part.added", part=item.part(""))
        item.add(text)
        if text:
            yield self._of_item(item, f"{what}.delta", delta=text)

    def _of_item(self, item: _Item, kind: str, **fields: Any) -> Event:
        if item.kind != "function_call":
            fields["content_index"] = 0
        if kind.startswith("output_text"):
            fields["logprobs"] = []
        return self.event(kind, item_id=item.id, output_index=item.index, **fields)

    def _close(self, kind: str, status: str) -> Iterator[Event]:
        item = self._open.pop(kind, None)
        if item is None:
            return
        item.status = status
        if kind == "function_call":
            done = {"arguments": item.text, "name": item.json()["name"]}
            yield self._of_item(item, "function_call_arguments.done", **done)
        elif kind == "reasoning":
            yield self._of_item(item, "reasoning_text.done", text=item.text)
        else:
            yield self._of_item(item, "output_text.done", text=item.text)
            yield self._of_item(item, "content_part.done", part=item.part(item.text))
        yield self.event("output_item.done", output_index=item.index, item=item.json())


class ResponsesShape:
    """Reads and writes one request for a response."""

    num_prompts = 1
    num_prompt_copies = 1
    has_typed_events = True

    def __init__(
        self,
        request: ResponsesRequest,
        chat: ResponsesChat,
        tokenizer: Tokenizer,
        model: str,
        answers: AnswerFormat,
    ) -> None:
        """Read a request that stands for a chat, which the model answers in `answers`."""
        self.request = chat
        self.params = with_forced_calls(chat, chat.sampling_params())
        self.stamp = Stamp.new("resp", model)
        self.shown_token_ids = tokenizer.special_ids_of(answers.markers)
        self._given = request
        self._tokenizer = tokenizer
        self._answers = answers
        self._output = _Output(answers)
        self._parser: AnswerParser | None = None
        self._finish_reason: str | None = None
        self._offsets: list[int] = []
        """Where the text of each token begins, of a model that thinks."""

    @property
    def size(self) -> int:
        return chat_size(self.request)

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        return [encode_chat(self.request, self._tokenizer, max_tokens, check)]

    def response(self, generation: Generation) -> Any:
        [choice] = generation.choices
        for _ in self._absorb(choice):
            pass
        return self._response(self._final_status(), generation.usage())

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        if self._parser is None:
            for kind in ("created", "in_progress"):
                yield self._output.event(kind, response=self._response("in_progress", None))
        yield from self._absorb(choice)

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        status = self._final_status()
        yield self._output.event(status, response=self._response(status, generation.usage()))

    def _absorb(self, choice: Choice) -> Iterator[Event]:
        if self._parser is None:
            end = prompt_end(self.request, self._answers, self._tokenizer, choice)
            self._parser = AnswerParser(self._answers, end)
        piece = choice.take()
        if self._answers.reasoning is not ReasoningFormat.NONE:
            self._offsets += piece.offsets
        is_last = piece.finish_reason is not None
        yield from self._output.add(self._parser.push(piece.text, is_last=is_last))
        if is_last:
            self._finish_reason = piece.finish_reason
            yield from self._output.end(piece.finish_reason)

    def _final_status(self) -> str:
        return "completed" if self._finish_reason == "stop" else "incomplete"

    def _response(self, status: str, usage: Usage | None) -> Json:
        given = self._given
        reason = {"length": "max_output_tokens"}.get(self._finish_reason or "", "aborted")
        return {
            "id": self.stamp.id,
            "object": "response",
            "created_at": self.stamp.created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": reason} if status == "incomplete" else None,
            "instructions": given.instructions,
            "max_output_tokens": given.max_output_tokens,
            "metadata": given.metadata,
            "model": self.stamp.model,
            "output": [item.json() for item in self._output.items],
            "parallel_tool_calls": given.parallel_tool_calls,
            "previous_response_id": None,
            "store": False,
            "temperature": given.temperature,
            "text": {"format": given.text.format or {"type": "text"}},
            "tool_choice": given.tool_choice or ("auto" if given.tools else "none"),
            "tools": given.tools,
            "top_p": given.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else self._usage(usage),
        }

    def _usage(self, usage: Usage) -> Json:
        assert self._parser is not None
        num_reasoning_tokens = bisect_left(self._offsets, self._parser.num_reasoning_chars)
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning_tokens},
            "total_tokens": usage.total_tokens,
        }


def parse_responses_shape(serving: Serving, tokenizer: Tokenizer, body: bytes) -> ResponsesShape:
    """Return the request in a JSON body; raises BadRequest and FieldError."""
    request, chat = parse_responses(body)
    try:
        answers = check_chat(chat, serving.settings, tokenizer)
    except BadRequest as error:
        if error.param != "messages":
            raise
        message = error.message.replace("messages", "input", 1)
        raise BadRequest(message, param="input") from error
    return ResponsesShape(request, chat, tokenizer, serving.settings.served_model_name, answers)
