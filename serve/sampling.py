"""Sampling parameters: what a request may ask for, and its resolution to what the engine takes.

Names and defaults are those of vLLM's `SamplingParams`, but every value is checked when the object
is built, and a value that cannot be met is refused, never clamped. Only a `max_tokens` that was not
given shrinks: to what a long prompt leaves, and to what one answer may hold.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from cluster.messages import Grammar, LogitRules, Sampling
from compile.errors import FieldError, Words
from serve.structured import StructuredOutputsParams

MAX_STOP_STRINGS = 64
"""Texts in `stop`; each is looked for after every token."""
MAX_STOP_CHARS = 256
"""Characters of one stop string."""
MAX_STOP_TOKEN_IDS = 256
"""Tokens in `stop_token_ids`; each is compared with every token."""
MAX_BIASES = 1024
"""Tokens in `logit_bias`, about three times what OpenAI takes; each is sent to every rank."""
MAX_LOGPROBS = 20
"""Candidates for each token: OpenAI's and vLLM's default. More are more bytes than the text."""
MAX_CHOICES = 128
"""OpenAI's bound on `n`; each choice is a sequence of its own."""
DEFAULT_MAX_TOKENS = 16
"""Output tokens of a completion without `max_tokens`, as OpenAI and vLLM have it; fewer where the
prompt leaves less room."""
MAX_BIAS = 100
"""OpenAI's bound on one bias; it decides for or against a token."""
MAX_TEMPERATURE = 1e6
"""Far above what draws uniformly, and far below what float32 takes for infinity."""
MAX_REPETITION = 1e3
"""Bound on `repetition_penalty`, and the inverse of its lower one: logits times or divided by it
are still finite."""
MAX_PENALTY = 2
"""OpenAI's bound on presence and frequency penalty, either way."""
_SEED_MASK = 2**64 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate from one prompt.

    Raises FieldError when built with a value out of range or of another type.
    """

    n: int = 1
    """Choices for the prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep all."""
    min_p: float = 0.0
    """Least probability relative to the likeliest token's."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    """Both count output tokens, and encourage repetition below 0."""
    repetition_penalty: float = 1.0
    """Concerns prompt and output tokens; encourages repetition below 1."""
    logit_bias: dict[int, float] = {}
    allowed_token_ids: list[int] | None = None
    """None allows all."""
    seed: int | None = None
    """None draws one."""
    min_tokens: int = 0
    """Output tokens before a stop token or a stop string may end the text."""
    max_tokens: int | UnsetType | None = UNSET
    """None: as many as fit in the model's length. Unset: 16, or as many as fit if fewer do."""
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """0: of each drawn token; n: of the n likeliest as well."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first."""
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """What the text must be; None: anything."""

    def __post_init__(self) -> None:
        wanted = f"a number from 0 to {MAX_TEMPERATURE:g}"
        _check_number("temperature", self.temperature, wanted, 0, MAX_TEMPERATURE)
        _check_number("top_p", self.top_p, "a number above 0 and at most 1", 0, 1)
        _require(self.top_p > 0, "top_p", "a number above 0 and at most 1", self.top_p)
        _check_int("top_k", self.top_k, "-1, 0 (both keep all) or a count", -1, 2**31 - 1)
        _check_number("min_p", self.min_p, "a number from 0 to 1", 0, 1)
        _check_int("n", self.n, f"an integer from 1 to {MAX_CHOICES}", 1, MAX_CHOICES)
        if self.seed is not None:
            _check_int("seed", self.seed, "an integer of 64 bits", -(2**63), _SEED_MASK)
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is UNSET else self.max_tokens
        if max_tokens is not None:
            _check_int("max_tokens", max_tokens, "an integer from 1 up", 1, 2**31 - 1)
        _check_min_tokens(self.min_tokens, max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(self, name)) is not None:
                wanted = f"an integer from 0 to {MAX_LOGPROBS}"
                _check_int(name, value, wanted, 0, MAX_LOGPROBS)
        _check_penalties(self)
        _check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            _check_allowed_token_ids(self.allowed_token_ids)
        _check_stop(self.stop)
        _check_stop_token_ids(self.stop_token_ids)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            _require(isinstance(value, bool), name, "true or false", value)
        if self.structured_outputs is not None:
            _check_structured(self)

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, always as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop


class Resolver:
    """Turns one request's parameters into what the engine takes, for each of its prompts.

    What does not depend on the prompt is checked and computed once, when it is built.

    Raises FieldError where a token id lies outside of the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        grammar_text: Callable[[StructuredOutputsParams], str],
    ) -> None:
        """Check and compute what does not depend on the prompt.

        Args:
            grammar_text: returns a grammar as engines take it; raises FieldError.
        """
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
        """Return what the engine needs for each choice to a prompt of `prompt_len` tokens.

        Choices differ in their seeds; the first one alone asks for the prompt's log-probabilities.

        Args:
            max_tokens_left: bounds a `max_tokens` that was not given, as the model's length does.

        Raises:
            FieldError: the prompt is empty or too long, or max_tokens or min_tokens do not fit
                behind it.
        """
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
    """Return the rules, or None where they would change nothing."""
    rules = LogitRules(
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        bias_token_ids=tuple(params.logit_bias),
        biases=tuple(float(bias) for bias in params.logit_bias.values()),
        allowed_tokens=_bitmap(params.allowed_token_ids or ()),
        min_tokens=params.min_tokens,
    )
    return None if rules == _NO_RULES else rules


def _bitmap(token_ids: Sequence[int]) -> bytes:
    """Return one bit per token up to the highest of these, lowest bit first; set for these."""
    bits = np.zeros(max(token_ids, default=-1) + 1, dtype=bool)
    bits[list(token_ids)] = True
    return np.packbits(bits, bitorder="little").tobytes()


_NO_RULES = LogitRules(0.0, 0.0, 1.0, (), (), b"", 0)


def _require(is_met: bool, param: str, wanted: str, found: object) -> None:
    if not is_met:
        raise FieldError(param, wanted, found)


def _check_number(param: str, value: object, wanted: str, low: float, high: float) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_met = is_number and low <= value <= high and value != math.inf  # type: ignore[operator]
    _require(is_met, param, wanted, value)


def _check_int(param: str, value: object, wanted: str, low: int, high: int) -> None:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    _require(is_int and low <= value <= high, param, wanted, value)  # type: ignore[operator]


def _check_min_tokens(min_tokens: int, max_tokens: int | None) -> None:
    _check_int("min_tokens", min_tokens, "an integer from 0 up", 0, 2**31 - 1)
    if max_tokens is not None and min_tokens > max_tokens:
        raise FieldError("min_tokens", f"at most max_tokens={max_tokens}", min_tokens)


def _check_penalties(params: SamplingParams) -> None:
    wanted = f"a number from -{MAX_PENALTY} to {MAX_PENALTY}"
    for name in ("presence_penalty", "frequency_penalty"):
        _check_number(name, getattr(params, name), wanted, -MAX_PENALTY, MAX_PENALTY)
    least, most = 1 / MAX_REPETITION, MAX_REPETITION
    wanted = f"a number from {least:g} to {most:g}"
    _check_number("repetition_penalty", params.repetition_penalty, wanted, least, most)


def _check_structured(params: SamplingParams) -> None:
    """Refuse what would leave no token to draw, or no end, where a grammar decides both."""
    wanted, found = StructuredOutputsParams.__name__, params.structured_outputs
    is_one = isinstance(found, StructuredOutputsParams)
    _require(is_one, "structured_outputs", f"a {wanted}", Words(repr(found)[:100]))
    for name, none in (("ignore_eos", False), ("min_tokens", 0), ("allowed_token_ids", None)):
        value = getattr(params, name)
        text = Words(str(value)[:100])
        _require(value == none, name, "none with structured output, which decides it", text)


def _check_logit_bias(logit_bias: object) -> None:
    if not isinstance(logit_bias, dict):
        raise FieldError("logit_bias", "token ids with a bias each", logit_bias)
    wanted = f"biases from -{MAX_BIAS} to {MAX_BIAS}"
    _require(len(logit_bias) <= MAX_BIASES, "logit_bias", f"at most {MAX_BIASES}", len(logit_bias))
    for token_id, bias in logit_bias.items():
        _check_int("logit_bias", token_id, "token ids from 0 up", 0, 2**31 - 1)
        _check_number("logit_bias", bias, wanted, -MAX_BIAS, MAX_BIAS)


def _check_allowed_token_ids(token_ids: object) -> None:
    if not isinstance(token_ids, list) or not token_ids:
        raise FieldError("allowed_token_ids", "a list of token ids", token_ids)
    # A client's list may be as long as the vocabulary: no call for each entry.
    if set(map(type, token_ids)) == {int}:
        token_ids = [min(token_ids), max(token_ids)]
    for token_id in token_ids:
        _check_int("allowed_token_ids", token_id, "token ids from 0 up", 0, 2**31 - 1)


def _check_vocabulary(param: str, token_ids: Collection[int], vocab_size: int) -> None:
    wanted = f"token ids from 0 to {vocab_size - 1}"
    largest = max(token_ids, default=0)
    _require(largest < vocab_size, param, wanted, largest)


def _check_stop(stop: object) -> None:
    wanted = "a text or a list of texts"
    strings = [stop] if isinstance(stop, str) else stop
    if not isinstance(strings, list):
        raise FieldError("stop", wanted, stop)
    _require(len(strings) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS}", len(strings))
    for string in strings:
        _require(isinstance(string, str), "stop", wanted, string)
        _require(string != "", "stop", "texts of at least one character", Words("an empty one"))
        wanted_chars = f"texts of at most {MAX_STOP_CHARS} characters"
        _require(
            len(string) <= MAX_STOP_CHARS, "stop", wanted_chars, Words(f"{len(string)} characters")
        )


def _check_stop_token_ids(token_ids: object) -> None:
    if not isinstance(token_ids, list):
        raise FieldError("stop_token_ids", "a list of token ids", token_ids)
    wanted = f"at most {MAX_STOP_TOKEN_IDS}"
    _require(len(token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", wanted, len(token_ids))
    for token_id in token_ids:
        _check_int("stop_token_ids", token_id, "token ids from 0 up", 0, 2**31 - 1)
