"""The requests for completions and chats, as structs of the fields that are implemented. How a body
becomes one is `body.py`; what no type says of it is checked by the structs themselves."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from cluster.wire.messages import MAX_BIASES, MaxTokens
from compile.errors import FieldError, Words
from model.fields import says, words_for
from serve.clients import CacheSalt
from serve.config import ApiSettings
from serve.openai.body import join_path
from serve.requests.sampling import PromptFields, SamplingParams, TokenBias, TopLogprobs
from serve.requests.structured import StructuredOutputsParams
from serve.requests.tokenizer import Tokenizer

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_TOOLS = 128
"""OpenAI's bound on `tools`; more get 400."""
LABELS = frozenset({"user", "safety_identifier", "prompt_cache_key"})
"""By these OpenAI tells a client's own users apart, in its records and in its cache."""
# Clients send an assistant's message back as they received it, with some of its fields empty, or as
# they keep it: LiteLLM adds this one, openai's `parse` what it made of a text, and who joins a
# stream's deltas leaves `index` in the calls.
_OF_LITELLM = frozenset({"provider_specific_fields"})
_GUIDED_KINDS = ("json", "regex", "choice", "grammar")
_FIELDS_OF_ROLES = {
    "tool_call_id": "tool",
    "tool_calls": "assistant",
    "reasoning": "assistant",
    "reasoning_content": "assistant",
}
"""Fields of a message that only one role has."""

Inert = dict[str, tuple[Any, ...]]
"""Of fields that are known but not built: the values that have no effect. Null never has one."""
AdapterName = Annotated[str, Meta(min_length=1, max_length=256), says("1 to 256 characters")]
MAX_PATH_CHARS = 4096
"""Of an adapter's directory."""
LogitBias = Annotated[dict[str, TokenBias], Meta(max_length=MAX_BIASES)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`, accepted only with `stream` true."""

    INERT: ClassVar[Inert] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    """Send one more chunk at the end, with the usage of the whole request."""
    continuous_usage_stats: bool = False
    """Usage so far in every chunk, as in vLLM."""


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format.json_schema`."""

    name: str
    """What the client calls it."""
    schema: dict[str, Any]
    """The JSON schema: at most `MAX_STRUCTURED_CHARS` characters. A keyword that cannot be enforced
    is refused by name."""
    description: str | None = None
    """For people."""
    strict: bool = False
    """The answer fits the schema in either case."""


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True):
    """`response_format`."""

    type: Annotated[
        Literal["text", "json_object", "json_schema"], says("text, json_object, json_schema")
    ]
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """The schema, with type `json_schema` alone."""

    def __post_init__(self) -> None:
        if (self.type == "json_schema") != (self.json_schema is not None):
            found = Words("one" if self.json_schema is not None else "none")
            wanted = "one with type json_schema alone"
            raise FieldError("response_format.json_schema", wanted, found)


class StructuredOutputs(StructuredOutputsParams, frozen=True, kw_only=True):
    """`structured_outputs`, as vLLM has it: exactly one of the fields is given."""

    INERT: ClassVar[Inert] = {
        "structural_tag": (),
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "disable_fallback": (False,),
        "whitespace_pattern": (),
    }


class RequestFields(PromptFields, frozen=True, kw_only=True):
    """The fields of both endpoints. None of them is null: a null field is left out before."""

    INERT: ClassVar[Inert] = {
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
        # vLLM: structured output
        "structural_tag": (),
        "guided_decoding_backend": (),
        "guided_whitespace_pattern": (),
        # vLLM: the request
        "priority": (0,),
        "request_id": (),
        "session_id": (),
        "kv_transfer_params": (),
        "ec_transfer_params": (),
        "vllm_xargs": ({},),
        "stream_interval": (1,),
        "return_tokens_as_token_ids": (False,),
        "return_token_offsets": (False,),
        "return_mm_kwargs": (True,),
        "routed_experts_prompt_start": (0,),
    }

    model: str | None = None
    """The name that is served; null: whichever that is."""
    logit_bias: LogitBias = msgspec.field(default_factory=dict)
    """A bias of at most `MAX_BIAS` either way for each of up to `MAX_BIASES` token ids, which are
    text here, as JSON's keys are."""
    stream: bool = False
    """Send the answer as server-sent events while it is generated."""
    stream_options: StreamOptions | None = None
    """Accepted only with `stream` true."""
    return_token_ids: bool = False
    """Return the ids of prompt and output tokens as well."""
    cache_salt: CacheSalt | None = None
    """Find in the prefix cache only what requests with the same salt, and the same key, have left
    there: 1 to `MAX_SALT_CHARS` characters."""
    response_format: ResponseFormat | None = None
    """Hold the text to a JSON schema, or to any JSON object. Of this field, `structured_outputs`
    and the four below at most one is given. None goes with `ignore_eos`, `min_tokens` or
    `allowed_token_ids`. The text ends where it fits, unless `max_tokens` cuts it."""
    structured_outputs: StructuredOutputs | None = None
    """Hold the text to one of vLLM's forms, each of at most `MAX_STRUCTURED_CHARS` characters."""
    guided_json: str | dict[str, Any] | None = None
    """The former name of `structured_outputs.json`."""
    guided_regex: str | None = None
    """The former name of `structured_outputs.regex`."""
    guided_choice: list[str] | None = None
    """The former name of `structured_outputs.choice`."""
    guided_grammar: str | None = None
    """The former name of `structured_outputs.grammar`."""

    def __post_init__(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "only with stream true", Words("stream false"))

    def check_limits(
        self, settings: ApiSettings, tokenizer: Tokenizer, num_prompts: int = 1
    ) -> None:
        """Refuse too many sequences, and lists longer than the vocabulary; raises FieldError."""
        limit = settings.max_sequences
        if num_prompts > limit:
            raise FieldError("prompt", f"at most {limit} prompts", num_prompts)
        if num_prompts * self.n > limit:
            wanted = f"at most {limit // num_prompts}"
            if num_prompts > 1:
                wanted += f" (the request has {num_prompts} prompts)"
            raise FieldError("n", wanted, self.n)
        num_allowed = len(self.allowed_token_ids or ())
        if num_allowed > tokenizer.vocab_size:
            wanted = f"at most {tokenizer.vocab_size} token ids, the vocabulary's"
            raise FieldError("allowed_token_ids", wanted, num_allowed)

    def _sampling_params(
        self, max_tokens: int | UnsetType | None, logprobs: int | None
    ) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            wanted = "none with stream true: they are given once, with the whole answer"
            raise FieldError("prompt_logprobs", wanted, self.prompt_logprobs)
        for key in self.logit_bias:
            if not key.isdecimal() or len(key) > 10:
                raise FieldError("logit_bias", "token ids as keys", key)
        return SamplingParams(
            **{name: getattr(self, name) for name in PromptFields.__struct_fields__},
            logit_bias={int(key): bias for key, bias in self.logit_bias.items()},
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured_outputs=self._structured_outputs(),
        )

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        found = self._structured_fields()
        if len(found) > 1:
            raise FieldError(found[1], f"none beside {found[0]}", Words("both"))
        if not found:
            return None
        if self.structured_outputs is not None:
            return self.structured_outputs
        kind = found[0].removeprefix("guided_")
        fields = {kind: getattr(self, found[0])}
        if (wanted := self.response_format) is not None and kind == "response_format":
            schema = wanted.json_schema
            fields = {"json_object": True} if schema is None else {"json": schema.schema}
        try:
            return StructuredOutputsParams(**fields)
        except FieldError as error:
            raise error.renamed(self._structured_spelling(error.field)) from error

    def _structured_fields(self) -> list[str]:
        found = ["response_format"] if self.formats_text else []
        others = ("structured_outputs", *(f"guided_{kind}" for kind in _GUIDED_KINDS))
        return found + [name for name in others if getattr(self, name) is not None]

    @property
    def formats_text(self) -> bool:
        """Whether `response_format` holds the text to something."""
        return self.response_format is not None and self.response_format.type != "text"

    def _structured_spelling(self, param: str) -> str:
        """Return the JSON field behind a field of `structured_outputs`."""
        if not param.startswith("structured_outputs"):
            return param
        name = next(iter(self._structured_fields()), param)
        if name == "response_format" and param.endswith(".json"):
            return "response_format.json_schema.schema"
        return param if name == "structured_outputs" else name


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content."""

    INERT: ClassVar[Inert] = {"prompt_cache_breakpoint": ()}

    type: Annotated[Literal["text"], says("text", {"": "other parts are not built yet"})]
    """`text`; other parts are not built yet."""
    text: str
    """The text of the part."""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call that the assistant made in an earlier turn."""

    IGNORED: ClassVar[frozenset[str]] = _OF_LITELLM | {"parsed_arguments"}

    name: str
    """Its name."""
    arguments: str
    """JSON. The chat template gets the object that it holds, or the text where it holds none."""

    def arguments_for_template(self) -> Any:
        """Return the object that the arguments hold, or their text where they hold none."""
        if not self.arguments.strip():
            return {}
        try:
            found = msgspec.json.decode(self.arguments)
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return self.arguments
        return found if isinstance(found, dict) else self.arguments


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that the assistant made in an earlier turn."""

    IGNORED: ClassVar[frozenset[str]] = _OF_LITELLM | {"index"}

    id: str
    """What `tool_call_id` of the message with its result repeats."""
    type: Literal["function"] = "function"
    """`function`."""
    function: CalledFunction
    """What was called."""

    def for_template(self) -> dict[str, Any]:
        function = self.function
        called = {"name": function.name, "arguments": function.arguments_for_template()}
        return {"id": self.id, "type": "function", "function": called}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    INERT: ClassVar[Inert] = {
        "refusal": (),
        "annotations": ([],),
        "audio": (),
        "function_call": (),
    }
    IGNORED: ClassVar[frozenset[str]] = _OF_LITELLM | {"parsed"}

    role: Annotated[
        Literal["system", "developer", "user", "assistant", "tool"],
        says(", ".join(ROLES), {"function": "not built yet"}),
    ]
    """`system`, `developer`, `user`, `assistant` or `tool`."""
    content: str | list[TextPart] | None = None
    """A text, or a list of text parts; may be left out beside `tool_calls`."""
    tool_calls: list[ToolCall] = []
    """The calls of an assistant's turn, as they were answered."""
    tool_call_id: str | None = None
    """Of a `tool` message: the call whose result it is."""
    name: str | None = None
    """Who speaks, or of a `tool` message the function that was called, for templates that write
    it."""
    reasoning: str | None = None
    """Of an assistant's turn: what it thought, for templates that write it."""
    reasoning_content: str | None = None
    """The older name of `reasoning`."""

    def check(self, at: str) -> None:
        """Refuse, at `at`, fields of another role and a turn of nothing; raises FieldError."""
        for name, role in _FIELDS_OF_ROLES.items():
            if self.role != role and getattr(self, name):
                found = Words(f"one of role {self.role}; that is not built yet")
                raise FieldError(join_path(at, name), f"none but of role {role}", found)
        if self.content is None and not self.tool_calls:
            raise FieldError(join_path(at, "content"), "a value", Words("none"))

    def for_template(self, takes_parts: bool) -> dict[str, Any]:
        """Return the message as the chat template takes it, parts as lines if it takes none."""
        content = self.content or ""
        message: dict[str, Any] = {"role": self.role, "content": content}
        if not isinstance(content, str):
            joined = "\n".join(part.text for part in content)
            message["content"] = msgspec.to_builtins(content) if takes_parts else joined
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        for name in ("tool_call_id", "name"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        reasoning = self.reasoning if self.reasoning is not None else self.reasoning_content
        if reasoning is not None:
            message |= {"reasoning": reasoning, "reasoning_content": reasoning}
        return message

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def num_chars(self) -> int:
        content = self.content or ""
        num_chars = len(content) if isinstance(content, str) else sum(len(p.text) for p in content)
        for call in self.tool_calls:
            num_chars += len(call.id) + len(call.function.name) + len(call.function.arguments)
        others = (self.tool_call_id, self.name, self.reasoning, self.reasoning_content)
        return num_chars + sum(len(text) for text in others if text is not None)


class Function(msgspec.Struct, frozen=True, kw_only=True):
    """A function that the model may call."""

    name: str
    """1 to `MAX_NAME_CHARS` letters, digits, _ or -."""
    description: str | UnsetType = UNSET
    """What it does, for the model to read."""
    parameters: dict[str, Any] | UnsetType = UNSET
    """A JSON schema of its arguments, up to `MAX_DEPTH` levels deep."""
    strict: bool | UnsetType = UNSET
    """Accepted, and without effect yet: arguments are what the model writes."""


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    """Something that the model may use."""

    type: Literal["function"]
    """`function`."""
    function: Function
    """What may be called."""


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """One of the functions in `tools`."""


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `tool_choice` that names a function."""

    type: Literal["function"]
    """`function`."""
    function: FunctionName
    """Which one."""


class ChatRequest(RequestFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    INERT: ClassVar[Inert] = {
        "echo": (False,),
        # OpenAI
        "store": (False,),
        "service_tier": ("auto", "default"),
        "prompt_cache_options": (),
        "prompt_cache_retention": (),
        "moderation": (),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": (),
        "verbosity": ("medium",),
        "web_search_options": (),
        "functions": ([],),
        "function_call": ("none",),
        # vLLM
        "documents": ([],),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_prompt_text": (False,),
    }
    # Metadata of chats that are stored, and none is.
    IGNORED: ClassVar[frozenset[str]] = LABELS | {"metadata"}

    messages: Annotated[list[Message], Meta(min_length=1)]
    """The conversation: at least one message and at most `max_model_len`, with at most as many
    characters as `max_model_len` of the model's longest tokens."""
    max_completion_tokens: MaxTokens | None = None
    """Output tokens at most; null: what the model's length leaves."""
    # Beside its newer name it means nothing, so its bounds are looked at behind that.
    max_tokens: Annotated[int, says(words_for(MaxTokens))] | None = None
    """The older name of `max_completion_tokens`, which wins over it."""
    logprobs: bool = False
    """Return the log-probability of each output token."""
    top_logprobs: TopLogprobs = 0
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
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further variables for the chat template."""
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = msgspec.field(default_factory=list)
    """Functions that the model may call: up to `MAX_TOOLS`, with `MAX_TOOL_CHARS` characters. They
    count among those of `messages`."""
    tool_choice: str | NamedToolChoice | None = None
    """`auto` (the default with tools): calls in the output are given as `tool_calls`; `none`: the
    model does not see the tools; `required`: the output is calls alone, at least one; a function:
    a call of it alone."""
    parallel_tool_calls: bool = True
    """False: of several calls the first one is given, and the others are left out."""
    include_reasoning: bool = True
    """Return what the model thought, where `reasoning_parser` divides it from the content."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, message in enumerate(self.messages):
            message.check(f"messages[{i}]")
        if self.add_generation_prompt and self.continue_final_message:
            wanted = "false with add_generation_prompt true"
            raise FieldError("continue_final_message", wanted, Words("true"))

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; FieldError names the field as the client spelt it."""
        if self.top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "logprobs to be true with it", Words("logprobs false"))
        max_tokens = self.max_completion_tokens
        if max_tokens is None:
            max_tokens = self.max_tokens
        logprobs = self.top_logprobs if self.logprobs else None
        try:
            return self._sampling_params(max_tokens, logprobs)
        except FieldError as error:
            raise error.renamed(self.spelling(error.field)) from error

    def spelling(self, param: str) -> str:
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if self.forces_calls and param.startswith("structured_outputs"):
            return "tools"
        spelt = {"logprobs": "top_logprobs", "prompt": "messages"}.get(param, param)
        return self._structured_spelling(spelt)

    @property
    def forces_calls(self) -> bool:
        return self.tool_choice not in (None, "auto", "none")


class CompletionRequest(RequestFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    INERT: ClassVar[Inert] = {"suffix": (), "prompt_embeds": ()}
    IGNORED: ClassVar[frozenset[str]] = frozenset({"user"})

    prompt: str | list[str | int | list[int]]
    """A text, token ids, or a list of either: up to `MAX_SEQUENCES` prompts, or as many as may be
    alive. A text has at most as many characters as `max_model_len` of the model's longest
    tokens."""
    max_tokens: MaxTokens | None = None
    """Output tokens at most; null: `DEFAULT_MAX_TOKENS`."""
    logprobs: TopLogprobs | None = None
    """Return the log-probability of each output token, and those of so many of the likeliest in its
    place; 0: its own alone."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens to a prompt that is a text."""
    echo: bool = False
    """Begin each text with its prompt, and `logprobs` with those of the prompt's tokens, of which
    the first one has none. Not `logprobs` and `stream` together."""

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; raises FieldError."""
        max_tokens = UNSET if self.max_tokens is None else self.max_tokens
        params = self._sampling_params(max_tokens, self.logprobs)
        if not self.echo or self.logprobs is None:
            return params
        if self.stream:
            wanted = "false with logprobs and stream: those of a prompt come with a whole answer"
            raise FieldError("echo", wanted, Words("true"))
        num_logprobs = max(self.logprobs, self.prompt_logprobs or 0)
        return msgspec.structs.replace(params, prompt_logprobs=num_logprobs)

    def spelling(self, param: str) -> str:
        """Return the JSON field behind a parameter of sampling: mostly the same."""
        return self._structured_spelling(param)

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, each a text or token ids; raises FieldError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            found = Words("an empty list" if not kinds else "a mixture")
            raise FieldError("prompt", "a text, token ids, or a list of either", found)
        if kinds == {int}:
            return [[item for item in self.prompt if isinstance(item, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]


def check_num_chars(
    field: str, num_chars: int, settings: ApiSettings, tokenizer: Tokenizer
) -> None:
    """Refuse a prompt of more characters than its tokens could stand for; raises FieldError."""
    longest = tokenizer.longest_token
    limit = settings.max_model_len * longest
    if num_chars > limit:
        wanted = (
            f"at most {limit} characters (the model's length is {settings.max_model_len} tokens, "
            f"the longest of which stands for {longest})"
        )
        raise FieldError(field, wanted, Words(f"{num_chars} characters"))


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter, with a key of `admin_keys`."""

    INERT: ClassVar[Inert] = {"load_inplace": (False,), "lora_int_id": ()}

    lora_name: AdapterName
    """What requests will call the model with it: a name that is free, of 1 to 256 characters."""
    lora_path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARS)]
    """Its directory, as PEFT saves one: an absolute path, with the same files on all nodes."""


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter, with a key of `admin_keys`."""

    INERT: ClassVar[Inert] = {"lora_int_id": ()}

    lora_name: AdapterName
    """The name by which it was loaded."""
