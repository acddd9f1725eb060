"""Generate in this process, without Ray.

python examples/offline.py [-O LEVEL] [-cc.FIELD=VALUE] [CHECKPOINT]
"""

from __future__ import annotations

import sys

from compile.aliases import split_arguments
from serve.llm import LLM, SamplingParams


def main(arguments: list[str]) -> None:
    """Ask the bundled model (or another checkpoint) three questions."""
    compilation, checkpoints = split_arguments(arguments)
    llm = LLM(*checkpoints[:1], compilation_config=compilation, max_num_seqs=4)
    questions = ["What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?"]
    for question in questions:
        messages = [{"role": "user", "content": question}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
        print(f"{question} -> {answer.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1:])
