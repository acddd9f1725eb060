"""The bodies of the two generating endpoints: their fields, and how JSON becomes structs.

Every field that OpenAI or vLLM documents is in a table here. *Implemented*: a field of the struct
that the object becomes. *Inert*: known and not built yet, so accepted only with the value that
changes nothing; one that gets built moves from the table into the struct. *Unknown*: refused. A
null is the same as leaving the field out, in every class.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from serve.openai.errors import BadRequest
from serve.sampling import ParameterError, SamplingParams

S = TypeVar("S", bound=msgspec.Struct)


class FieldTable(msgspec.Struct, frozen=True):
    """The fields of one kind of object: implemented by `struct`, or inert at these values."""

    struct: type[msgspec.Struct]
    inert: dict[str, tuple[Any, ...]]

    def screen(self, found: Any, at: str = "") -> Any:
        """Return `found` with the fields that are implemented and given.

        Anything but an object is returned as it is: converting it gives the better message.

        Raises:
            BadRequest: an unknown field, or an inert one at another value.
        """
        if not isinstance(found, dict):
            return found
        given = {name: value for name, value in found.items() if value is not None}
        for name in found:
            self._check_name(name, at)
        for name, value in given.items():
            self._check_inert(name, value, at)
        return {name: given[name] for name in given if name not in self.inert}

    def _check_name(self, name: str, at: str) -> None:
        if name not in self.struct.__struct_fields__ and name not in self.inert:
            param = join_path(at, name)
            raise BadRequest(f"{param}: unknown field", param=param)

    def _check_inert(self, name: str, value: Any, at: str) -> None:
        accepted = self.inert.get(name)
        if accepted is None or any(_is_same(value, one) for one in accepted):
            return
        param = join_path(at, name)
        wanted = " or ".join(_json(one) for one in (*accepted, None))
        raise BadRequest(
            f"{param}: wanted {wanted}, found {_json(value)}; other values are not built yet",
            param=param,
        )


def convert(found: Any, kind: type[S]) -> S:
    """Return the struct that a screened object holds.

    Raises:
        BadRequest: a field has another type; `param` is its path as in `messages[0].content`.
    """
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise _bad_type(str(error)) from error


def join_path(at: str, name: str) -> str:
    """Return the path of a field of the object at `at`; empty is the body itself."""
    return f"{at}.{name}" if at else name


def _bad_type(message: str) -> BadRequest:
    """Put msgspec's «Expected `str`, got `int` - at `$.messages[0].content`» in Lockstep's form."""
    text, _, path = message.partition(" - at `$")
    param = path.strip("`").lstrip(".") or None
    if missing := re.fullmatch(r"Object missing required field `(.+)`", text):
        param = join_path(param or "", missing[1])
        return BadRequest(f"{param}: wanted a value, found none", param=param)
    text = re.sub(r"Expected (.+), got (.+)", r"wanted \1, found \2", text).replace("`", "")
    return BadRequest(f"{param or 'body'}: {text}", param=param)


def _is_same(found: Any, accepted: Any) -> bool:
    """Compare as JSON does: 1 and 1.0 are the same, 1 and true are not."""
    return isinstance(found, bool) == isinstance(accepted, bool) and bool(found == accepted)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


_ROLES = ("system", "developer", "user", "assistant")
_ROLES_NOT_BUILT = ("tool", "function")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`, accepted only with `stream` true."""

    include_usage: bool = False
    """Send one more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Usage so far in every chunk, as in vLLM."""


class RequestFields(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of both endpoints. None of them is null: a null field is left out before."""

    model: str | None = None
    """The name that is served; null: whichever that is."""
    n: int = 1
    """Choices for each prompt. Prompts times `n` are at most `MAX_SEQUENCES`, or as many as may be
    alive."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that have this probability together."""
    top_k: int = 0
    """Draw from so many of the likeliest tokens only."""
    min_p: float = 0.0
    """Least probability of a token that is drawn, relative to the likeliest token's."""
    presence_penalty: float = 0.0
    """Taken from the logit of every token that the output has; encourages repetition below 0."""
    frequency_penalty: float = 0.0
    """The same for each time that the output has the token."""
    repetition_penalty: float = 1.0
    """Makes tokens of prompt and output less likely; below 1 more likely."""
    logit_bias: dict[str, float] = {}
    """A bias of at most `MAX_BIAS` either way for each of up to `MAX_BIASES` token ids, which are
    text here, as JSON's keys are."""
    allowed_token_ids: list[int] | None = None
    """The only tokens that may be drawn, at most as many as the vocabulary has; null allows all."""
    seed: int | None = None
    """Same seed, same tokens: alone, in any batch, and when the request is moved or computed again;
    null draws one."""
    min_tokens: int = 0
    """Output tokens before a stop token or a stop string may end the text."""
    max_tokens: int | None = None
    """Output tokens at most; null: `DEFAULT_MAX_TOKENS` in a completion, what the model's length
    leaves in a chat."""
    stop: str | list[str] = []
    """What ends the output: up to `MAX_STOP_STRINGS` texts of up to `MAX_STOP_CHARS` characters."""
    stop_token_ids: list[int] = []
    """Up to `MAX_STOP_TOKEN_IDS` tokens that end the output, beside the checkpoint's own."""
    ignore_eos: bool = False
    """Go on behind the checkpoint's end-of-sequence tokens."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Accepted only with `stream` true."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token but the first, and those of so many of the
    likeliest tokens in its place. Not with `stream` true."""
    return_token_ids: bool = False
    """Return the ids of prompt and output tokens as well."""

    def _sampling_params(
        self, max_tokens: int | UnsetType | None, logprobs: int | None
    ) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            wanted = "none with stream true: they are given once, with the whole answer"
            raise ParameterError("prompt_logprobs", wanted, self.prompt_logprobs)
        return SamplingParams(
            n=self.n,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=_token_ids_of(self.logit_bias),
            allowed_token_ids=self.allowed_token_ids,
            seed=self.seed,
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            logprobs=logprobs,
            prompt_logprobs=self.prompt_logprobs,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
        )


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content."""

    type: str
    """`text`; other parts are not built yet."""
    text: str
    """The text of the part."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    """`system`, `developer`, `user` or `assistant`."""
    content: str | list[TextPart]
    """A text, or a list of text parts."""

    def for_template(self, takes_parts: bool) -> dict[str, Any]:
        """Return the message as the chat template takes it.

        Parts are joined by line ends for a template that takes none, as in vLLM.
        """
        content = self.content
        if isinstance(content, str):
            return {"role": self.role, "content": content}
        if takes_parts:
            return {"role": self.role, "content": msgspec.to_builtins(content)}
        return {"role": self.role, "content": "\n".join(part.text for part in content)}

    @property
    def num_chars(self) -> int:
        """Characters of text."""
        content = self.content
        return len(content) if isinstance(content, str) else sum(len(p.text) for p in content)


class ChatRequest(RequestFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    """The conversation: at least one message and at most `max_model_len`, with at most as many
    characters as `max_model_len` of the model's longest tokens."""
    max_completion_tokens: int | None = None
    """Wins over max_tokens, its older name."""
    logprobs: bool = False
    """Return the log-probability of each output token."""
    top_logprobs: int = 0
    """So many of the likeliest tokens in each place, with theirs; needs `logprobs` true."""
    add_generation_prompt: bool | None = None
    """Begin the assistant's turn behind the conversation; null: unless the final message is
    continued."""
    continue_final_message: bool = False
    """Go on with the final message instead of answering it."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens to those that the chat template writes."""
    chat_template: str | None = None
    """The name of one of the checkpoint's own; a text is refused, since it is a program."""
    chat_template_kwargs: dict[str, Any] = {}
    """Further variables for the chat template."""

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; without a limit, output ends with the model's length.

        Raises:
            ParameterError: named as the client spelt the field.
        """
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs", "logprobs to be true with it", "logprobs false")
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        logprobs = self.top_logprobs if self.logprobs else None
        try:
            return self._sampling_params(max_tokens, logprobs)
        except ParameterError as error:
            raise error.renamed(self.spelling(error.param)) from error

    def spelling(self, param: str) -> str:
        """Return the JSON field behind a parameter of sampling."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        return {"logprobs": "top_logprobs", "prompt": "messages"}.get(param, param)


class CompletionRequest(RequestFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of either: up to `MAX_SEQUENCES` prompts, or as many as may be
    alive. A text has at most as many characters as `max_model_len` of the model's longest
    tokens."""
    logprobs: int | None = None
    """Return the log-probability of each output token, and those of so many of the likeliest in its
    place; 0: its own alone."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to a prompt that is a text."""

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; without a limit, output has the default one.

        Raises:
            ParameterError: names the field.
        """
        max_tokens = UNSET if self.max_tokens is None else self.max_tokens
        return self._sampling_params(max_tokens, self.logprobs)

    def spelling(self, param: str) -> str:
        """Return the JSON field behind a parameter of sampling: the same."""
        return param

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids.

        Raises:
            BadRequest: empty, or a mixture of texts, ids and lists.
        """
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            found = "an empty list" if not kinds else "a mixture"
            wanted = "a text, token ids, or a list of either"
            raise BadRequest(f"prompt: wanted {wanted}, found {found}", param="prompt")
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


def _token_ids_of(logit_bias: dict[str, float]) -> dict[int, float]:
    for key in logit_bias:
        if not key.isdecimal() or len(key) > 10:
            raise ParameterError("logit_bias", "token ids as keys", repr(key))
    return {int(key): bias for key, bias in logit_bias.items()}


# --- the tables: inert fields with the values that change nothing; null is always one ----------

_INERT: dict[str, tuple[Any, ...]] = {
    # OpenAI
    "user": (),
    "response_format": ({"type": "text"},),
    # vLLM: sampling
    "best_of": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "watermarking": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "logprob_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "repetition_detection": (),
    "thinking_token_budget": (),
    # vLLM: structured output, in its present and its former spellings
    "structured_outputs": (),
    "structural_tag": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    # vLLM: the request
    "echo": (False,),
    "priority": (0,),
    "request_id": (),
    "session_id": (),
    "cache_salt": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "stream_interval": (1,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_mm_kwargs": (True,),
    "routed_experts_prompt_start": (0,),
}

CHAT_FIELDS = FieldTable(
    struct=ChatRequest,
    inert={
        **_INERT,
        # OpenAI
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto",),
        "safety_identifier": (),
        "prompt_cache_key": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "moderation": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True,),
        "functions": ([],),
        "function_call": ("none",),
        # vLLM
        "include_reasoning": (True,),
        "documents": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_prompt_text": (False,),
    },
)

COMPLETION_FIELDS = FieldTable(
    struct=CompletionRequest, inert={**_INERT, "suffix": (), "prompt_embeds": ()}
)

_STREAM_OPTIONS_FIELDS = FieldTable(struct=StreamOptions, inert={"include_obfuscation": (False,)})

# Clients send an assistant's message back as they received it, with these empty.
_MESSAGE_FIELDS = FieldTable(
    struct=Message,
    inert={
        "name": (),
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "reasoning": (),
        "reasoning_content": (),
    },
)

_PART_FIELDS = FieldTable(struct=TextPart, inert={"prompt_cache_breakpoint": ()})


# --- from bytes --------------------------------------------------------------------------------


def parse_chat(body: bytes) -> ChatRequest:
    """Return the chat request in `body`.

    Raises:
        BadRequest: not JSON, or a field that is missing, unknown, not built or of another type.
    """
    fields = _parse_object(body, CHAT_FIELDS)
    if isinstance(fields.get("messages"), list):
        fields["messages"] = [
            _screen_message(message, f"messages[{i}]")
            for i, message in enumerate(fields["messages"])
        ]
    request = convert(fields, ChatRequest)
    if not request.messages:
        raise BadRequest("messages: wanted at least one, found none", param="messages")
    for i, message in enumerate(request.messages):
        _check_role(message.role, f"messages[{i}].role")
    if request.add_generation_prompt and request.continue_final_message:
        raise BadRequest(
            "continue_final_message: wanted false with add_generation_prompt true, found true",
            param="continue_final_message",
        )
    return request


def parse_completion(body: bytes) -> CompletionRequest:
    """Return the completions request in `body`.

    Raises:
        BadRequest: not JSON, or a field that is missing, unknown, not built or of another type.
    """
    return convert(_parse_object(body, COMPLETION_FIELDS), CompletionRequest)


def _parse_object(body: bytes, table: FieldTable) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise BadRequest(f"body: wanted JSON, found {len(body)} bytes: {error}") from error
    if not isinstance(found, dict):
        raise BadRequest(f"body: wanted a JSON object, found {type(found).__name__}")
    fields: dict[str, Any] = table.screen(found)
    if "stream_options" in fields:
        fields["stream_options"] = _STREAM_OPTIONS_FIELDS.screen(
            fields["stream_options"], "stream_options"
        )
        if fields.get("stream", False) is False:
            message = "stream_options: wanted only with stream true, found stream false"
            raise BadRequest(message, param="stream_options")
    return fields


def _screen_message(found: Any, at: str) -> Any:
    message = _MESSAGE_FIELDS.screen(found, at)
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        message["content"] = [
            _screen_part(part, f"{at}.content[{i}]") for i, part in enumerate(message["content"])
        ]
    return message


def _screen_part(found: Any, at: str) -> Any:
    kind = found.get("type") if isinstance(found, dict) else None
    if isinstance(kind, str) and kind != "text":
        param = f"{at}.type"
        message = f"{param}: wanted text, found {kind}; other parts are not built yet"
        raise BadRequest(message, param=param)
    return _PART_FIELDS.screen(found, at)


def _check_role(role: str, param: str) -> None:
    if role in _ROLES:
        return
    built = "; not built yet" if role in _ROLES_NOT_BUILT else ""
    raise BadRequest(f"{param}: wanted {', '.join(_ROLES)}, found {role}{built}", param=param)
