"""Batch inference with Ray Data: a dataset goes through engines that Ray places.

    pip install 'lockstep-serve[data]'
    python examples/ray_data.py [--engines 2] [--rows 64]

Each engine is an actor that loads the model once and then takes batch after batch, so the dataset
may be larger than memory; Ray Data keeps all of them busy and starts one that died anew.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from serve.llm import LLM, SamplingParams

BATCH_SIZE = 16


class Adder:
    """One engine. Ray Data calls it with a batch: a column of questions in, one of answers out."""

    def __init__(self) -> None:
        self._llm = LLM(max_num_seqs=BATCH_SIZE, compilation_config=0)
        self._params = SamplingParams(temperature=0, max_tokens=16)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the batch with its answers."""
        chats = [[{"role": "user", "content": question}] for question in batch["question"]]
        answers = self._llm.chat(chats, self._params)
        return {**batch, "answer": [answer.outputs[0].text for answer in answers]}


def main() -> None:
    """Ask for sums, and print how many are right."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    sums = [(i % 50, (7 * i) % 50) for i in range(options.rows)]
    asked = [{"question": f"What is {a} + {b}?", "sum": str(a + b)} for a, b in sums]
    answered = ray.data.from_items(asked).map_batches(
        Adder, batch_size=BATCH_SIZE, compute=ray.data.ActorPoolStrategy(size=options.engines)
    )
    rows = answered.take_all()
    right = sum(row["answer"] == row["sum"] for row in rows)
    for row in rows[:3]:
        print(f"{row['question']} -> {row['answer']}")
    print(f"{right} of {len(rows)} right")


if __name__ == "__main__":
    main()
