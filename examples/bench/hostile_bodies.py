"""Attacks by the content of a body: endless fields, and JSON that is hard to read.

Bodies are as large as the server takes by default, unless the attack's name says otherwise. A
single body is posted again and again until the attack's time is over, several are posted in turn.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

from hostile_target import CHAT, COMPLETIONS, Attack, Target, chat, completion
from msgspec import Raw
from raw_http import request

FULL = 8_300_000
"""A little less than `max_body_bytes` is by default, with room for the other fields."""
MAX_SEQUENCES = 320
"""Of one request: the default `max_num_seqs` and `max_queued_requests` together."""

Make = Callable[[], bytes]


# --- JSON of any length --------------------------------------------------------------------------


def text(unit: str, size: int = FULL) -> Raw:
    """Return a JSON string of one piece over and over, which is written as it stands."""
    piece = unit.encode()
    return Raw(b'"' + piece * (size // len(piece)) + b'"')


def array(unit: str, size: int = FULL) -> Raw:
    """Return a JSON array of one value over and over."""
    value = unit.encode()
    return Raw(b"[" + b",".join([value] * (size // (len(value) + 1))) + b"]")


def numbers(start: int, count: int) -> Raw:
    """Return a JSON array of numbers that follow one another."""
    return Raw(f"[{','.join(map(str, range(start, start + count)))}]".encode())


def members(form: str, count: int, start: int = 0) -> Raw:
    """Return a JSON object with a member per number, which `form` turns into text."""
    return Raw(f"{{{','.join(form % number for number in range(start, start + count))}}}".encode())


def nested(opening: str, middle: str, closing: str, depth: int) -> Raw:
    """Return a JSON value within a value within a value."""
    return Raw((opening * depth + middle + closing * depth).encode())


def posts(path: str, *bodies: Make, num_at_once: int = 1, is_load: bool = False) -> Attack:
    """Return the attack that posts these bodies; a single one by several clients at once."""

    async def attack(to: Target) -> None:
        if len(bodies) == 1:
            body = bodies[0]()
            await to.again(lambda: to.post(path, body), num_at_once)
        else:
            for make in bodies:
                await to.post(path, make())

    return Attack(attack, is_load)


completions = partial(posts, COMPLETIONS)
chats = partial(posts, CHAT)


# --- fields as long as the body ------------------------------------------------------------------


def allowed_ids(**fields: Any) -> Make:
    """Four million ids, all the same and known."""
    return lambda: completion(allowed_token_ids=array("7"), **fields)


def unknown_bias() -> Raw:
    """Return seven hundred thousand biases for tokens that a small model does not have."""
    return members('"%d":1', 700_000, start=100_000)


def known_bias() -> Raw:
    """Return half a million spellings of a hundred token ids, each with a bias."""
    names = (f'"{"0" * (i % 8)}{i % 100}":{i % 97}' for i in range(500_000))
    return Raw(f"{{{','.join(names)}}}".encode())


FIELDS = {
    "allowed-ids-20": completions(allowed_ids(prompt=["a"] * 20)),
    "allowed-ids-320": completions(allowed_ids(prompt=["a"] * MAX_SEQUENCES), is_load=True),
    "allowed-ids-n128": completions(allowed_ids(n=128), is_load=True),
    "allowed-ids-unknown": completions(
        lambda: completion(prompt=["a"] * 20, allowed_token_ids=numbers(1_000_000, 1_000_000))
    ),
    "logit-bias-20": completions(lambda: completion(prompt=["a"] * 20, logit_bias=unknown_bias())),
    "logit-bias-320": completions(
        lambda: completion(prompt=["a"] * MAX_SEQUENCES, logit_bias=unknown_bias()), is_load=True
    ),
    "logit-bias-n128": chats(lambda: chat("hi", n=128, logit_bias=unknown_bias()), is_load=True),
    "logit-bias-known": completions(
        lambda: completion(prompt=["a", "b"], n=128, logit_bias=known_bias()), is_load=True
    ),
    "stop-8mb": completions(lambda: completion(stop=text("b"))),
    "stop-list": completions(lambda: completion(stop=array('"b"'))),
    "stop-64-long": completions(
        lambda: completion(stop=[text(f"b{i}", FULL // 65) for i in range(64)], n=64), is_load=True
    ),
    "stop-token-ids": completions(lambda: completion(stop_token_ids=array("5"))),
    "tools": chats(lambda: chat("hi", tools=array('{"type":"function","function":{"name":"f"}}'))),
    "metadata": chats(lambda: chat("hi", metadata=members('"%d":"a"', 600_000))),
    "user": chats(lambda: chat("hi", user=text("u"))),
    "response-format": chats(lambda: chat("hi", response_format=text("f"))),
    "model-name": completions(lambda: completion(model=text("m"))),
    "chat-template": chats(lambda: chat("hi", chat_template=text("{{ 1 }}"))),
    "template-kwargs-wide": chats(
        lambda: chat("hi", chat_template_kwargs=members('"v%d":1', 600_000))
    ),
    "template-kwargs-odd": chats(
        lambda: chat("hi", chat_template_kwargs=nested('{"a":', "1", "}", 900)),
        lambda: chat("hi", chat_template_kwargs={"a": nested("[", "", "]", 4_000_000)}),
        lambda: chat("hi", chat_template_kwargs={"a": text("b")}),
        lambda: chat("hi", chat_template_kwargs={"messages": [], "self": 1, "tokenize": False}),
        lambda: chat("hi", chat_template_kwargs={"range": 1, "loop": {}, "raise_exception": 0}),
    ),
    "keys-unknown": completions(lambda: bytes(members('"k%d":1', 600_000))),
    "keys-long": completions(
        lambda: b"{" + bytes(text("k")) + b":1}",
        lambda: b'{"prompt":"a",' + bytes(text(r"\u0041")) + b":1}",
    ),
    "keys-twice": completions(lambda: b"{" + bytes(array('"prompt":"a"'))[1:-1] + b"}"),
}


# --- JSON that is hard to read -------------------------------------------------------------------

DIGITS = "7" * FULL
SPELLINGS = (
    *("1e999", "-1e999", "1e308", "-0", "-0.0", "0e0", "1E+2", "1e1000000000", "1e-1000000000"),
    *("NaN", "Infinity", "-Infinity", "+1", "01", ".5", "5.", "0x10", "1_000", "\u0661"),
    *("9223372036854775808", "18446744073709551615", "18446744073709551616"),
    *("-9223372036854775808", "-9223372036854775809", "1.0", "2.5", '"7"', "true", "null", "[]"),
)
"""Numbers as JSON and Python spell them, at the borders of what fits, and what is none."""

ODD_TEXTS = (
    *(rb"\ud800", rb"\udc00", rb"\ud83d\ude00\ude00", rb"\u0000", rb"\uFFFF", rb"\x41", rb"\u12"),
    *(b"\x00", b"\xff\xfe", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\x80", b"\x1b[2J"),
    *(b"\xef\xbb\xbf", "\u202e\u2066".encode(), b"\n", b"\t", b"\x7f", b""),
)
ODD_BODIES = (
    *(b"", b"\x00", b"null", b"[]", b'""', b"7", b"{", b"}", b"{}", b"{}{}", b"{}x", b'{"prompt"'),
    *(b"{'prompt':'a'}", b'{"prompt":"a",}', b'{"prompt":"a" /* b */}', b"\xef\xbb\xbf{}"),
    *(b"\xef\xbb\xbf" + completion(), gzip.compress(completion()), b"prompt=a&max_tokens=1"),
    *(completion().decode().encode(coding) for coding in ("utf-16", "utf-32", "utf-7", "cp037")),
)
FIELD_NAMES = (
    "model messages prompt n temperature top_p top_k min_p presence_penalty frequency_penalty "
    "repetition_penalty logit_bias allowed_token_ids seed min_tokens max_tokens "
    "max_completion_tokens stop stop_token_ids ignore_eos include_stop_str_in_output "
    "skip_special_tokens stream stream_options logprobs top_logprobs prompt_logprobs "
    "return_token_ids add_special_tokens chat_template chat_template_kwargs"
)
VALUES = (
    *(-1, 0, 2**31, 2**63, 2**64, -(2**63), 1e308, 0.5, True, "", "x", [], [[]], [None], {}),
    *({"a": {}}, {"a": 1}, {"1": "x"}, ["a", 1], [-1], [2**70], Raw("7" * 5000)),
)


def spelt(name: str) -> Attack:
    """Return the attack that gives a field every spelling of a number."""
    return completions(
        *(partial(completion, **{name: Raw(spelling.encode())}) for spelling in SPELLINGS)
    )


def odd_prompt(found: bytes) -> bytes:
    """Return the body of a completion whose prompt is written as it stands."""
    return b'{"prompt":"a' + found + b'","max_tokens":1}'


async def wrong_types(to: Target) -> None:
    """Give fields values that they must not have, or may: as many as there is time for."""
    ways = ((COMPLETIONS, completion), (CHAT, partial(chat, "hi")))
    cases = [
        (*way, name, value) for way in ways for name in FIELD_NAMES.split() for value in VALUES
    ]
    random.Random(7).shuffle(cases)
    turn = cycle(cases)

    async def one() -> None:
        path, make, name, value = next(turn)
        await to.exchange(request("POST", path, make(**{name: value})), patience_s=2)

    await to.again(one, num_at_once=8)


async def bombs(to: Target) -> None:
    """Say that a body is compressed, and would be a gigabyte."""
    bomb = gzip.compress(b" " * (64 << 20)) * 16
    for coding in ("gzip", "deflate", "br", "gzip, gzip", "identity"):
        await to.exchange(request("POST", COMPLETIONS, bomb, {"Content-Encoding": coding}))


JSON = {
    "digits-8mb": completions(
        *(
            partial(completion, **{name: Raw(digits.encode())})
            for name in ("temperature", "seed")
            for digits in (DIGITS, f"-{DIGITS}", f"0.{DIGITS}", f"{DIGITS}.5")
        ),
        *(partial(completion, temperature=Raw(f"1e{sign}{DIGITS}".encode())) for sign in ("", "-")),
    ),
    "digits-ids": completions(lambda: completion(prompt=array("7" * 4000))),
    "spelt-temperature": spelt("temperature"),
    "spelt-seed": spelt("seed"),
    "spelt-max-tokens": spelt("max_tokens"),
    "spelt-n": spelt("n"),
    "nested-lists": completions(
        lambda: b"[" * FULL, lambda: bytes(nested("[", "", "]", FULL // 2))
    ),
    "nested-prompt": completions(
        *(
            partial(completion, prompt=nested("[", "", "]", depth))
            for depth in (3, 100, 900, 1100, 100_000, FULL // 2)
        )
    ),
    "nested-objects": completions(
        lambda: b'{"a":' * (FULL // 5),
        lambda: bytes(nested('{"a":', "1", "}", FULL // 6)),
        lambda: completion(stream=True, stream_options=nested('{"a":', "1", "}", 900)),
    ),
    "spaces-8mb": completions(lambda: completion() + b" " * FULL, lambda: b" " * FULL),
    "escaped-newlines": completions(lambda: completion(prompt=text(r"\n"))),
    "escaped-letters": completions(lambda: completion(prompt=text(r"\u0041"))),
    "escaped-pairs": completions(lambda: completion(prompt=text(r"\ud83d\ude00"))),
    "escaped-quotes": completions(lambda: completion(prompt=text(r"\""))),
    "escaped-backslashes": completions(lambda: completion(prompt=text(r"\\"))),
    "unclosed-text": completions(lambda: b'{"prompt":"' + b"a" * FULL, lambda: b'"' * FULL),
    "odd-texts": completions(*(partial(odd_prompt, each) for each in ODD_TEXTS)),
    "odd-bodies": completions(*(partial(bytes, each) for each in ODD_BODIES)),
    "wrong-types": Attack(wrong_types),
    "too-large": completions(lambda: b" " * 9_000_000, lambda: b" " * 200_000_000),
    "bombs": Attack(bombs),
}

ATTACKS = FIELDS | JSON
