"""One JSON value, followed while it arrives: where it ends, or where it stops being JSON.

The grammar is RFC 8259's, strictly. A character is looked at once, nesting costs a list entry and
no recursion, and how the text is cut into pieces makes no difference: where it ends, the reading
generator waits for more.
"""

from __future__ import annotations

import re
from collections.abc import Generator

SPACE = " \t\n\r"
"""What JSON takes for white space."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"


class _NotJson(Exception):
    """The next character is not allowed where it stands."""


class JsonScanner:
    """Follows one value. Invariant: what was consumed is a value or can still become one."""

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
        """Consume a character that has to be one of these."""
        char = yield from self._char()
        if char not in chars:
            raise _NotJson
        self._at += 1
        return char

    def _char(self) -> Generator[None, None, str]:
        """Return the next character, once there is one."""
        while self._at == len(self._text):
            yield
        return self._text[self._at]
