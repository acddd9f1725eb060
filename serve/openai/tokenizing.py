"""POST /tokenize and /detokenize, in vLLM's shapes: what a prompt is to the model, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from compile.errors import FieldError, Words
from model.fields import Source, convert
from serve.event_loop import Check
from serve.openai.answers import Detokenized, Tokenized
from serve.openai.body import parse, parse_fields
from serve.openai.chat import ChatRenderer
from serve.openai.endpoint import admitted, require_model
from serve.openai.generation import Serving
from serve.openai.schema import MAX_TOOLS, ChatRequest, Inert, Message, Tool, check_num_chars
from serve.requests.sampling import too_long_a_prompt
from serve.requests.tokenizer import Tokenizer, TooManyTokens

Work = Callable[[Serving, Tokenizer, bytes, Check], msgspec.Struct]


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: `prompt` or `messages`."""

    INERT: ClassVar[Inert] = {"mm_processor_kwargs": ({},), "media_io_kwargs": ({},)}

    model: str | None = None
    """The name that is served; null: whichever that is."""
    prompt: str | None = None
    """A text."""
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    """A conversation, as in a chat completion."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; null: to a text, and not to a conversation."""
    return_token_strs: bool = False
    """Return the tokens as the vocabulary spells them as well."""
    add_generation_prompt: bool | None = None
    """As in a chat completion, and so are the others."""
    continue_final_message: bool = False
    """Go on with the final message."""
    chat_template: str | None = None
    """The name of one of the checkpoint's own."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    """Functions that the template tells the model of."""

    def chat(self, messages: list[Message]) -> ChatRequest:
        return ChatRequest(
            messages=messages,
            add_special_tokens=bool(self.add_special_tokens),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template=self.chat_template,
            chat_template_kwargs=self.chat_template_kwargs,
            tools=self.tools,
        )


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize."""

    model: str | None = None
    """The name that is served; null: whichever that is."""
    tokens: list[int]
    """Token ids."""


async def answer(serving: Serving, work: Work, request: Request) -> Response:
    """Answer with what `work` makes of the body, in one slot; raises what generating does."""
    tokenizer, slot, body = await admitted(serving, request)

    def encoded(check: Check) -> bytes:
        return msgspec.json.encode(work(serving, tokenizer, body, check))

    try:
        found = await serving.threads.run(len(body), encoded)
    finally:
        slot.leave()
    return Response(found, media_type="application/json")


def tokenize(serving: Serving, tokenizer: Tokenizer, body: bytes, check: Check) -> Tokenized:
    """Return the tokens of a text or of a conversation; raises ApiError and FieldError."""
    limit = serving.settings.max_model_len
    fields = parse_fields(body, TokenizeRequest, limit)
    has_prompt = "prompt" in fields
    if has_prompt == ("messages" in fields):
        raise FieldError("prompt", "it or messages", Words("both" if has_prompt else "neither"))
    for name in ("tools", "chat_template", "chat_template_kwargs", "continue_final_message"):
        if has_prompt and fields.get(name):
            raise FieldError(name, "none beside a prompt", Words("one"))
    request = convert(fields, TokenizeRequest, Source.JSON)
    require_model(serving, request.model)
    try:
        if request.messages is not None:
            renderer = ChatRenderer(request.chat(request.messages), serving.settings, tokenizer)
            [token_ids] = renderer.encode(limit, check)
        else:
            text, has_special = request.prompt or "", request.add_special_tokens is not False
            check_num_chars("prompt", len(text), serving.settings, tokenizer)
            token_ids = tokenizer.encode(text, has_special, max_tokens=limit, check=check)
        if len(token_ids) > limit:  # a short text is not counted before
            raise TooManyTokens(len(token_ids))
    except TooManyTokens as error:
        refusal = too_long_a_prompt(limit, str(error))
        raise refusal if request.messages is None else refusal.renamed("messages") from error
    strings: list[str] | None = None
    if request.return_token_strs:
        strings = [tokenizer.token(token_id) or "" for token_id in token_ids]
    return Tokenized(len(token_ids), limit, token_ids, strings)


def detokenize(serving: Serving, tokenizer: Tokenizer, body: bytes, check: Check) -> Detokenized:
    """Return the text of tokens, special ones included; raises FieldError."""
    request = parse(body, DetokenizeRequest, serving.settings.max_model_len)
    require_model(serving, request.model)
    size = min(tokenizer.vocab_size, serving.settings.vocab_size or tokenizer.vocab_size)
    bad = next((each for each in request.tokens if not 0 <= each < size), None)
    if bad is not None:
        raise FieldError("tokens", f"token ids from 0 to {size - 1}", bad)
    return Detokenized(tokenizer.decode(request.tokens, skip_special_tokens=False))
