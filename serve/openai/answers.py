"""The JSON that clients read, as structs in OpenAI's order of fields. UNSET fields leave no trace
in the JSON; None is an explicit null. Log-probabilities have another shape at each of the two
endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from cluster.wire.messages import TokenLogprobs
from serve.requests.choice import Choice
from serve.requests.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""What an impossible token has, for clients of OpenAI and vLLM: JSON has no -inf."""


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    """Prompt tokens whose KV was found in the prefix cache."""


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Per prompt token its own entry and the likeliest ones', by token id; null for the first."""


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    """Left out in a stream once it was sent."""
    arguments: str
    """JSON, if the model wrote JSON; in a stream what is new of it."""


class AnsweredCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call of an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    """The same under its older name, which clients still read."""
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    """The stop string, or the id of the stop token; null for the model's own end."""
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: None = None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class AnsweredCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What is new of a tool call; id, type and name come with its first part."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCall


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[AnsweredCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None
    prompt_token_ids: list[int] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Null for the first token of a prompt that is repeated."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Also the choice of a streamed chunk, with the text that is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: int | str | None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """Also a streamed chunk: OpenAI has one object for both."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    system_fingerprint: None = None


class Tokenized(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, frozen=True):
    prompt: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lockstep"
    max_model_len: int
    parent: str | None = None
    """Of a model with an adapter: the one without."""


class ModelDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    deleted: bool = True


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> ChatLogprobs:
    """Return one entry per token, each with its likeliest alternatives."""
    return ChatLogprobs(
        [
            ChatTokenLogprob(
                token=tokenizer.token_text(token_id),
                logprob=_clamp(found.logprob),
                bytes=list(tokenizer.token_bytes(token_id)),
                top_logprobs=_top_logprobs(tokenizer, found),
            )
            for token_id, found in zip(token_ids, logprobs, strict=True)
        ]
    )


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    text_offsets: list[int],
) -> CompletionLogprobs:
    """Return parallel lists; `text_offsets` is where each token's text starts. The drawn token is
    always among its position's `top_logprobs`, likely or not."""
    tokens = [tokenizer.token_text(token_id) for token_id in token_ids]
    return CompletionLogprobs(
        text_offset=text_offsets,
        token_logprobs=[_clamp(found.logprob) for found in logprobs],
        tokens=tokens,
        top_logprobs=[
            _top_by_text(tokenizer, token, found)
            for token, found in zip(tokens, logprobs, strict=True)
        ],
    )


def prompt_logprobs(
    tokenizer: Tokenizer, first: Choice, num_candidates: int | None
) -> PromptLogprobs | UnsetType:
    """Return one entry per token of the prompt of a `first` choice, null for its first: nothing
    precedes it. UNSET if none are asked for."""
    if num_candidates is None:
        return UNSET
    found = limited(first.prompt_logprobs, num_candidates)
    pairs = zip(first.request.prompt_token_ids[1:], found, strict=True)
    return [None, *(_prompt_entry(tokenizer, token_id, found) for token_id, found in pairs)]


def limited(logprobs: Sequence[TokenLogprobs], num_candidates: int) -> list[TokenLogprobs]:
    """Return log-probabilities with so many candidates in each place at most."""
    return [
        msgspec.structs.replace(
            found,
            top_token_ids=found.top_token_ids[:num_candidates],
            top_logprobs=found.top_logprobs[:num_candidates],
        )
        for found in logprobs
    ]


def _prompt_entry(
    tokenizer: Tokenizer, token_id: int, found: TokenLogprobs
) -> dict[int, PromptLogprob]:
    own = (token_id, found.logprob, found.rank)
    top = zip(found.top_token_ids, found.top_logprobs, count(1))
    entries: dict[int, PromptLogprob] = {}
    for candidate, logprob, rank in (own, *top):
        text = tokenizer.token_text(candidate)
        entries.setdefault(candidate, PromptLogprob(_clamp(logprob), rank, text))
    return entries


def _top_logprobs(tokenizer: Tokenizer, found: TokenLogprobs) -> list[TopLogprob]:
    return [
        TopLogprob(
            tokenizer.token_text(token_id), _clamp(logprob), list(tokenizer.token_bytes(token_id))
        )
        for token_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True)
    ]


def _top_by_text(tokenizer: Tokenizer, drawn: str, found: TokenLogprobs) -> dict[str, float]:
    top: dict[str, float] = {}
    for token_id, logprob in zip(found.top_token_ids, found.top_logprobs, strict=True):
        # Tokens may share a text (pieces of characters are all U+FFFD): keep the likeliest.
        top.setdefault(tokenizer.token_text(token_id), _clamp(logprob))
    top.setdefault(drawn, _clamp(found.logprob))
    return top


def _clamp(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
