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
from collections.abc import Collection, Generator, Iterable
from contextlib import suppress
from enum import Enum
from typing import NamedTuple

import msgspec

SPACE = " \t\n\r"
"""What JSON takes for white space."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"
MAX_NAME_CHARS = 64
"""Characters of a function's name, as OpenAI has it."""
NAME_PATTERN = r"[a-zA-Z0-9_-]"
_NAME_CHAR = re.compile(NAME_PATTERN)
_NO_SPACE = re.compile(rf"[^{SPACE}]")
_NAME_RUN = re.compile(rf"{NAME_PATTERN}*")
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
    number: int
    """Its place among the calls of the answer, from 0."""
    name: str | None
    """On the first one of a call alone."""
    arguments: str


class Parsed(NamedTuple):
    content: str
    calls: list[CallDelta]


class _NotACall(Exception):
    """What is read is no call, or not any more."""


class ToolParser:
    """Divides one answer's text into content and calls. The generators read `_text` from `_at` on,
    and wait where it takes more text to tell."""

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
        self._text = ""
        self._at = 0
        self._is_begun = False
        """The call that is read has a number."""
        self._held: list[str] = []
        """What has been read of something that may become a call."""
        self._space: list[str] = []
        """White space that is content only if more content follows."""
        self._content: list[str] = []
        self._has_content = False
        self._deltas: list[CallDelta] = []
        self._reading = self._answer(())

    @classmethod
    def of_list(cls, names: Collection[str], *, parallel: bool = True) -> ToolParser:
        """Return a parser of what `calls_schema` forces a model to write: a list of calls."""
        parser = cls(ToolFormat.MISTRAL, names, parallel=parallel)
        parser._reading = parser._answer(parser._calls())
        return parser

    @classmethod
    def of_arguments(cls, name: str) -> ToolParser:
        """Return a parser of the bare arguments of one function."""
        parser = cls(ToolFormat.MISTRAL, [name])
        parser._reading = parser._answer(parser._arguments(name))
        return parser

    def push(self, text: str) -> Parsed:
        self._text, self._at = self._text[self._at :] + text, 0
        next(self._reading)
        return self._take()

    def finish(self) -> Parsed:
        """Return what is left when no text follows: a call that is not one yet is content."""
        self._give_up()
        self._write(self._text[self._at :])
        if self.num_calls == 0:
            self._content += self._space
        return self._take()

    def _take(self) -> Parsed:
        content, self._content = "".join(self._content), []
        deltas, self._deltas = self._deltas, []
        return Parsed(content, deltas)

    def _answer(self, first: Iterable[None]) -> Generator[None]:
        """Read calls and what is between them, from `first` on."""
        part = first
        while True:
            with suppress(_NotACall):
                yield from part
            self._give_up()
            yield from self._until_opened()
            part = self._calls()

    # --- text ---------------------------------------------------------------------------------

    def _until_opened(self) -> Generator[None]:
        while (found := self._opener.search(self._text, self._at)) is None:
            start = start_of_part(self._text, self._at, self._format.openers)
            self._write(self._text[self._at : start])
            self._at = start
            yield
        self._write(self._text[self._at : found.start()])
        self._at = found.start()
        if found.group() != "{":
            self._hold(found.end())

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

    def _hold(self, end: int) -> None:
        """Read on up to `end`, and keep it as long as no call has begun."""
        if not self._is_begun:
            self._held.append(self._text[self._at : end])
        self._at = end

    def _give_up(self) -> None:
        """Go back to text; what was held is text too, since no call has come of it."""
        held, self._held = "".join(self._held), []
        self._is_begun = False
        self._write(held)

    # --- calls --------------------------------------------------------------------------------

    def _calls(self) -> Generator[None]:
        """Read a call, or a list of them, behind what may open one."""
        char = yield from self._behind_space()
        is_mistral = self._format is ToolFormat.MISTRAL
        if char == "[" and is_mistral:
            yield from self._list()
        elif char == "{":
            yield from self._object()
        elif is_mistral and _NAME_CHAR.match(char):
            yield from self._named()
        else:
            raise _NotACall
        yield from self._closer()

    def _list(self) -> Generator[None]:
        char = ","
        while char == ",":
            self._hold(self._at + 1)
            yield from self._expect("{")
            yield from self._object()
            char = yield from self._behind_space()
        yield from self._expect("]")
        self._at += 1
        self._held = []

    def _object(self) -> Generator[None]:
        """Read `{"name": "f", "arguments": {...}}`, in any order. Arguments may also be called
        parameters, be null or left out, or be a text with the JSON."""
        name = arguments = ""
        num_keys, has_arguments, char = 0, False, ","
        while char == ",":
            self._hold(self._at + 1)
            yield from self._expect('"')
            key = _text((yield from self._value()))
            num_keys += 1
            if num_keys == 1 and key not in _KEYS:
                raise _NotACall
            yield from self._expect(":")
            self._hold(self._at + 1)
            if key in ("arguments", "parameters") and not has_arguments:
                has_arguments = True
                is_object = (yield from self._expect('{"n')) == "{"
                arguments = yield from self._value(name if is_object else "")
                if not is_object:
                    arguments = _arguments_of(arguments)
            else:
                yield from self._expect('"' if key in ("name", "type", "id") else "")
                value = yield from self._value()
                if key == "name" and not name:
                    name = _text(value)
                    if name not in self._names:
                        raise _NotACall
            if name and arguments and not self._is_begun:
                self._pass_on(name, arguments)
            char = yield from self._behind_space()
        if char != "}" or not name:
            raise _NotACall
        if not self._is_begun:
            self._pass_on(name, "{}")
        self._at += 1
        self._is_begun = False

    def _named(self) -> Generator[None]:
        """Read `f[ARGS]{...}`; before the arguments there may be any `[CALL_ID]id`."""
        name = yield from self._name()
        if name not in self._names:
            raise _NotACall
        while (yield from self._behind_space()) != "{":
            if (yield from self._marker("[ARGS]", "[CALL_ID]")) == "[ARGS]":
                break
            yield from self._name(max_chars=None)
        yield from self._arguments(name)

    def _name(self, max_chars: int | None = MAX_NAME_CHARS) -> Generator[None, None, str]:
        parts: list[str] = []
        num_chars = 0
        while True:
            found = _NAME_RUN.match(self._text, self._at)
            assert found is not None
            self._hold(found.end())
            parts.append(found.group())
            num_chars += len(found.group())
            if max_chars is not None and num_chars > max_chars:
                raise _NotACall
            if self._at < len(self._text):
                return "".join(parts)
            yield

    def _marker(self, *markers: str) -> Generator[None, None, str]:
        while True:
            for marker in markers:
                if self._text.startswith(marker, self._at):
                    self._hold(self._at + len(marker))
                    return marker
            if not any(marker.startswith(self._text[self._at :]) for marker in markers):
                raise _NotACall
            yield

    def _arguments(self, name: str) -> Generator[None]:
        yield from self._expect("{")
        yield from self._value(name)
        self._is_begun = False

    def _value(self, name: str = "") -> Generator[None, None, str]:
        """Read a JSON value; with a `name` it is the arguments of that call, and is passed on."""
        scanner, parts = JsonScanner(), []
        while True:
            end = scanner.feed(self._text, self._at)
            parts.append(self._text[self._at : end])
            if name:
                self._pass_on(name, parts[-1])
            self._hold(end)
            if scanner.is_broken:
                raise _NotACall
            if scanner.is_complete:
                return "".join(parts)
            yield

    def _pass_on(self, name: str, arguments: str) -> None:
        """Give out what is new of a call; its beginning takes the next number."""
        is_first = not self._is_begun
        if is_first:
            self._is_begun, self._held, self._space = True, [], []
            self.num_calls += 1
        if self._max_calls is not None and self.num_calls > self._max_calls:
            return
        number = self.num_calls - 1
        if self._deltas and self._deltas[-1].number == number:
            before = self._deltas.pop()
            self._deltas.append(before._replace(arguments=before.arguments + arguments))
        elif is_first or arguments:
            self._deltas.append(CallDelta(number, name if is_first else None, arguments))

    def _closer(self) -> Generator[None]:
        closer = self._format.closer
        while closer and (yield from self._char()) in SPACE:
            end = self._end_of_space()
            self._space.append(self._text[self._at : end])
            self._at = end
        while closer and closer.startswith(self._text[self._at : self._at + len(closer)]):
            if len(self._text) - self._at >= len(closer):
                self._at += len(closer)
                return
            yield

    def _expect(self, chars: str) -> Generator[None, None, str]:
        """Return the next character behind white space, one of these; of none of them any."""
        char = yield from self._behind_space()
        if chars and char not in chars:
            raise _NotACall
        return char

    def _behind_space(self) -> Generator[None, None, str]:
        while (char := (yield from self._char())) in SPACE:
            self._hold(self._end_of_space())
        return char

    def _end_of_space(self) -> int:
        rest = _NO_SPACE.search(self._text, self._at)
        return len(self._text) if rest is None else rest.start()

    def _char(self) -> Generator[None, None, str]:
        while self._at == len(self._text):
            yield
        return self._text[self._at]


def _arguments_of(raw: str) -> str:
    """Return the object that arguments hold which are null or a text; empty for none."""
    if raw in ("null", '""'):
        return ""
    text = _text(raw).strip(SPACE)
    scanner = JsonScanner()
    if scanner.feed(text) != len(text) or not scanner.is_complete or not text.startswith("{"):
        raise _NotACall
    return text


def _text(raw: str) -> str:
    """Return the text that a JSON string holds; empty for any other value."""
    if not raw.startswith('"'):
        return ""
    try:
        return str(msgspec.json.decode(raw))
    except (msgspec.DecodeError, UnicodeEncodeError):  # half a pair of surrogates
        return ""


def start_of_part(text: str, position: int, markers: tuple[str, ...]) -> int:
    """Return where the end of the text begins that may be the start of a marker."""
    longest = max(map(len, markers)) - 1
    for start in range(max(position, len(text) - longest), len(text)):
        if any(marker.startswith(text[start:]) for marker in markers):
            return start
    return len(text)


class _NotJson(Exception):
    """The next character is not allowed where it stands."""


class JsonScanner:
    """Follows one JSON value while it arrives, strictly by RFC 8259, each character once.
    Invariant: what was consumed is a value or can still become one. Where the text ends, the
    generator waits for more; nesting costs a list entry and no recursion."""

    def __init__(self) -> None:
        self.is_complete = False
        """The value has ended; that of a bare number shows with the next character."""
        self.is_broken = False
        """The character after what was consumed is not allowed there."""
        self._text = ""
        self._at = 0
        self._reading = self._value()

    def feed(self, text: str, start: int = 0) -> int:
        """Consume what belongs to the value and return where that ends."""
        self._text, self._at = text, start
        try:
            next(self._reading)
        except StopIteration:
            self.is_complete = True
        except _NotJson:
            self.is_broken = True
        return self._at

    def _value(self) -> Generator[None]:
        closers: list[str] = []
        is_empty = False
        """Nothing is yet in what was opened last."""
        while True:
            char = yield from self._behind_space()
            is_end = is_empty and char == closers[-1]
            if not is_end:
                if closers and closers[-1] == "}":
                    yield from self._string()
                    yield from self._behind_space()
                    yield from self._one_of(":")
                    char = yield from self._behind_space()
                if char in _CLOSERS:
                    closers.append(_CLOSERS[char])
                    self._at += 1
                    is_empty = True
                    continue
                yield from self._scalar(char)
            while True:
                if is_end:
                    closers.pop()
                    self._at += 1
                if not closers:
                    return
                char = yield from self._behind_space()
                is_end = char == closers[-1]
                if not is_end:
                    yield from self._one_of(",")
                    is_empty = False
                    break

    def _scalar(self, char: str) -> Generator[None]:
        if char in _LITERALS:
            for expected in _LITERALS[char]:
                yield from self._one_of(expected)
        elif char == '"':
            yield from self._string()
        else:
            yield from self._number(char)

    def _string(self) -> Generator[None]:
        yield from self._one_of('"')
        while True:
            found = _PLAIN.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at == len(self._text):
                yield
                continue
            if (yield from self._one_of('"\\')) == '"':
                return
            if (yield from self._one_of('"\\/bfnrtu')) == "u":
                for _ in range(4):
                    yield from self._one_of(_HEX)

    def _number(self, char: str) -> Generator[None]:
        if char == "-":
            self._at += 1
        if (yield from self._one_of(_DIGITS)) != "0":
            yield from self._digits()
        if (yield from self._char()) == ".":
            self._at += 1
            yield from self._one_of(_DIGITS)
            yield from self._digits()
        if (yield from self._char()) in "eE":
            self._at += 1
            if (yield from self._char()) in "+-":
                self._at += 1
            yield from self._one_of(_DIGITS)
            yield from self._digits()

    def _digits(self) -> Generator[None]:
        while (yield from self._char()) in _DIGITS:
            self._at += 1

    def _behind_space(self) -> Generator[None, None, str]:
        while (char := (yield from self._char())) in SPACE:
            self._at += 1
        return char

    def _one_of(self, chars: str) -> Generator[None, None, str]:
        char = yield from self._char()
        if char not in chars:
            raise _NotJson
        self._at += 1
        return char

    def _char(self) -> Generator[None, None, str]:
        while self._at == len(self._text):
            yield
        return self._text[self._at]
