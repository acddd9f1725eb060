"""The requests of the two generating endpoints, as structs of the fields that are implemented.

How a body becomes one, and what is said of its other fields, is `request_parser.py`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from compile.errors import FieldError, Words
from serve.cache_salt import check_cache_salt
from serve.openai.errors import BadRequest
from serve.sampling import SamplingParams
from serve.structured import StructuredOutputsParams

_GUIDED_KINDS = ("json", "regex", "choice", "grammar")


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`stream_options`, accepted only with `stream` true."""

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

    type: str
    """`text`, `json_object` or `json_schema`."""
    json_schema: JsonSchemaFormat | None = None
    """The schema, with type `json_schema` alone."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """`structured_outputs`, as vLLM has it: exactly one of the fields is given."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """Any JSON object."""
    regex: str | None = None
    """A regular expression that the whole text matches, in Rust's syntax without look-around."""
    choice: list[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """A context-free grammar, in Lark's form or in GBNF."""


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
    cache_salt: str | None = None
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

    def _sampling_params(
        self, max_tokens: int | UnsetType | None, logprobs: int | None
    ) -> SamplingParams:
        check_cache_salt(self.cache_salt)
        if self.stream and self.prompt_logprobs is not None:
            wanted = "none with stream true: they are given once, with the whole answer"
            raise FieldError("prompt_logprobs", wanted, self.prompt_logprobs)
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
            structured_outputs=self._structured_outputs(),
        )

    def _structured_outputs(self) -> StructuredOutputsParams | None:
        """Return what the text must be.

        Raises:
            FieldError: named as the client spelt the field.
        """
        found = self._structured_fields()
        if len(found) > 1:
            raise FieldError(found[1][0], f"none beside {found[0][0]}", Words("both"))
        if not found:
            return None
        [(_, fields)] = found
        try:
            return StructuredOutputsParams(**fields)
        except FieldError as error:
            raise error.renamed(self._structured_spelling(error.field)) from error

    def _structured_fields(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the fields that ask for structured output, each as `structured_outputs` has it."""
        found: list[tuple[str, dict[str, Any]]] = []
        wanted = self.response_format
        if wanted is not None and wanted.json_schema is not None:
            found.append(("response_format", {"json": wanted.json_schema.schema}))
        elif wanted is not None and wanted.type == "json_object":
            found.append(("response_format", {"json_object": True}))
        if self.structured_outputs is not None:
            found.append(("structured_outputs", msgspec.structs.asdict(self.structured_outputs)))
        for kind in _GUIDED_KINDS:
            if (value := getattr(self, f"guided_{kind}")) is not None:
                found.append((f"guided_{kind}", {kind: value}))
        return found

    def _structured_spelling(self, param: str) -> str:
        """Return the JSON field behind a field of `structured_outputs`."""
        if not param.startswith("structured_outputs"):
            return param
        name = next((name for name, _ in self._structured_fields()), param)
        if name == "response_format" and param.endswith(".json"):
            return "response_format.json_schema.schema"
        return param if name == "structured_outputs" else name


class TextPart(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a message's content."""

    type: str
    """`text`; other parts are not built yet."""
    text: str
    """The text of the part."""


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The function of a call that the assistant made in an earlier turn."""

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

    id: str
    """What `tool_call_id` of the message with its result repeats."""
    type: str = "function"
    """`function`."""
    function: CalledFunction
    """What was called."""

    def for_template(self) -> dict[str, Any]:
        """Return the call as transformers' templates take it."""
        function = self.function
        called = {"name": function.name, "arguments": function.arguments_for_template()}
        return {"id": self.id, "type": "function", "function": called}


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
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

    def for_template(self, takes_parts: bool) -> dict[str, Any]:
        """Return the message as the chat template takes it.

        Parts are joined by line ends for a template that takes none, as in vLLM.
        """
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
        """The content's text."""
        content = self.content or ""
        return content if isinstance(content, str) else "\n".join(part.text for part in content)

    @property
    def num_chars(self) -> int:
        """Characters of text, also of calls and reasoning."""
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

    type: str
    """`function`."""
    function: Function
    """What may be called."""


class FunctionName(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """One of the functions in `tools`."""


class NamedToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A `tool_choice` that names a function."""

    type: str
    """`function`."""
    function: FunctionName
    """Which one."""


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
    tools: list[Tool] = []
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

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; without a limit, output ends with the model's length.

        Raises:
            FieldError: named as the client spelt the field.
        """
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
        """Return the JSON field behind a parameter of sampling."""
        if param == "max_tokens" and self.max_completion_tokens is not None:
            return "max_completion_tokens"
        if self.forces_calls and param.startswith("structured_outputs"):
            return "tools"
        spelt = {"logprobs": "top_logprobs", "prompt": "messages"}.get(param, param)
        return self._structured_spelling(spelt)

    @property
    def formats_text(self) -> bool:
        """Whether `response_format` holds the text to something."""
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def forces_calls(self) -> bool:
        """Whether the output is to be calls and nothing else."""
        return self.tool_choice not in (None, "auto", "none")


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
    echo: bool = False
    """Begin each text with its prompt, and `logprobs` with those of the prompt's tokens, of which
    the first one has none. Not `logprobs` and `stream` together."""

    def sampling_params(self) -> SamplingParams:
        """Return the checked parameters; without a limit, output has the default one.

        Raises:
            FieldError: names the field.
        """
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
            raise FieldError("logit_bias", "token ids as keys", key)
    return {int(key): bias for key, bias in logit_bias.items()}
