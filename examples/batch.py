"""Answer a file of conversations at once: an offline batch, alone or as a Ray job.

    python examples/batch.py [--input FILE] [--output FILE] [KEY=VALUE ...]
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python examples/batch.py tensor_parallel_size=2 data_parallel_size=2

Arguments are those of `LLM`, such as `model=CHECKPOINT`. Several ranks are actors of the cluster,
each of which reserves a GPU where there are some; one alone runs in this process.

Each line of the input is a body of /v1/chat/completions, of which `messages`, `temperature`, `seed`
and `max_tokens` are read; the line of the same number in the output has the answer. Without an
input a few questions are asked, without an output the answers are printed. The exit status is 1 if
a line is not such a body; then nothing is generated.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from serve.llm import LLM, RequestOutput, SamplingParams

QUESTIONS = ("What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?")
FIELDS = {"messages", "temperature", "seed", "max_tokens"}


def bodies(path: Path | None) -> list[dict[str, Any]]:
    """Return what is asked.

    Raises:
        ValueError: a line is no body that is known here; its number is named.
    """
    if path is None:
        asked = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
        return [{**body, "temperature": 0, "max_tokens": 64} for body in asked]
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        body = json.loads(line)
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise ValueError(f"line {number}: wanted an object with messages, found {line[:60]}")
        if unknown := sorted(body.keys() - FIELDS):
            raise ValueError(f"line {number}: wanted {', '.join(FIELDS)}, found {unknown[0]}")
        found.append(body)
    return found


def params(body: dict[str, Any]) -> SamplingParams:
    """Return how the answer to a body is sampled."""
    given = {name: body[name] for name in FIELDS - {"messages"} if name in body}
    return SamplingParams(**given)


def pair_of(argument: str) -> tuple[str, str]:
    """Return the two sides of KEY=VALUE; ValueError: there is no `=`."""
    key, found, value = argument.partition("=")
    if not found:
        raise ValueError(f"arguments: wanted KEY=VALUE, found {argument}")
    return key, value


def line_of(answer: RequestOutput) -> str:
    """Return an answer as a line of JSON."""
    [choice] = answer.outputs
    usage = {
        "prompt_tokens": len(answer.prompt_token_ids),
        "completion_tokens": len(choice.token_ids),
    }
    return json.dumps(
        {"text": choice.text, "finish_reason": choice.finish_reason, "usage": usage},
        ensure_ascii=False,
    )


def main() -> int:
    """Read, generate, write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--input", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("arguments", nargs="*", metavar="KEY=VALUE", help="of the engine")
    options = parser.parse_args()
    try:
        asked = bodies(options.input)
        sampling = [params(body) for body in asked]
        given: dict[str, Any] = dict(pair_of(argument) for argument in options.arguments)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    llm = LLM(**given)
    answers = llm.chat([body["messages"] for body in asked], sampling)
    lines = [line_of(answer) for answer in answers]
    if options.output is None:
        print(*lines, sep="\n")
    else:
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
