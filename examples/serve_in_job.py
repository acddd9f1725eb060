"""Serve inside a Ray job: the application starts with the job, answers, and ends with it.

    ray job submit --address http://127.0.0.1:8265 --working-dir . -- \
        python examples/serve_in_job.py [KEY=VALUE ...]

Arguments are those of `deploy`. While the job runs, clients reach the server at Ray Serve's address
too, below /job.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import ray
from ray import serve as ray_serve

from serve.app import deploy
from serve.openai.endpoint import RequestRefused

QUESTIONS = ("What is 12 + 30?", "Count from 3 to 9.", "What day comes after Monday?")
READY_S = 60.0


def body_of(question: str) -> dict[str, Any]:
    """Return what would be posted to /v1/chat/completions."""
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "temperature": 0, "max_tokens": 64}


def first_answer(lockstep: Any, body: dict[str, Any]) -> dict[str, Any]:
    """Ask until the ingress has heard that the engines are ready, which it is told of later."""
    deadline = time.monotonic() + READY_S
    while True:
        try:
            found: dict[str, Any] = lockstep.chat.remote(body).result()
            return found
        except RequestRefused as refused:
            if refused.status != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def main(arguments: list[str]) -> None:
    """Serve, ask all questions, print the answers, and end."""
    ray.init()
    given: dict[str, Any] = dict(each.split("=", 1) for each in arguments)
    lockstep = ray_serve.run(deploy(given), name="job", route_prefix="/job")
    try:
        answered = first_answer(lockstep, body_of(QUESTIONS[0]))
        others = [lockstep.chat.remote(body_of(question)) for question in QUESTIONS[1:]]
        bodies = [answered, *(answer.result() for answer in others)]
        for question, body in zip(QUESTIONS, bodies, strict=True):
            print(f"{question} -> {body['choices'][0]['message']['content']}")
    finally:
        ray_serve.delete("job")


if __name__ == "__main__":
    main(sys.argv[1:])
