"""POST /v1/chat/completions: a conversation in, the assistant's message out, or `n` of them."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import UNSET, UnsetType

from serve.event_loop import Check
from serve.openai.body import check_limits, check_num_chars
from serve.openai.endpoint import Serving, Stamp
from serve.openai.errors import BadRequest
from serve.openai.generation import Choice, Generation, Piece
from serve.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    PromptLogprobs,
    Usage,
    chat_logprobs,
    prompt_logprobs,
)
from serve.openai.schema import ChatRequest, parse_chat
from serve.tokenizer import Tokenizer

MESSAGE_CHARS = 64
"""About what a template adds to a message: roles and markers are work too."""


class ChatShape:
    """Reads and writes one chat request."""

    num_prompts = 1
    num_prompt_copies = 1

    def __init__(self, request: ChatRequest, tokenizer: Tokenizer, model: str) -> None:
        self.request = request
        self.params = request.sampling_params()
        self.stamp = Stamp.new("chatcmpl", model)
        self._tokenizer = tokenizer
        self._roles_sent: set[int] = set()

    @property
    def size(self) -> int:
        messages = self.request.messages
        return sum(MESSAGE_CHARS + message.num_chars for message in messages)

    def encode(self, max_tokens: int, check: Check) -> list[list[int]]:
        request, tokenizer = self.request, self._tokenizer
        takes_parts = tokenizer.takes_parts(request.chat_template)
        add_generation_prompt = request.add_generation_prompt
        if add_generation_prompt is None:
            add_generation_prompt = not request.continue_final_message
        prompt = tokenizer.apply_chat_template(
            [message.for_template(takes_parts) for message in request.messages],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            chat_template=request.chat_template,
            max_tokens=max_tokens,
            check=check,
            **request.chat_template_kwargs,
        )
        return [prompt]

    def response(self, generation: Generation) -> msgspec.Struct:
        first = generation.choices[0]
        return ChatCompletion(
            id=self.stamp.id,
            created=self.stamp.created,
            model=self.stamp.model,
            choices=[self._choice(choice.index, choice.take()) for choice in generation.choices],
            usage=generation.usage(),
            prompt_logprobs=self._prompt_logprobs(first),
            prompt_token_ids=self._prompt_token_ids(first),
        )

    def chunks(self, choice: Choice, usage: Usage | UnsetType | None) -> Iterator[msgspec.Struct]:
        if choice.index not in self._roles_sent:
            self._roles_sent.add(choice.index)
            yield self._chunk(
                self._role_choice(choice.index), usage, self._prompt_token_ids(choice)
            )
        piece = choice.take()
        wants_tokens = self.request.logprobs or self.request.return_token_ids
        if piece.text or piece.finish_reason or (piece.token_ids and wants_tokens):
            yield self._chunk(self._chunk_choice(choice.index, piece), usage, UNSET)

    def usage_chunk(self, usage: Usage) -> msgspec.Struct:
        return ChatChunk(
            id=self.stamp.id,
            created=self.stamp.created,
            model=self.stamp.model,
            choices=[],
            usage=usage,
        )

    def _choice(self, index: int, piece: Piece) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=ChatMessage(content=piece.text),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.request.return_token_ids else UNSET,
        )

    def _chunk(
        self,
        choice: ChatChunkChoice,
        usage: Usage | UnsetType | None,
        prompt_token_ids: list[int] | UnsetType,
    ) -> ChatChunk:
        return ChatChunk(
            id=self.stamp.id,
            created=self.stamp.created,
            model=self.stamp.model,
            choices=[choice],
            usage=usage,
            prompt_token_ids=prompt_token_ids,
        )

    def _role_choice(self, index: int) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(role="assistant", content=""),
            logprobs=None,
            finish_reason=None,
            stop_reason=None,
        )

    def _chunk_choice(self, index: int, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(
            index=index,
            delta=ChatDelta(content=piece.text) if piece.text else ChatDelta(),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=piece.token_ids if self.request.return_token_ids else UNSET,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self.request.logprobs:
            return None
        return chat_logprobs(self._tokenizer, piece.token_ids, piece.logprobs)

    def _prompt_logprobs(self, first: Choice) -> PromptLogprobs | UnsetType:
        if self.request.prompt_logprobs is None:
            return UNSET
        token_ids = first.request.prompt_token_ids
        return prompt_logprobs(self._tokenizer, token_ids, first.prompt_logprobs)

    def _prompt_token_ids(self, choice: Choice) -> list[int] | UnsetType:
        return choice.request.prompt_token_ids if self.request.return_token_ids else UNSET


def parse_chat_shape(serving: Serving, tokenizer: Tokenizer, body: bytes) -> ChatShape:
    """Return the request in a JSON body; raises BadRequest and ParameterError."""
    request = parse_chat(body)
    shape = ChatShape(request, tokenizer, serving.settings.served_model_name)
    check_limits(request, serving.settings, tokenizer, num_prompts=1)
    max_messages = serving.settings.max_model_len
    if (found := len(request.messages)) > max_messages:
        wanted = f"at most {max_messages}, a token of the model's length for each"
        raise BadRequest(f"messages: wanted {wanted}, found {found}", param="messages")
    num_chars = sum(message.num_chars for message in request.messages)
    check_num_chars("messages", num_chars, serving.settings, tokenizer)
    _check_template(request, tokenizer)
    return shape


def _check_template(request: ChatRequest, tokenizer: Tokenizer) -> None:
    """Refuse what would run a client's program, or change how the template is called."""
    if request.chat_template not in (None, *tokenizer.template_names):
        names = ", ".join(tokenizer.template_names) or "it has one without a name"
        message = (
            f"chat_template: wanted the name of one of the checkpoint's templates ({names}), since "
            f"a template is a program, found {len(request.chat_template or '')} characters"
        )
        raise BadRequest(message, param="chat_template")
    for name in request.chat_template_kwargs:
        if name in tokenizer.template_parameters:
            param = f"chat_template_kwargs.{name}"
            raise BadRequest(f"{param}: wanted variables of the template only", param=param)
