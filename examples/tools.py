"""A model that may call functions: ask, run what it calls, give the results back, until it answers.

Start Lockstep first, with a model that knows tools (`serve run serve.app:deploy model=...`), then

    python examples/tools.py [--url http://127.0.0.1:8000/v1] [QUESTION]

The bundled model takes tools too, but was not trained to call any.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

import openai

MAX_TURNS = 5
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
                "required": ["a", "b"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "now",
            "description": "Return the time in UTC.",
            "parameters": {"type": "object", "properties": {}},
        },
    },
]


def add(a: float, b: float) -> float:
    """Return the sum."""
    return a + b


def now() -> str:
    """Return the time in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


FUNCTIONS = {"add": add, "now": now}


def run(name: str, arguments: str) -> str:
    """Return what a call gives, or what is wrong with it, for the model to read."""
    try:
        return json.dumps(FUNCTIONS[name](**json.loads(arguments)))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error!r}"


def answer(client: openai.OpenAI, question: str) -> str:
    """Return the model's answer, printing what it calls on the way."""
    model = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        # `stream` joins the deltas, of content and of calls.
        with client.chat.completions.stream(
            model=model, messages=messages, tools=TOOLS, temperature=0, max_tokens=256
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        if not message.tool_calls:
            return message.content or ""
        calls: list[Any] = []
        results: list[Any] = []
        for call in message.tool_calls:
            name, arguments = call.function.name, call.function.arguments
            result = run(name, arguments)
            print(f"{name}({arguments}) -> {result}")
            function = {"name": name, "arguments": arguments}
            calls.append({"id": call.id, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": call.id, "content": result})
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        messages += results
    return f"no answer after {MAX_TURNS} turns"


def main() -> None:
    """Ask one question."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("question", nargs="?", default="What is 12 + 30?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()
    with openai.OpenAI(base_url=args.url, api_key="none") as client:
        print(answer(client, args.question))


if __name__ == "__main__":
    main()
