"""Answer a file of conversations at once: an offline batch, alone or as a Ray job.

    python examples/batch.py [--model CHECKPOINT] [--input FILE] [--output FILE] [--tp 2] [--dp 2]
    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python examples/batch.py [--tp 2] [--dp 2]

With `--tp` or `--dp` its ranks are actors of the cluster, each of which reserves a GPU where there
are some; without, it runs in this process.

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
    parser.add_argument("--model", help="a checkpoint; without one the bundled model")
    parser.add_argument("--input", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tp", type=int, default=1, help="ranks that hold the model together")
    parser.add_argument("--dp", type=int, default=1, help="engines that share the requests")
    options = parser.parse_args()
    try:
        asked = bodies(options.input)
        sampling = [params(body) for body in asked]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    llm = LLM(options.model, tensor_parallel_size=options.tp, data_parallel_size=options.dp)
    answers = llm.chat([body["messages"] for body in asked], sampling)
    lines = [line_of(answer) for answer in answers]
    if options.output is None:
        print(*lines, sep="\n")
    else:
        options.output.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
