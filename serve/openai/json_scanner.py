"""One JSON value, followed while it arrives: where it ends, or where it stops being JSON.

The grammar is RFC 8259's, strictly. A character is looked at once, nesting costs a list entry and
no recursion, and how the text is cut into pieces makes no difference.
"""

from __future__ import annotations

import re
from enum import Enum, auto

SPACE = " \t\n\r"
"""What JSON takes for white space."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_CLOSERS = {"{": "}", "[": "]"}
_DIGITS = "0123456789"
_HEX = "0123456789abcdefABCDEF"


class _JsonState(Enum):
    VALUE = auto()
    """A value has to follow."""
    FIRST_ITEM = auto()
    """A value or the end of the list."""
    KEY = auto()
    """A key has to follow."""
    FIRST_KEY = auto()
    """A key or the end of the object."""
    COLON = auto()
    BEHIND = auto()
    """Behind a value: a comma or the end of what holds it."""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    LITERAL = auto()
    NUMBER = auto()


class _Number(Enum):
    """What of a number has been read."""

    MINUS = auto()
    ZERO = auto()
    INTEGER = auto()
    POINT = auto()
    FRACTION = auto()
    EXPONENT = auto()
    SIGN = auto()
    POWER = auto()


_WHOLE = {_Number.ZERO, _Number.INTEGER, _Number.FRACTION, _Number.POWER}


def _number_steps() -> dict[tuple[_Number, str], _Number]:
    """Return the next state for each state and character that may follow in it."""
    n = _Number
    digits_lead = {n.INTEGER: n.INTEGER, n.POINT: n.FRACTION, n.FRACTION: n.FRACTION}
    digits_lead |= {n.EXPONENT: n.POWER, n.SIGN: n.POWER, n.POWER: n.POWER}
    steps = {(state, d): to for state, to in digits_lead.items() for d in _DIGITS}
    steps |= {(n.MINUS, d): n.INTEGER for d in _DIGITS} | {(n.MINUS, "0"): n.ZERO}
    steps |= {(state, "."): n.POINT for state in (n.ZERO, n.INTEGER)}
    steps |= {(state, e): n.EXPONENT for state in (n.ZERO, n.INTEGER, n.FRACTION) for e in "eE"}
    return steps | {(n.EXPONENT, sign): n.SIGN for sign in "+-"}


_NUMBER_STEPS = _number_steps()


class JsonScanner:
    """Follows one value. Invariant: what was consumed is a value or can still become one."""

    def __init__(self) -> None:
        self.is_complete = False
        """The value has ended; that of a bare number shows with the next character."""
        self.is_broken = False
        """The character after what was consumed is not allowed there."""
        self._state = _JsonState.VALUE
        self._closers: list[str] = []
        self._is_key = False
        self._rest = ""
        """What has to follow of a literal."""
        self._num_hex = 0
        """Digits that have to follow of an escaped character."""
        self._number = _Number.MINUS

    def feed(self, text: str, start: int = 0) -> int:
        """Consume what belongs to the value and return where that ends."""
        position = start
        while position < len(text) and not (self.is_complete or self.is_broken):
            if self._state is _JsonState.STRING:
                found = _PLAIN.match(text, position)
                assert found is not None
                position = found.end()
                if position == len(text):
                    break
            position += self._step(text[position])
        return position

    def _step(self, char: str) -> int:
        """Take one character; return how many were consumed: one, or none after a number."""
        match self._state:
            case _JsonState.STRING:
                self._in_string(char)
            case _JsonState.ESCAPE:
                self._num_hex = 4
                known = _JsonState.STRING if char in '"\\/bfnrt' else None
                self._go(_JsonState.HEX if char == "u" else known)
            case _JsonState.HEX:
                self._num_hex -= 1
                going_on = _JsonState.HEX if self._num_hex else _JsonState.STRING
                self._go(going_on if char in _HEX else None)
            case _JsonState.LITERAL:
                self._in_literal(char)
            case _JsonState.NUMBER:
                return self._in_number(char)
            case _:
                if char not in SPACE:
                    self._between(char)
        return not self.is_broken

    def _go(self, state: _JsonState | None) -> None:
        if state is None:
            self.is_broken = True
        else:
            self._state = state

    def _end_value(self) -> None:
        self.is_complete = not self._closers
        self._state = _JsonState.BEHIND

    def _in_string(self, char: str) -> None:
        if char == "\\":
            self._state = _JsonState.ESCAPE
        elif char != '"':
            self.is_broken = True
        elif self._is_key:
            self._is_key, self._state = False, _JsonState.COLON
        else:
            self._end_value()

    def _in_literal(self, char: str) -> None:
        if char != self._rest[0]:
            self.is_broken = True
            return
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()

    def _in_number(self, char: str) -> int:
        following = _NUMBER_STEPS.get((self._number, char))
        if following is not None:
            self._number = following
            return 1
        if self._number in _WHOLE:
            self._end_value()
        else:
            self.is_broken = True
        return 0

    def _between(self, char: str) -> None:
        match self._state:
            case _JsonState.KEY | _JsonState.FIRST_KEY if char == '"':
                self._is_key, self._state = True, _JsonState.STRING
            case _JsonState.FIRST_KEY if char == "}":
                self._close()
            case _JsonState.FIRST_ITEM if char == "]":
                self._close()
            case _JsonState.VALUE | _JsonState.FIRST_ITEM:
                self._begin_value(char)
            case _JsonState.COLON if char == ":":
                self._state = _JsonState.VALUE
            case _JsonState.BEHIND if char == ",":
                self._state = _JsonState.KEY if self._closers[-1] == "}" else _JsonState.VALUE
            case _JsonState.BEHIND if char == self._closers[-1]:
                self._close()
            case _:
                self.is_broken = True

    def _close(self) -> None:
        self._closers.pop()
        self._end_value()

    def _begin_value(self, char: str) -> None:
        if char == '"':
            self._state = _JsonState.STRING
        elif char in _CLOSERS:
            self._closers.append(_CLOSERS[char])
            self._state = _JsonState.FIRST_KEY if char == "{" else _JsonState.FIRST_ITEM
        elif char in _LITERALS:
            self._rest, self._state = _LITERALS[char], _JsonState.LITERAL
        elif char == "-" or char in _DIGITS:
            first = {"-": _Number.MINUS, "0": _Number.ZERO}
            self._number, self._state = first.get(char, _Number.INTEGER), _JsonState.NUMBER
        else:
            self.is_broken = True
