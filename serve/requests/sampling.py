"""Sampling parameters: what a request may ask for, and its resolution to what the engine takes.
Names and defaults are those of vLLM's `SamplingParams`. A value that cannot be met is refused,
never clamped; only a `max_tokens` that was not given shrinks to what is left."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterable
from typing import Annotated

import msgspec
import numpy as np
from msgspec import UNSET, Meta, UnsetType

from cluster.wire.messages import (
    MAX_BIAS,
    MAX_BIASES,
    MAX_LOGPROBS,
    Bias,
    Grammar,
    Index,
    LogitRules,
    MaxTokens,
    Penalty,
    Probability,
    Repetition,
    Sampling,
    Temperature,
    TopP,
)
from compile.errors import FieldError, Words
from model.fields import LARGEST_INDEX, Source, convert, hints_of, says, words_for
from serve.requests.structured import StructuredOutputsParams

MAX_STOP_STRINGS = 64
"""Texts in `stop`; each is looked for after every token."""
MAX_STOP_CHARS = 256
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""Tokens in `stop_token_ids`; each is compared with every token."""
MAX_CHOICES = 128
"""OpenAI's bound on `n`; each choice is a sequence of its own."""
DEFAULT_MAX_TOKENS = 16
"""Output tokens of a completion without `max_tokens`, as OpenAI and vLLM have it; fewer where the
prompt leaves less room."""
_SEED_MASK = 2**64 - 1

TokenId = Annotated[Index, says("token ids from 0 up")]
TokenBias = Annotated[Bias, says(f"biases from -{MAX_BIAS:g} to {MAX_BIAS:g}")]
TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
# Bounds of msgspec have 63 bits.
Seed = Annotated[int, says("an integer of 64 bits")]
TopK = Annotated[int, Meta(ge=-1, le=LARGEST_INDEX), says("-1, 0 (both keep all) or a count")]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
StopStrings = Annotated[
    list[StopString], Meta(max_length=MAX_STOP_STRINGS), says("a text or a list of texts")
]


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """How tokens are drawn, and what ends a text: the same for every kind of request."""

    temperature: Temperature = 1.0
    """0 is greedy."""
    top_p: TopP = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: TopK = 0
    """Draw from so many of the likeliest tokens only."""
    min_p: Probability = 0.0
    """Least probability of a token that is drawn, relative to the likeliest token's."""
    presence_penalty: Penalty = 0.0
    """Taken from the logit of every token that the output has; encourages repetition below 0."""
    frequency_penalty: Penalty = 0.0
    """The same for each time that the output has the token."""
    repetition_penalty: Repetition = 1.0
    """Makes tokens of prompt and output less likely; below 1 more likely."""
    seed: Seed | None = None
    """Same seed, same tokens: alone, in any batch, and when the request is moved or computed again;
    null draws one."""
    min_tokens: Index = 0
    """Output tokens before a stop token or a stop string may end the text."""
    stop: StopString | StopStrings = []
    """What ends the output: up to `MAX_STOP_STRINGS` texts of up to `MAX_STOP_CHARS` characters."""
    stop_token_ids: Annotated[
        list[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS), says("a list of token ids")
    ] = []
    """Up to `MAX_STOP_TOKEN_IDS` tokens that end the output, beside the checkpoint's own."""
    ignore_eos: bool = False
    """Go on behind the checkpoint's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""


class PromptFields(SamplingFields, frozen=True, kw_only=True):
    """What a request for completions of a prompt or a chat may ask for beyond that."""

    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    """Choices for each prompt. Prompts times `n` are at most `MAX_SEQUENCES`, or as many as may be
    alive."""
    allowed_token_ids: (
        Annotated[list[TokenId], Meta(min_length=1), says("a list of token ids")] | None
    ) = None
    """The only tokens that may be drawn, at most as many as the vocabulary has; null allows all."""
    prompt_logprobs: TopLogprobs | None = None
    """Return the log-probability of each prompt token but the first, and those of so many of the
    likeliest tokens in its place. Not with `stream` true."""


class _ParamFields(PromptFields, frozen=True, kw_only=True):
    logit_bias: Annotated[
        dict[TokenId, TokenBias], Meta(max_length=MAX_BIASES), says("token ids with a bias each")
    ] = {}
    """A bias of at most `MAX_BIAS` either way for each of these tokens."""
    max_tokens: MaxTokens | UnsetType | None = UNSET
    """None: as many as fit in the model's length. Unset: 16, or as many as fit if fewer do."""
    logprobs: TopLogprobs | None = None
    """0: of each drawn token; n: of the n likeliest as well."""


class SamplingParams(_ParamFields, frozen=True, kw_only=True):
    """How to generate from one prompt. FieldError: a value is out of range or of another type."""

    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be; None: anything."""

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in _ParamFields.__struct_fields__}
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            if isinstance(given[name], tuple):  # msgspec takes any sequence for a list
                raise FieldError(name, words_for(hints_of(_ParamFields)[name]), given[name])
        given = {name: each for name, each in given.items() if each is not UNSET}
        convert(given, _ParamFields, Source.PYTHON)
        if self.seed is not None:
            in_64_bits = -(2**63) <= self.seed <= _SEED_MASK
            _require(in_64_bits, "seed", words_for(Seed), self.seed)
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is UNSET else self.max_tokens
        if max_tokens is not None and self.min_tokens > max_tokens:
            raise FieldError("min_tokens", f"at most max_tokens={max_tokens}", self.min_tokens)
        structured: object = self.structured_outputs
        if structured is None:
            return
        if not isinstance(structured, StructuredOutputsParams):
            found = Words(repr(structured)[:100])
            raise FieldError("structured_outputs", "a StructuredOutputsParams", found)
        # A grammar decides what may be drawn, and where a text ends.
        for name, none in (("ignore_eos", False), ("min_tokens", 0), ("allowed_token_ids", None)):
            value = getattr(self, name)
            text = Words(str(value)[:100])
            _require(value == none, name, "none with structured output, which decides it", text)

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Resolver:
    """Turns one request's parameters into what the engine takes, for each of its prompts."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammar_text: Callable[[StructuredOutputsParams], str],
    ) -> None:
        """Check and compute what does not depend on the prompt; raises FieldError."""
        _check_vocabulary("logit_bias", params.logit_bias, vocab_size)
        _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
        eos = () if params.ignore_eos else tuple(i for i in eos_token_ids if i < vocab_size)
        if params.min_tokens and params.allowed_token_ids:
            is_left = not set(params.allowed_token_ids) <= {*params.stop_token_ids, *eos}
            wanted = "a token that may come before min_tokens, which no stop token may"
            _require(is_left, "allowed_token_ids", wanted, params.allowed_token_ids[:8])
        self._params = params
        self._max_model_len = max_model_len
        self._stop_token_ids = tuple(dict.fromkeys((*params.stop_token_ids, *eos)))
        self._rules = _rules(params)
        self._grammar: Grammar | None = None
        if params.structured_outputs is not None:
            if not eos:
                found = Words("a model without an end token")
                raise FieldError("structured_outputs", "a model whose texts end", found)
            self._grammar = Grammar(grammar_text(params.structured_outputs), eos)

    def choices(self, prompt_len: int, max_tokens_left: int | None = None) -> list[Sampling]:
        """Return what the engine needs for each choice; they differ in their seeds, and the first
        one alone asks for the prompt's log-probabilities. `max_tokens_left` bounds a `max_tokens`
        that was not given. FieldError if the prompt, max_tokens or min_tokens do not fit."""
        params = self._params
        first = Sampling(
            temperature=float(params.temperature),
            top_k=max(params.top_k, 0),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            seed=secrets.randbits(64) if params.seed is None else params.seed & _SEED_MASK,
            max_tokens=self._max_tokens(prompt_len, max_tokens_left),
            stop_token_ids=self._stop_token_ids,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            rules=self._rules,
            grammar=self._grammar,
        )
        return [first, *(_another_choice(first, index) for index in range(1, params.n))]

    def _max_tokens(self, prompt_len: int, max_tokens_left: int | None) -> int:
        params, length = self._params, self._max_model_len
        _require(prompt_len > 0, "prompt", "at least one token", Words("none"))
        room = length - prompt_len
        if room < 1:
            raise too_long_a_prompt(length, f"{prompt_len} tokens")
        wanted = (
            f"at most {room} (the model's length is {length} and the prompt has "
            f"{prompt_len} tokens)"
        )
        _require(params.min_tokens <= room, "min_tokens", wanted, params.min_tokens)
        if params.max_tokens is None:
            left = room if max_tokens_left is None else min(room, max_tokens_left)
            return max(left, params.min_tokens)
        if params.max_tokens is UNSET:
            return min(DEFAULT_MAX_TOKENS, room)
        _require(params.max_tokens <= room, "max_tokens", wanted, params.max_tokens)
        return params.max_tokens


def too_long_a_prompt(max_model_len: int, found: str) -> FieldError:
    """Return the error of a prompt that leaves no room for a token."""
    wanted = (
        f"at most {max_model_len - 1} tokens (the model's length is {max_model_len} and one is "
        "for output)"
    )
    return FieldError("prompt", wanted, Words(found))


def _another_choice(first: Sampling, index: int) -> Sampling:
    # Not seed + index: the second choice of one seed would be the first of the next.
    text = f"{first.seed} {index}".encode()
    seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    return msgspec.structs.replace(first, seed=seed, num_prompt_logprobs=-1)


def _rules(params: SamplingParams) -> LogitRules | None:
    # One bit per token up to the highest of these, lowest bit first.
    token_ids = params.allowed_token_ids or []
    allowed = np.zeros(max(token_ids, default=-1) + 1, dtype=bool)
    allowed[token_ids] = True
    rules = LogitRules(
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        bias_token_ids=tuple(params.logit_bias),
        biases=tuple(float(bias) for bias in params.logit_bias.values()),
        allowed_tokens=np.packbits(allowed, bitorder="little").tobytes(),
        min_tokens=params.min_tokens,
    )
    return None if rules == _NO_RULES else rules


_NO_RULES = LogitRules(0.0, 0.0, 1.0, (), (), b"", 0)


def _require(is_met: bool, param: str, wanted: str, found: object) -> None:
    if not is_met:
        raise FieldError(param, wanted, found)


def _check_vocabulary(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    wanted = f"token ids from 0 to {vocab_size - 1}"
    largest = max(token_ids, default=0)
    _require(largest < vocab_size, param, wanted, largest)
