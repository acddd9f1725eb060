"""POST /v1/completions: one or several prompts in, `n` texts for each out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from serve.openai.endpoint import Serving, Stamp, beside_the_loop, respond
from serve.openai.errors import BadRequest
from serve.openai.generation import Choice, Generation, Piece
from serve.openai.logprobs import completion_logprobs, prompt_logprobs
from serve.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    Usage,
)
from serve.openai.schema import CompletionRequest, parse_completion
from serve.tokenizer import Tokenizer


class CompletionShape:
    """Reads and writes one completions request; each prompt has `n` choices in a row."""

    def __init__(self, request: CompletionRequest, tokenizer: Tokenizer, model: str) -> None:
        self.request = request
        self.stamp = Stamp.new("cmpl", model)
        self._tokenizer = tokenizer
        # Where each choice's next token starts in its text; an index is here once it has begun.
        self._text_offsets: dict[int, int] = {}

    async def tokenize(self) -> list[list[int]]:
        prompts = self.request.prompts()
        return await beside_the_loop(sum(map(len, prompts)), lambda: self._encode(prompts))

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

    def _encode(self, prompts: list[str | list[int]]) -> list[list[int]]:
        encode, add_special_tokens = self._tokenizer.encode, self.request.add_special_tokens
        return [
            encode(prompt, add_special_tokens) if isinstance(prompt, str) else prompt
            for prompt in prompts
        ]

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
        has_begun = choice.index in self._text_offsets
        wants_ids = self.request.return_token_ids
        return CompletionChoice(
            index=choice.index,
            text=piece.text,
            logprobs=self._logprobs(choice.index, piece),
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

    def _logprobs(self, index: int, piece: Piece) -> CompletionLogprobs | None:
        offset = self._text_offsets.setdefault(index, 0)
        if self.request.logprobs is None:
            return None
        found = completion_logprobs(self._tokenizer, piece.token_ids, piece.logprobs, offset)
        self._text_offsets[index] = offset + sum(len(token) for token in found.tokens)
        return found


async def create_completion(serving: Serving, request: Request) -> Response:
    """Answer POST /v1/completions."""
    return await respond(serving, request, parse_completion_shape)


def parse_completion_shape(serving: Serving, tokenizer: Tokenizer, body: bytes) -> CompletionShape:
    """Return the request in a JSON body; raises BadRequest."""
    request = parse_completion(body)
    limit = serving.settings.max_sequences
    if (found := len(request.prompts())) > limit:
        raise BadRequest(f"prompt: wanted at most {limit} prompts, found {found}", param="prompt")
    if found * max(request.n, 1) > limit:
        wanted = f"at most {limit // found} (the request has {found} prompts)"
        raise BadRequest(f"n: wanted {wanted}, found {request.n}", param="n")
    return CompletionShape(request, tokenizer, serving.settings.served_model_name)
