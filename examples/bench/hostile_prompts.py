"""Attacks by what a request asks for: endless prompts and conversations, the largest answers."""

from __future__ import annotations

import random
from functools import partial

import msgspec
from hostile_bodies import FULL, MAX_SEQUENCES, Make, array, chats, completions, members, text
from hostile_target import COMPLETIONS, Attack, Target, chat, completion
from raw_http import ask

MAX_TOKENS = 2000
"""Nearly all that the bundled model's length leaves to a short prompt."""
LONG_PROMPT = [7 + i % 500 for i in range(MAX_TOKENS)]


# --- prompts and conversations -------------------------------------------------------------------


def prompt(unit: str) -> Make:
    """Return what makes a completion of a piece of text over and over."""
    return lambda: completion(prompt=text(unit))


def prompts(unit: str) -> Make:
    """Return what makes a completion of as many prompts as fit, or of as many ids."""
    return lambda: completion(prompt=array(unit))


def messages(unit: str) -> Make:
    """Return what makes a conversation of one message over and over."""
    return lambda: msgspec.json.encode({"messages": array(unit), "max_tokens": 1})


PROMPTS = {
    "text-8mb": completions(prompt("word ")),
    "text-8mb-twice": completions(prompt("word "), num_at_once=2),
    "text-8mb-twenty": completions(prompt("word "), num_at_once=20),
    "text-one-word": completions(prompt("a")),
    "text-digits": completions(prompt("0123456789")),
    "text-spaces": completions(prompt(" ")),
    "text-marks": completions(prompt("<|im_end|>")),
    "text-emoji": completions(prompt("\U0001f469\u200d\U0001f680")),
    "text-accents": completions(prompt("e\u0301\u0323")),
    "text-many": completions(
        lambda: completion(prompt=[text("word ", FULL // 330)] * MAX_SEQUENCES)
    ),
    "chat-8mb": chats(lambda: chat(text("word "))),
    "chat-8mb-twenty": chats(lambda: chat(text("word ")), num_at_once=20),
    "chat-continued": chats(
        lambda: chat(text("word "), continue_final_message=True, add_generation_prompt=False)
    ),
    "prompt-empty-lists": completions(prompts("[]")),
    "prompt-lists": completions(prompts("[1]")),
    "prompt-empty-texts": completions(prompts('""')),
    "prompt-texts": completions(prompts('"a"')),
    "prompt-ids": completions(prompts("1")),
    "prompt-ids-huge": completions(prompts("99999999999999999999")),
    "prompt-ids-wrong": completions(prompts("-1"), prompts("639"), prompts("640"), prompts("1.0")),
    "prompt-mixture": completions(prompts('1,"a",[1],null,{},1.5,true')),
    "messages-empty": chats(messages('{"role":"user","content":""}')),
    "messages-letters": chats(messages('{"role":"user","content":"a"}')),
    "messages-nulls": chats(messages("null")),
    "messages-parts": chats(lambda: chat(array('{"type":"text","text":"a"}'))),
    "messages-empty-parts": chats(messages('{"role":"user","content":[]}')),
    "messages-roles": chats(messages('{"role":"nobody","content":"a"}')),
    "messages-tool-calls": chats(messages('{"role":"user","content":"a","tool_calls":[{}]}')),
    "message-role-8mb": chats(
        lambda: msgspec.json.encode({"messages": [{"role": text("r"), "content": "a"}]})
    ),
}


# --- answers -------------------------------------------------------------------------------------


def generous(**fields: object) -> bytes:
    """Return the body of a completion that tells everything there is to each of its tokens."""
    wide = {"logprobs": 20, "max_tokens": MAX_TOKENS, "ignore_eos": True, "return_token_ids": True}
    return completion(**wide | fields)


def every_limit() -> bytes:
    """Return the body of a completion that has as much of everything as is taken."""
    return generous(
        n=128,
        prompt=["a", "b"],
        prompt_logprobs=20,
        stop=[text(f"z{i}", FULL // 70) for i in range(64)],
        stop_token_ids=list(range(100, 356)),
        logit_bias={str(token_id): -100 for token_id in range(100, 500)},
        allowed_token_ids=list(range(3, 600)),
        min_tokens=MAX_TOKENS,
        presence_penalty=2,
        frequency_penalty=-2,
        repetition_penalty=1000,
        temperature=1e6,
        top_p=1e-9,
        top_k=2**31 - 1,
        seed=2**64 - 1,
    )


async def near_stops(to: Target) -> None:
    """Generate one letter for ever, and 64 long stop strings that all but match at each."""
    body = completion(prompt="a", return_token_ids=True)
    first = await ask(to.address, "POST", COMPLETIONS, body)
    letter = msgspec.json.decode(first.body)["choices"][0]["prompt_token_ids"][-1]
    body = completion(
        prompt="a",
        n=32,
        stop=["a" * (FULL // 70) + str(i) for i in range(64)],
        allowed_token_ids=[letter],
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    await to.again(lambda: to.post(COMPLETIONS, body))


async def short_near_stops(to: Target) -> None:
    """The same with stop strings that match in part again and again."""
    stops = ["a" * i + "b" for i in range(1, 65)]
    body = generous(n=32, stop=stops, max_tokens=1900, stream=True)
    await to.again(lambda: to.post(COMPLETIONS, body))


async def new_prompts(to: Target) -> None:
    """Ask for one token behind long prompts that are new each time."""
    rng = random.Random(7)

    async def one() -> None:
        ids = [rng.randrange(3, 600) for _ in range(MAX_TOKENS)]
        await to.post(COMPLETIONS, completion(prompt=ids))

    await to.again(one, num_at_once=16)


def combined(num_prompts: int, n: int) -> Make:
    """Return what makes a completion of several prompts with several choices each."""
    return lambda: generous(prompt=["a"] * num_prompts, n=n, max_tokens=20, prompt_logprobs=20)


EXTREMES = (
    *({"temperature": 1e6}, {"temperature": 1e-300}, {"top_p": 5e-324}, {"min_p": 1.0}),
    *(
        {"top_k": 1},
        {"top_k": 2**31 - 1},
        {"repetition_penalty": 1e3},
        {"repetition_penalty": 1e-3},
    ),
    *({"frequency_penalty": 2}, {"presence_penalty": -2}, {"logit_bias": {"5": 100}}),
    *({"logit_bias": {"5": -100}}, {"allowed_token_ids": [0]}, {"allowed_token_ids": [2]}),
    *({"seed": 0}, {"seed": -(2**63)}, {"seed": 2**64 - 1}, {"skip_special_tokens": False}),
    *({"stop": ["\x00"]}, {"stop": "\U0010ffff"}, {"stop_token_ids": [0, 639, 640, 2**31 - 1]}),
    *({"min_tokens": 1, "allowed_token_ids": [2]}, {"min_tokens": 1, "stop_token_ids": [5]}),
)
LENGTHS = (0, 1, 2046, 2047, 2048, 2**31 - 1, 2**31, 2**63, -1)

ANSWERS = {
    "prompt-logprobs-n128": completions(
        lambda: completion(prompt=LONG_PROMPT, prompt_logprobs=20, n=128), is_load=True
    ),
    "prompt-logprobs-chat": chats(
        lambda: chat("7 " * 900, prompt_logprobs=20, n=128, top_logprobs=20, logprobs=True),
        is_load=True,
    ),
    "prompt-logprobs-320": completions(
        lambda: completion(prompt=[LONG_PROMPT] * MAX_SEQUENCES, prompt_logprobs=20), is_load=True
    ),
    "prompt-ids-echoed": completions(
        lambda: completion(prompt=LONG_PROMPT, return_token_ids=True, n=128, stream=True),
        is_load=True,
    ),
    "logprobs-n128": completions(lambda: generous(n=128), is_load=True),
    "logprobs-n128-streamed": completions(lambda: generous(n=128, stream=True), is_load=True),
    "logprobs-chat-streamed": chats(
        lambda: chat("hi", logprobs=True, top_logprobs=20, n=128, max_tokens=1900, stream=True),
        is_load=True,
    ),
    "usage-in-every-chunk": completions(
        lambda: generous(
            n=128,
            stream=True,
            logprobs=None,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
        is_load=True,
    ),
    "every-limit": completions(every_limit, is_load=True),
    "combined": completions(
        *(combined(*each) for each in ((2, 128), (64, 5), (320, 1), (160, 2), (320, 2), (1, 129))),
        is_load=True,
    ),
    "near-stops": Attack(near_stops, is_load=True),
    "near-stops-short": Attack(short_near_stops, is_load=True),
    "new-prompts": Attack(new_prompts, is_load=True),
    "bias-for-each-token": completions(
        lambda: generous(logit_bias=members('"%d":0.5', 640), n=64), is_load=True
    ),
    "extremes": completions(
        *(partial(completion, **fields) for fields in EXTREMES),
        *(partial(completion, max_tokens=length) for length in LENGTHS),
    ),
    "extremes-streamed": completions(
        *(partial(generous, stream=True, max_tokens=10, **fields) for fields in EXTREMES)
    ),
}

ATTACKS = PROMPTS | ANSWERS
