"""Tool calls in what a model writes, found while it arrives.

Three formats are known. All hold JSON, and differ in what surrounds it:

    hermes       <tool_call>{"name": "f", "arguments": {...}}</tool_call>       one for each call
    llama3_json  {"name": "f", "parameters": {...}}; {...}    anywhere, or behind <|python_tag|>
    mistral      [TOOL_CALLS][{"name": "f", "arguments": {...}}, ...]
                 [TOOL_CALLS]f[ARGS]{...}                                       one for each call

A call begins once a known name and the start of its arguments have been read. Until then its text
is held back, and if no call comes of it, it is content, as it was written. From then on the
arguments are passed on as they come. Where they stop being JSON the call ends, and what follows is
content. White space around calls is dropped. So nothing a model writes is an error, each character
is read once, and how the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from serve.openai.json_scanner import SPACE, JsonScanner
from serve.openai.markers import start_of_part

MAX_NAME_CHARS = 64
"""Characters of a function's name, as OpenAI has it."""
NAME_PATTERN = r"[a-zA-Z0-9_-]"
_NAME_CHAR = re.compile(NAME_PATTERN)
_NAME_RUN = re.compile(rf"{NAME_PATTERN}*")
_SPACE_RUN = re.compile(rf"[{SPACE}]*")
_KEYS = ("name", "arguments", "parameters", "type", "id")
"""With which a call begins; other objects are content at once."""


class ToolFormat(Enum):
    """How a model writes its calls."""

    HERMES = "hermes"
    """Hermes, Qwen 2.5 and Qwen 3."""
    LLAMA3_JSON = "llama3_json"
    """Llama 3.1 to 3.3."""
    MISTRAL = "mistral"
    """Mistral, in both of its forms."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that begin or divide calls; a tokenizer may have them as special tokens."""
        return _MARKERS[self]

    @property
    def openers(self) -> tuple[str, ...]:
        """What may begin a call within text."""
        return ("<|python_tag|>", "{") if self is ToolFormat.LLAMA3_JSON else self.markers[:1]

    @property
    def closer(self) -> str:
        """What ends a call, and is left out; empty where its JSON ends it."""
        return {ToolFormat.HERMES: "</tool_call>", ToolFormat.LLAMA3_JSON: ";"}.get(self, "")


_MARKERS = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
}


class CallDelta(NamedTuple):
    """What is new of one call."""

    number: int
    """Its place among the calls of the answer, from 0."""
    name: str | None
    """On the first one of a call alone."""
    arguments: str


class Parsed(NamedTuple):
    """What some text added to an answer."""

    content: str
    calls: list[CallDelta]


class _CallState(Enum):
    TEXT = auto()
    OPENED = auto()
    """Behind what may begin a call."""
    OBJECT = auto()
    """In an object of a name and arguments."""
    NAME = auto()
    """In a bare name."""
    NAMED = auto()
    """Behind a bare name."""
    CALL_ID = auto()
    ARGUMENTS = auto()
    """At or in arguments that stand bare."""
    IN_LIST = auto()
    """Behind a call in a list."""
    CALLED = auto()
    """Behind a call, where its closer may stand."""


class ToolParser:
    """Divides one answer's text into content and calls."""

    def __init__(
        self, tool_format: ToolFormat, names: Collection[str], *, parallel: bool = True
    ) -> None:
        """Expect calls of the functions `names`; without `parallel` only the first is kept."""
        self.num_calls = 0
        self.content_at = 0
        """Calls that have begun before the content has."""
        self._format = tool_format
        self._names = names
        self._max_calls = None if parallel else 1
        self._opener = re.compile("|".join(map(re.escape, tool_format.openers)))
        self._state = _CallState.TEXT
        self._is_list = False
        self._call = _CallObject(names)
        self._bare_name = ""
        self._bare = JsonScanner()
        self._is_begun = False
        """The call that is read has a number."""
        self._pending = ""
        """The end of the text so far that may be the start of a marker."""
        self._held: list[str] = []
        """What has been read of something that may become a call."""
        self._space: list[str] = []
        """White space that is content only if more content follows."""
        self._content: list[str] = []
        self._has_content = False
        self._deltas: list[CallDelta] = []

    @classmethod
    def of_list(cls, names: Collection[str], *, parallel: bool = True) -> ToolParser:
        """Return a parser of what `calls_schema` forces a model to write: a list of calls."""
        parser = cls(ToolFormat.MISTRAL, names, parallel=parallel)
        parser._state = _CallState.OPENED
        return parser

    @classmethod
    def of_arguments(cls, name: str) -> ToolParser:
        """Return a parser of the bare arguments of one function."""
        parser = cls(ToolFormat.MISTRAL, [name])
        parser._state, parser._bare_name = _CallState.ARGUMENTS, name
        return parser

    def push(self, text: str) -> Parsed:
        """Add text; return what is certain of it."""
        text = self._pending + text
        self._pending = ""
        position = 0
        while position < len(text):
            end = self._step(text, position)
            if end is None:
                self._pending = text[position:]
                break
            position = end
        return self._take()

    def finish(self) -> Parsed:
        """Return what is left when no text follows: a call that is not one yet is content."""
        self._fail()
        self._write(self._pending)
        self._pending = ""
        if self.num_calls == 0:
            self._content += self._space
        return self._take()

    def _take(self) -> Parsed:
        content, self._content = "".join(self._content), []
        deltas, self._deltas = self._deltas, []
        return Parsed(content, _joined(deltas))

    def _step(self, text: str, position: int) -> int | None:
        """Read on; return where that ended, or None where it takes more text to tell."""
        match self._state:
            case _CallState.TEXT:
                return self._read_text(text, position)
            case _CallState.OBJECT:
                return self._read_object(text, position)
            case _CallState.ARGUMENTS if self._is_begun:
                return self._read_arguments(text, position)
            case _CallState.NAME:
                return self._read_name(text, position)
            case _CallState.CALL_ID:
                return self._read_call_id(text, position)
        if text[position] in SPACE:
            found = _SPACE_RUN.match(text, position)
            assert found is not None
            self._hold(text[position : found.end()])
            return found.end()
        match self._state:
            case _CallState.OPENED:
                return self._read_opening(text, position)
            case _CallState.NAMED:
                return self._read_behind_name(text, position)
            case _CallState.ARGUMENTS:
                return self._begin_bare(text, position)
            case _CallState.IN_LIST:
                return self._read_list(text, position)
            case _:
                return self._read_closer(text, position)

    # --- text ---------------------------------------------------------------------------------

    def _read_text(self, text: str, position: int) -> int | None:
        found = self._opener.search(text, position)
        if found is not None:
            self._write(text[position : found.start()])
            self._state, self._is_list = _CallState.OPENED, False
            if found.group() == "{":
                return found.start()
            self._held.append(found.group())
            return found.end()
        start = start_of_part(text, position, self._format.openers)
        self._write(text[position:start])
        return start if start > position else None

    def _write(self, text: str) -> None:
        """Add content, but for white space at its end, and between a first call and content."""
        stripped = text.rstrip(SPACE)
        if stripped:
            is_behind_calls = self.num_calls > 0 and not self._has_content
            if not self._has_content:
                self.content_at = self.num_calls
            self._content += [] if is_behind_calls else self._space
            self._content.append(stripped.lstrip(SPACE) if is_behind_calls else stripped)
            self._space, self._has_content = [], True
        self._space.append(text[len(stripped) :])

    def _hold(self, text: str) -> None:
        """Keep text: dropped after a call, and otherwise content unless a call comes of it."""
        (self._space if self._state is _CallState.CALLED else self._held).append(text)

    def _fail(self) -> None:
        """Go back to text; what was held is text too, since no call has come of it."""
        held, self._held = "".join(self._held), []
        self._state, self._is_begun = _CallState.TEXT, False
        self._write(held)

    # --- around calls -------------------------------------------------------------------------

    def _read_opening(self, text: str, position: int) -> int:
        char = text[position]
        if char == "{":
            self._call, self._state = _CallObject(self._names), _CallState.OBJECT
        elif self._format is not ToolFormat.MISTRAL or self._is_list:
            self._fail()
        elif char == "[":
            self._held.append(char)
            self._is_list = True
            return position + 1
        elif _NAME_CHAR.match(char):
            self._bare_name, self._state = "", _CallState.NAME
        else:
            self._fail()
        return position

    def _read_list(self, text: str, position: int) -> int:
        match text[position]:
            case ",":
                self._held.append(",")
                self._state = _CallState.OPENED
                return position + 1
            case "]":
                self._held = []
                self._state = _CallState.CALLED
                return position + 1
            case _:
                self._fail()
                return position

    def _read_closer(self, text: str, position: int) -> int | None:
        closer = self._format.closer
        if closer and closer.startswith(text[position : position + len(closer)]):
            if len(text) - position < len(closer):
                return None
            position += len(closer)
        self._state = _CallState.TEXT
        return position

    # --- calls --------------------------------------------------------------------------------

    def _read_object(self, text: str, position: int) -> int:
        call = self._call
        end = call.feed(text, position)
        if call.name is None:
            self._held.append(text[position:end])
        else:
            self._pass_on(call.name, call.take_arguments())
        if call.is_complete:
            self._end_call()
        elif call.is_broken:
            self._fail()
        return end

    def _read_name(self, text: str, position: int) -> int:
        found = _NAME_RUN.match(text, position)
        assert found is not None
        self._held.append(found.group())
        self._bare_name += found.group()
        if len(self._bare_name) > MAX_NAME_CHARS:
            self._fail()
        elif found.end() < len(text):
            self._state = _CallState.NAMED
            if self._bare_name not in self._names:
                self._fail()
        return found.end()

    def _read_behind_name(self, text: str, position: int) -> int | None:
        """Read `[ARGS]` or `[CALL_ID]`, or find the arguments at once."""
        if text[position] == "{":
            self._state = _CallState.ARGUMENTS
            return position
        for marker, following in (
            ("[ARGS]", _CallState.ARGUMENTS),
            ("[CALL_ID]", _CallState.CALL_ID),
        ):
            if text.startswith(marker, position):
                self._held.append(marker)
                self._state = following
                return position + len(marker)
            if marker.startswith(text[position : position + len(marker)]):
                return None
        self._fail()
        return position

    def _read_call_id(self, text: str, position: int) -> int:
        found = _NAME_RUN.match(text, position)
        assert found is not None
        self._held.append(found.group())
        if found.end() < len(text):
            self._state = _CallState.NAMED
        return found.end()

    def _begin_bare(self, text: str, position: int) -> int:
        if text[position] != "{":
            self._fail()
            return position
        self._bare = JsonScanner()
        self._pass_on(self._bare_name, "")
        return position

    def _read_arguments(self, text: str, position: int) -> int:
        end = self._bare.feed(text, position)
        self._pass_on(self._bare_name, text[position:end])
        if self._bare.is_complete:
            self._end_call()
        elif self._bare.is_broken:
            self._fail()
        return end

    def _pass_on(self, name: str, arguments: str) -> None:
        """Give out what is new of a call; its beginning takes the next number."""
        is_first = not self._is_begun
        if is_first:
            self._is_begun, self._held, self._space = True, [], []
            self.num_calls += 1
        is_kept = self._max_calls is None or self.num_calls <= self._max_calls
        if is_kept and (is_first or arguments):
            number = self.num_calls - 1
            self._deltas.append(CallDelta(number, name if is_first else None, arguments))

    def _end_call(self) -> None:
        self._is_begun = False
        self._state = _CallState.IN_LIST if self._is_list else _CallState.CALLED


class _CallObject:
    """An object of a name and arguments: `{"name": "f", "arguments": {...}}`, in any order.

    Arguments may also be called parameters, be null or left out, or be a text with the JSON.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.name: str | None = None
        """Once it is certain that this is a call."""
        self.is_complete = False
        self.is_broken = False
        self._names = names
        self._found_name: str | None = None
        self._state = "{"
        """The character that has to follow, or in its place: a key or a value."""
        self._key = ""
        self._num_keys = 0
        self._scanner: JsonScanner | None = None
        self._raw: list[str] = []
        """The key or value that is read, but for arguments that are passed on."""
        self._is_passed_on = False
        self._is_arguments = False
        """The value that is read is that of the arguments."""
        self._has_arguments = False
        self._arguments: list[str] = []

    def feed(self, text: str, start: int) -> int:
        """Consume what belongs to the object and return where that ends."""
        position = start
        while position < len(text) and not (self.is_complete or self.is_broken):
            if self._scanner is not None:
                position = self._scan(self._scanner, text, position)
            elif text[position] in SPACE or self._step(text[position]):
                position += 1
        return position

    def take_arguments(self) -> str:
        """Return what has come of the arguments since the last call."""
        arguments, self._arguments = "".join(self._arguments), []
        return arguments

    def _scan(self, scanner: JsonScanner, text: str, position: int) -> int:
        end = scanner.feed(text, position)
        (self._arguments if self._is_passed_on else self._raw).append(text[position:end])
        if scanner.is_broken:
            self.is_broken = True
        elif scanner.is_complete:
            self._scanner = None
            if self._state == "key":
                self._end_key()
            else:
                self._end_value()
        return end

    def _step(self, char: str) -> bool:
        """Take a character between values; return whether it was consumed."""
        match self._state:
            case "{" | ":" if char == self._state:
                self._state = "key" if char == "{" else "value"
                return True
            case "key" if char == '"':
                self._scanner = JsonScanner()
            case "value":
                self._begin_value(char)
            case "," if char == ",":
                self._state = "key"
                return True
            case "," if char == "}":
                self._end()
                return not self.is_broken
            case _:
                self.is_broken = True
        return False

    def _end_key(self) -> None:
        self._key = _text("".join(self._raw))
        self._raw, self._state = [], ":"
        self._num_keys += 1
        self.is_broken = self._num_keys == 1 and self._key not in _KEYS

    def _begin_value(self, char: str) -> None:
        self._scanner = JsonScanner()
        is_arguments = self._key in ("arguments", "parameters")
        self._is_arguments = is_arguments and not self._has_arguments
        if self._is_arguments:
            self._has_arguments = True
            self._is_passed_on = char == "{"
            self.is_broken = char not in '{"n'
            self._commit()
        else:
            self.is_broken = self._key in ("name", "type", "id") and char != '"'

    def _end_value(self) -> None:
        raw, self._raw, self._state = "".join(self._raw), [], ","
        if self._is_arguments and not self._is_passed_on and raw not in ("null", '""'):
            self._arguments = [_object_text(raw)]
            self.is_broken = self._arguments == [""]
        elif self._key == "name" and self._found_name is None:
            self._found_name = _text(raw)
            self.is_broken = self._found_name not in self._names
        self._is_passed_on = False
        self._commit()

    def _commit(self) -> None:
        if self._arguments or self._is_passed_on:
            self.name = None if self.is_broken else self._found_name

    def _end(self) -> None:
        if self._found_name is None:
            self.is_broken = True
            return
        if self.name is None:
            self._arguments = ["{}"]
            self.name = self._found_name
        self.is_complete = True


def _joined(deltas: list[CallDelta]) -> list[CallDelta]:
    """Return one delta for each call."""
    joined: dict[int, tuple[str | None, list[str]]] = {}
    for delta in deltas:
        _, arguments = joined.setdefault(delta.number, (delta.name, []))
        arguments.append(delta.arguments)
    return [CallDelta(i, name, "".join(parts)) for i, (name, parts) in joined.items()]


def _text(raw: str) -> str:
    """Return the text that a JSON string holds; empty for any other value."""
    if not raw.startswith('"'):
        return ""
    try:
        return str(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeEncodeError):  # half a pair of surrogates
        return ""


def _object_text(raw: str) -> str:
    """Return the text of the JSON object that a JSON string holds; empty where it holds none."""
    text = _text(raw).strip(SPACE)
    scanner = JsonScanner()
    is_object = scanner.feed(text) == len(text) and scanner.is_complete and text.startswith("{")
    return text if is_object else ""
