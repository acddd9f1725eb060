"""Hold answers to a form: a JSON schema, a regex, a list of texts or a grammar.

python examples/structured_output.py [CHECKPOINT]

Over HTTP the same is `response_format` of OpenAI, or `structured_outputs` of vLLM.
"""

from __future__ import annotations

import sys
from typing import Any

from serve.llm import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"regex": "[0-9]{3}-[0-9]{4}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'root ::= number ("+" number)+\nnumber ::= [1-9] [0-9]?'},
]


def main(checkpoints: list[str]) -> None:
    """Ask the bundled model (or another checkpoint) for one text of each form."""
    llm = LLM(*checkpoints[:1], max_num_seqs=4)
    params = [
        SamplingParams(
            temperature=0, max_tokens=64, structured_outputs=StructuredOutputsParams(**form)
        )
        for form in FORMS
    ]
    for form, output in zip(FORMS, llm.generate(["Say: "] * len(FORMS), params), strict=True):
        answer = output.outputs[0]
        print(f"{next(iter(form))}: {answer.text} ({answer.finish_reason})")


if __name__ == "__main__":
    main(sys.argv[1:])
