"""Serve inside a Ray job: the application starts with the job, answers, and ends with it.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python examples/serve_in_job.py [KEY=VALUE ...]

Arguments are those of `deploy`. While the job runs, clients reach the server at Ray Serve's address
too, below /job.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray import serve as ray_serve

from serve.app import deploy

QUESTIONS = ("What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?")


def body_of(question: str) -> dict[str, Any]:
    """Return what would be posted to /v1/chat/completions."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 64}


def main(arguments: list[str]) -> None:
    """Serve, ask all questions at once, print the answers, and end."""
    ray.init()
    given: dict[str, Any] = dict(each.split("=", 1) for each in arguments)
    lockstep = ray_serve.run(deploy(given), name="job", route_prefix="/job")
    try:
        answers = [lockstep.chat.remote(body_of(question)) for question in QUESTIONS]
        for question, answer in zip(QUESTIONS, answers, strict=True):
            message = answer.result()["choices"][0]["message"]
            print(f"{question} -> {message['content']}")
    finally:
        ray_serve.delete("job")


if __name__ == "__main__":
    main(sys.argv[1:])
