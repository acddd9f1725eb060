"""POST /v1/completions: one or several prompts in, `n` texts for each out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from serve.event_loop import Check
from serve.openai.body import check_limits, check_num_chars
from serve.openai.endpoint import Serving, Stamp
from serve.openai.generation import Choice, Generation, Piece
from serve.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
    completion_logprobs,
    prompt_logprobs,
)
from serve.openai.schema import CompletionRequest, parse_completion
from serve.tokenizer import Tokenizer


class CompletionShape:
    """Reads and writes one completions request; each prompt has `n` choices in a row."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, model: str) -> None:
        self.request = request
        self.params = request.sampling_params()
        self.stamp = Stamp.new("cmpl", model)
        self._tokenizer = tokenizer
        self._prompts = request.prompts()
        self._begun: set[int] = set()
        """Indices of choices that a chunk has mentioned."""

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_prompt_copies(self) -> int:
        return self.request.n

    @property
    def size(self) -> int:
        return sum(map(len, self._prompts))

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        encode, add_special_tokens = self._tokenizer.encode, self.request.add_special_tokens
        return [
            encode(prompt, add_special_tokens, max_tokens=max_tokens, check=check)
            if isinstance(prompt, str)
            else prompt
            for prompt in self._prompts
        ]

    def response(self, generation: Generation) -> msgspec.Struct:
        choices = [
            msgspec.structs.replace(
                self._choice(choice, choice.take()),
                prompt_logprobs=self._prompt_logprobs(generation.first_of(choice)),
            )
            for choice in generation.choices
        ]
        return self._completion(choices, generation.usage())

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        piece = choice.take()
        wants_tokens = self.request.logprobs is not None or self.request.return_token_ids
        if piece.text or piece.finish_reason or (piece.token_ids and wants_tokens):
            yield self._completion([self._choice(choice, piece)], usage)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return self._completion([], usage)

    def _completion(
        self, choices: list[CompletionChoice], usage: Usage | UnsetType | None
    ) -> Completion:
        return Completion(
            id=self.stamp.id,
            created=self.stamp.created,
            model=self.stamp.model,
            choices=choices,
            usage=usage,
        )

    def _choice(self, choice: Choice, piece: Piece) -> CompletionChoice:
        has_begun = choice.index in self._begun
        self._begun.add(choice.index)
        wants_ids = self.request.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            prompt_token_ids=(
                choice.request.prompt_token_ids if wants_ids and not has_begun else UNSET
            ),
            token_ids=piece.token_ids if wants_ids else UNSET,
        )

    def _prompt_logprobs(self, first: Choice) -> PromptLogprobs | UnsetType:
        if self.request.prompt_logprobs is None:
            return UNSET
        token_ids = first.request.prompt_token_ids
        return prompt_logprobs(self._tokenizer, token_ids, first.prompt_logprobs)

    def _logprobs(self, piece: Piece) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        return completion_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, piece.offsets)


def parse_completion_shape(serving: Serving, tokenizer: Tokenizer, body: bytes) -> CompletionShape:
    """Return the request in a JSON body; raises BadRequest and ParameterError."""
    request = parse_completion(body)
    shape = CompletionShape(request, tokenizer, serving.settings.served_model_name)
    check_limits(request, serving.settings, tokenizer, num_prompts=shape.num_prompts)
    for prompt in request.prompts():
        if isinstance(prompt, str):
            check_num_chars("prompt", len(prompt), serving.settings, tokenizer)
    return shape
