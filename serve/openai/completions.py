"""POST /v1/completions: one or several prompts in, `n` texts for each out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from itertools import accumulate

import msgspec
from msgspec import UNSET, UnsetType

from serve.config import ApiSettings
from serve.event_loop import Check
from serve.openai.answers import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Usage,
    completion_logprobs,
    limited,
    prompt_logprobs,
)
from serve.openai.generation import Endpoint, Generation
from serve.openai.schema import CompletionRequest, check_num_chars
from serve.requests.choice import Choice, OutputDelta
from serve.requests.tokenizer import Tokenizer, detokenizer


class CompletionRenderer:
    """Reads and writes one completions request; each prompt has `n` choices in a row."""

    has_typed_events = False
    shown_token_ids: frozenset[int] = frozenset()

    def __init__(
        self, request: CompletionRequest, settings: ApiSettings, tokenizer: Tokenizer
    ) -> None:
        self.id = f"cmpl-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model = ""
        self.request = request
        self.params = request.sampling_params()
        self.num_prompt_copies = request.n
        self._tokenizer = tokenizer
        self._prompts = request.prompts()
        self.num_prompts = len(self._prompts)
        self.size = sum(map(len, self._prompts))
        request.check_limits(settings, tokenizer, self.num_prompts)
        for prompt in self._prompts:
            if isinstance(prompt, str):
                check_num_chars("prompt", len(prompt), settings, tokenizer)
        self._echoes: list[str] = []
        """The text of each prompt, where answers begin with it."""
        self._begun: set[int] = set()
        """Indices of choices that a chunk has mentioned."""

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        encode, add_special_tokens = self._tokenizer.encode, self.request.add_special_tokens
        if self.request.echo:
            self._echoes = [self._text_of(prompt, max_tokens) for prompt in self._prompts]
        return [
            encode(prompt, add_special_tokens, max_tokens=max_tokens, check=check)
            if isinstance(prompt, str)
            else prompt
            for prompt in self._prompts
        ]

    def _text_of(self, prompt: str | list[int], max_tokens: int) -> str:
        if isinstance(prompt, str):
            return prompt
        # Ids outside of the vocabulary, and too many of them, are refused next.
        known = [i for i in prompt[: max_tokens + 1] if 0 <= i < self._tokenizer.vocab_size]
        return self._tokenizer.decode(known, self.request.skip_special_tokens)

    def response(self, generation: Generation) -> msgspec.Struct:
        choices = generation.choices
        firsts = [choices[choice.index - choice.index % self.request.n] for choice in choices]
        return self._completion([*map(self._whole, choices, firsts)], generation.usage())

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        found = choice.take()
        wants_tokens = self.request.logprobs is not None or self.request.return_token_ids
        text = found.text or (self._echo(choice) and choice.index not in self._begun)
        if text or found.finish_reason or (found.token_ids and wants_tokens):
            yield self._completion([self._choice(choice, found)], usage)

    def ending(self, generation: Generation) -> Iterator[msgspec.Struct]:
        options = self.request.stream_options
        if options is not None and options.include_usage:
            yield self._completion([], generation.usage())

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=choices,
            usage=usage,
        )

    def _whole(self, choice: Choice, first: Choice) -> CompletionChoice:
        found = self._choice(choice, choice.take())
        if self.request.echo and found.logprobs is not None:
            found = msgspec.structs.replace(found, logprobs=self._echoed(first, found.logprobs))
        prompt = prompt_logprobs(self._tokenizer, first, self.request.prompt_logprobs)
        return msgspec.structs.replace(found, prompt_logprobs=prompt)

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self.request.n] if self._echoes else ""

    def _echoed(self, first: Choice, output: CompletionLogprobs) -> CompletionLogprobs:
        assert self.request.logprobs is not None
        echo, token_ids = self._echo(first), first.request.prompt_token_ids
        prompt = completion_logprobs(
            self._tokenizer,
            token_ids[1:],
            limited(first.prompt_logprobs, self.request.logprobs),
            [min(offset, len(echo)) for offset in self._offsets(token_ids)],
        )
        return CompletionLogprobs(
            text_offset=prompt.text_offset + [len(echo) + at for at in output.text_offset],
            token_logprobs=[None, *prompt.token_logprobs, *output.token_logprobs],
            tokens=[self._tokenizer.token_text(token_ids[0]), *prompt.tokens, *output.tokens],
            top_logprobs=[None, *prompt.top_logprobs, *output.top_logprobs],
        )

    def _offsets(self, token_ids: list[int]) -> list[int]:
        is_skipping = self.request.skip_special_tokens
        skipped = self._tokenizer.special_token_ids if is_skipping else frozenset()
        text = detokenizer(self._tokenizer, skipped, ())
        lengths = [len(text.step(token_id)) for token_id in token_ids]
        return list(accumulate(lengths[:-1], initial=0))

    def _choice(self, choice: Choice, found: OutputDelta) -> CompletionChoice:
        has_begun = choice.index in self._begun
        self._begun.add(choice.index)
        wants_ids = self.request.return_token_ids
        logprobs: CompletionLogprobs | None = None
        if self.request.logprobs is not None:
            logprobs = completion_logprobs(
                self._tokenizer, found.token_ids, found.logprobs, found.offsets
            )
        return CompletionChoice(
            index=choice.index,
            text=found.text if has_begun else self._echo(choice) + found.text,
            logprobs=logprobs,
            finish_reason=found.finish_reason,
            stop_reason=found.stop_reason,
            prompt_token_ids=(
                choice.request.prompt_token_ids if wants_ids and not has_begun else UNSET
            ),
            token_ids=found.token_ids if wants_ids else UNSET,
        )


COMPLETIONS = Endpoint(CompletionRequest, CompletionRenderer)
