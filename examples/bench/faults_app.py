"""An application under load, for `faults.py` and the tests of restarts, which strike it.

An answer counts as right if its tokens are those of the model in one process, however often its
group was rebuilt while it was streamed.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parents[2]
SERVE = Path(sys.executable).with_name("serve")
QUESTIONS = (
    "Count from 3 to 9.",
    "What is 12 + 30?",
    "Sort 5 2 9.",
    "Count from 11 to 19.",
    "Count from 5 to 20.",
    "What day comes after Monday?",
)
SCHEMA = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}
SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "top_p": 0.9, "seed": 7},
    "penalties": {
        "temperature": 0.8,
        "seed": 11,
        "frequency_penalty": 0.5,
        "presence_penalty": 0.5,
    },
    "grammar": {"temperature": 1.0, "seed": 3, "structured_outputs": {"json": SCHEMA}},
    "logprobs": {"temperature": 0, "logprobs": True, "top_logprobs": 3},
}
"""How each question is answered, by name, in fields of a chat request."""
Asked = tuple[str, str]
"""A question, and how it is answered."""
MAX_TOKENS = 60
TIMEOUT_S = 240.0


def right_answers() -> dict[Asked, tuple[int, ...]]:
    """Return the tokens of the bundled model in this process, in float32."""
    from serve.llm import LLM, SamplingParams, StructuredOutputsParams

    llm = LLM(dtype="float32", max_num_seqs=4, enforce_eager=True)
    answers = {}
    for asked in product(QUESTIONS, SAMPLED):
        question, how = asked
        fields = {**SAMPLED[how], "max_tokens": MAX_TOKENS}
        if "top_logprobs" in fields:
            fields["logprobs"] = fields.pop("top_logprobs")
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        [output] = llm.chat([{"role": "user", "content": question}], SamplingParams(**fields))
        answers[asked] = tuple(output.outputs[0].token_ids)
    return answers


class Load:
    """Clients that ask all questions in all ways in turn, each as a stream, until it is left.

    A client that is refused because a pool is being rebuilt asks again, as the answer's
    Retry-After says; nothing else may happen to it.
    """

    def __init__(
        self, url: str, right: Mapping[Asked, tuple[int, ...]], num_clients: int = 4
    ) -> None:
        self.lost: list[str] = []
        """Why, of each request that was not answered."""
        self.wrong: list[str] = []
        self.num_answers = 0
        self.num_refused = 0
        self.longest_pause_s = 0.0
        """Between two pieces of one stream."""
        self._url = urlsplit(url)
        self._right = right
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask_all, args=(client,)) for client in range(num_clients)
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(timeout=TIMEOUT_S)
            if thread.is_alive():
                raise SystemExit("load: wanted every stream to end, found one that hangs")

    def wait_for(self, num_answers: int) -> None:
        """Wait until so many more answers have come."""
        wanted, deadline = self.num_answers + num_answers, time.monotonic() + TIMEOUT_S
        while self.num_answers < wanted:
            if time.monotonic() > deadline:
                found = wanted - self.num_answers
                raise SystemExit(f"load: wanted {num_answers} more answers, {found} are missing")
            time.sleep(0.01)

    def _ask_all(self, client: int) -> None:
        turn = client
        while not self._is_over.is_set():
            asked = list(self._right)[turn % len(self._right)]
            turn += 1
            try:
                self._ask(asked)
            except (OSError, http.client.HTTPException, ValueError) as error:
                self.lost.append(f"{asked} {type(error).__name__}: {error}")

    def _ask(self, asked: Asked) -> None:
        question, how = asked
        connection = http.client.HTTPConnection(self._url.netloc, timeout=TIMEOUT_S)
        body = {
            "messages": [{"role": "user", "content": question}],
            **SAMPLED[how],
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "return_token_ids": True,
        }
        try:
            path = f"{self._url.path}/v1/chat/completions"
            connection.request("POST", path, json.dumps(body))
            answer = connection.getresponse()
            if answer.status == 503:
                answer.read()
                self.num_refused += 1
                self._is_over.wait(float(answer.headers["Retry-After"]))
                return
            if answer.status != 200:
                raise ValueError(f"status {answer.status}: {answer.read()!r}")
            self._judge(asked, self._tokens_of(answer))
        finally:
            connection.close()

    def _tokens_of(self, answer: http.client.HTTPResponse) -> tuple[int, ...]:
        tokens: list[int] = []
        heard_at, has_ended = time.monotonic(), False
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - heard_at)
            heard_at = now
            if line.startswith(b"data: [DONE]"):
                has_ended = True
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise ValueError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                tokens += choice.get("token_ids") or []
        if not has_ended:
            raise ValueError("the stream broke off")
        return tuple(tokens)

    def _judge(self, asked: Asked, tokens: tuple[int, ...]) -> None:
        with self._lock:
            self.num_answers += 1
            if tokens != self._right[asked]:
                self.wrong.append(f"{asked} wanted {self._right[asked]}, found {tokens}")


@dataclass
class Cluster:
    """A Ray cluster of its own, with Ray Serve's HTTP proxy on a free port."""

    address: str = ""
    port: int = 0

    def __enter__(self) -> Cluster:
        import socket

        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import ray
        from ray import serve as ray_serve

        context = ray.init(
            address="local",
            num_cpus=32,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
        self.address = context.address_info["gcs_address"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        http_options = {"host": "127.0.0.1", "port": self.port}
        ray_serve.start(proxy_location="HeadOnly", http_options=http_options)
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve as ray_serve

        ray_serve.shutdown()
        ray.shutdown()


@dataclass
class App:
    """An application that `serve run` started."""

    cluster: Cluster
    what: str
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def name(self) -> str:
        """What Ray Serve calls it."""
        return re.sub(r"\W+", "-", self.what)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.cluster.port}/{self.name}"

    def __enter__(self) -> App:
        options = ["--name", self.name, "--route-prefix", f"/{self.name}"]
        self.process = subprocess.Popen(
            [SERVE, "run", *options, "serve.app:deploy", *self.arguments],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": self.cluster.address},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return self

    def __exit__(self, *_: object) -> None:
        from ray import serve as ray_serve

        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)
        ray_serve.delete(self.name)

    def has_started(self) -> bool:
        """Whether it serves, and has gone over to what a cold start compiles meanwhile."""
        status, body = self.ready()
        return status == 200 and not body["compiling"]

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Return code and body of `/ready`; code 0 where nothing answers yet."""
        url = urlsplit(self.url)
        connection = http.client.HTTPConnection(url.netloc, timeout=10)
        try:
            connection.request("GET", f"{url.path}/ready")
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()
