"""Log-probabilities of tokens in the shapes of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from cluster.messages import TokenLogprobs
from serve.openai.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from serve.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0
"""What an impossible token has, for clients of OpenAI and vLLM: JSON has no -inf."""


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
    """Return parallel lists; `text_offsets` is where each token's text starts.

    The drawn token is always among its position's `top_logprobs`, likely or not.
    """
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
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> PromptLogprobs:
    """Return one entry per prompt token, null for the first: nothing stands before it."""
    pairs = zip(token_ids[1:], logprobs, strict=True)
    return [None, *(_prompt_entry(tokenizer, token_id, found) for token_id, found in pairs)]


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
