"""Generate in this process, without Ray.

python examples/offline.py [-O LEVEL] [-cc.FIELD=VALUE] [config=FILE] [CHECKPOINT]
"""

from __future__ import annotations

import sys

from serve.arguments import split_dashed
from serve.llm import LLM, SamplingParams


def main(arguments: list[str]) -> None:
    """Ask the bundled model (or another checkpoint) three questions."""
    compilation, others = split_dashed(arguments)
    files = [other for other in others if other.startswith("config=")]
    checkpoints = [other for other in others if other not in files]
    options = {"config": files[0].removeprefix("config=")} if files else {"max_num_seqs": 4}
    llm = LLM(*checkpoints[:1], **compilation, **options)
    questions = ["What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?"]
    for question in questions:
        messages = [{"role": "user", "content": question}]
        [answer] = llm.chat(messages, SamplingParams(temperature=0, max_tokens=64))
        print(f"{question} -> {answer.outputs[0].text}")


if __name__ == "__main__":
    main(sys.argv[1:])
