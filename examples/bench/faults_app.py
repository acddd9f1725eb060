"""An application under load, for `faults.py`, which strikes it, and for those that change its size
(`rollouts.py`, `scaling_live.py`).

An answer counts as right if its tokens are those of the model in one process, however often its
group was rebuilt while it was streamed, or another engine went on with it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
LONG: dict[str, dict[str, Any]] = {
    "long": {"temperature": 1.0, "top_p": 0.9, "seed": 5, "max_tokens": 1900, "ignore_eos": True}
}
"""Likewise; so long that an answer outlives what replaces replicas."""
Asked = tuple[str, str]
"""A question, and how it is answered."""
MAX_TOKENS = 60
TIMEOUT_S = 900.0


def fields_of(how: str) -> dict[str, Any]:
    """Return the fields of a chat request that say how a question is answered."""
    return {"max_tokens": MAX_TOKENS, **(SAMPLED | LONG)[how]}


def right_answers(
    all_asked: Iterable[Asked] = tuple(product(QUESTIONS, SAMPLED)),
) -> dict[Asked, tuple[int, ...]]:
    """Return the tokens of the bundled model in this process, in float32."""
    from serve.llm import LLM, SamplingParams, StructuredOutputsParams

    llm = LLM(dtype="float32", max_num_seqs=4, enforce_eager=True)
    answers = {}
    for asked in all_asked:
        question, how = asked
        fields = fields_of(how)
        if "top_logprobs" in fields:
            fields["logprobs"] = fields.pop("top_logprobs")
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        [output] = llm.chat([{"role": "user", "content": question}], SamplingParams(**fields))
        answers[asked] = tuple(output.outputs[0].token_ids)
    return answers


class Refused(Exception):
    """A request came while nothing could take it, and is to come again."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(retry_after_s)
        self.retry_after_s = retry_after_s


class Lost(Exception):
    """A request ended without its whole answer."""


Ask = Callable[[dict[str, Any]], Iterator[list[int]]]
"""Streams a chat request: yields tokens as they come, nothing as soon as the answer has begun.
Raises Refused, Lost."""


def over_http(url: str) -> Ask:
    """Ask an application at its address."""
    return partial(_ask_over_http, urlsplit(url).netloc, urlsplit(url).path)


def _ask_over_http(netloc: str, path: str, body: dict[str, Any]) -> Iterator[list[int]]:
    connection = http.client.HTTPConnection(netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", f"{path}/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status == 503:
            raise Refused(float(answer.headers["Retry-After"]))
        if answer.status != 200:
            raise Lost(f"status {answer.status}: {answer.read()!r}")
        yield []
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                return
            if line.startswith(b"data: "):
                yield tokens_of(json.loads(line[6:]))
        raise Lost("the stream broke off")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Lost(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()


def tokens_of(chunk: dict[str, Any]) -> list[int]:
    """Return the tokens of a streamed answer's chunk; raises Lost where it tells of an error."""
    if "error" in chunk:
        raise Lost(chunk["error"]["message"])
    return [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]


class Load:
    """Clients that ask all questions in all ways in turn, each as a stream, until it is left.

    A client that is refused because a pool is being rebuilt asks again, as the answer's
    Retry-After says; nothing else may happen to it.
    """

    def __init__(self, asks: Sequence[Ask], right: Mapping[Asked, tuple[int, ...]]) -> None:
        """Make a client of each way to ask."""
        self.lost: list[str] = []
        """Why, of each request that was not answered."""
        self.num_cut = 0
        """Those of them whose answers had begun."""
        self.wrong: list[str] = []
        self.num_answers = 0
        self.num_refused = 0
        self.longest_pause_s = 0.0
        """Between two pieces of one stream."""
        self.longest_s = 0.0
        """Of one stream, from its first piece to its last."""
        self.num_active = len(asks)
        """How many clients ask; the others wait."""
        self.rest_s = 0.0
        """How long each client rests between two requests."""
        self._num_asked = [0] * len(asks)
        """By client: requests that have ended."""
        self._right = right
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask_all, args=client) for client in enumerate(asks)
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
        wanted = self.num_answers + num_answers
        self._wait_until(lambda: self.num_answers >= wanted, f"{num_answers} more answers")

    def wait_for_each(self) -> None:
        """Wait until what each client asks now has ended: only then is it known how long it
        paused."""
        before = [*self._num_asked]
        self._wait_until(
            lambda: all(now > then for now, then in zip(self._num_asked, before, strict=True)),
            "an end of each client's stream",
        )

    def _wait_until(self, is_done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise SystemExit(f"load: wanted {what} in {TIMEOUT_S:g} s, found none")
            time.sleep(0.01)

    def _ask_all(self, client: int, ask: Ask) -> None:
        turn = client
        while not self._is_over.is_set():
            if client >= self.num_active:
                self._is_over.wait(0.1)
                continue
            asked = list(self._right)[turn % len(self._right)]
            turn += 1
            try:
                self._judge(asked, self._tokens(asked, ask))
            except Refused as refused:
                self.num_refused += 1
                self._is_over.wait(refused.retry_after_s)
            except Lost as lost:
                self.lost.append(f"{asked} {lost}")
            self._num_asked[client] += 1
            self._is_over.wait(self.rest_s)

    def _tokens(self, asked: Asked, ask: Ask) -> tuple[int, ...]:
        question, how = asked
        body = {
            "messages": [{"role": "user", "content": question}],
            **fields_of(how),
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        began_at = heard_at = 0.0
        try:
            for piece in ask(body):
                now = time.monotonic()
                began_at, heard_at = began_at or now, heard_at or now
                self.longest_pause_s = max(self.longest_pause_s, now - heard_at)
                self.longest_s = max(self.longest_s, now - began_at)
                heard_at = now
                tokens += piece
        except Lost:
            self.num_cut += bool(began_at)
            raise
        return tuple(tokens)

    def _judge(self, asked: Asked, tokens: tuple[int, ...]) -> None:
        with self._lock:
            self.num_answers += 1
            if tokens != self._right[asked]:
                self.wrong.append(f"{asked} wanted {self._right[asked]}, found {tokens}")


@dataclass
class Cluster:
    """A Ray cluster of its own, with Ray Serve's HTTP proxy on a free port of its head.

    Nodes are processes of this machine. With a dashboard it takes what `serve deploy` sends.
    """

    has_dashboard: bool = False
    address: str = ""
    port: int = 0
    nodes: dict[str, Any] = field(default_factory=dict)
    """Those that were added, by id, the oldest first."""
    _cluster: Any = None

    def __enter__(self) -> Cluster:
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import ray
        import ray.cluster_utils
        from ray import serve as ray_serve

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        head = {"num_cpus": 32, "object_store_memory": 200 * 2**20, "resources": {HEAD: 1000}}
        head |= {"include_dashboard": self.has_dashboard, "dashboard_port": free_port()}
        self._cluster = ray.cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self.address = self._cluster.address
        ray.init(self.address, log_to_driver=False, logging_level="ERROR")
        self.port = free_port()
        http_options = {"host": "127.0.0.1", "port": self.port}
        ray_serve.start(proxy_location="HeadOnly", http_options=http_options)
        return self

    def __exit__(self, *_: object) -> None:
        import ray
        from ray import serve as ray_serve

        ray_serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    @property
    def logs(self) -> Path:
        """Where the processes of all nodes write."""
        return Path(self._cluster.head_node.get_logs_dir_path())

    def add_node(self, resources: dict[str, float]) -> None:
        """Add a node with a CPU and these resources."""
        store = 100 * 2**20
        node = self._cluster.add_node(
            num_cpus=1, object_store_memory=store, resources=resources, include_dashboard=False
        )
        self.nodes[node.node_id] = node

    def kill_node(self, node_id: str) -> None:
        """Kill a node's raylet, and whatever of the node outlives it."""
        self._cluster.remove_node(self.nodes.pop(node_id), allow_graceful=False)

    def drain_node(self, node_id: str, deadline_s: float) -> None:
        """Announce that a node will go, as the autoscaler does."""
        from ray._raylet import GcsClient
        from ray.core.generated.autoscaler_pb2 import DrainNodeReason

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = round((time.time() + deadline_s) * 1000)
        is_taken, why = GcsClient(address=self.address).drain_node(
            node_id, reason, "it will be replaced", deadline_ms
        )
        if not is_taken:
            raise SystemExit(f"drain: wanted a node that can be drained, found: {why}")

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Send what `serve deploy` sends of a Serve YAML with these applications."""
        config = {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": applications,
        }
        connection = http.client.HTTPConnection(self._cluster.webui_url, timeout=TIMEOUT_S)
        try:
            connection.request("PUT", "/api/serve/applications/", json.dumps(config))
            answer = connection.getresponse()
            if answer.status != 200:
                raise SystemExit(f"serve deploy: {answer.status} {answer.read()!r}")
        finally:
            connection.close()


HEAD = "head"
"""A resource of the head alone."""


def free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class App:
    """An application on a cluster."""

    cluster: Cluster
    what: str

    @property
    def name(self) -> str:
        """What Ray Serve calls it."""
        return re.sub(r"\W+", "-", self.what)

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.cluster.port}/{self.name}"

    def deploy(self, args: dict[str, Any], deployments: Sequence[dict[str, Any]]) -> None:
        """Deploy it, alone, as `serve deploy` does: anew, or with changes."""
        entry = {"name": self.name, "route_prefix": f"/{self.name}", "args": args}
        entry |= {"import_path": "serve.app:deploy", "deployments": deployments}
        self.cluster.deploy(entry)

    def has_started(self) -> bool:
        """Whether it serves, and has gone over to what a cold start compiles meanwhile."""
        status, body = self.ready()
        return status == 200 and not body["compiling"]

    def ready(self) -> tuple[int, dict[str, Any]]:
        """Return code and body of `/ready`; code 0 where nothing answers yet."""
        return self.get("/ready")

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        """Return code and body of an answer; code 0 where there is none."""
        url = urlsplit(self.url)
        connection = http.client.HTTPConnection(url.netloc, timeout=10)
        try:
            connection.request("GET", url.path + path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        except (OSError, http.client.HTTPException, ValueError):
            return 0, {}
        finally:
            connection.close()


@contextmanager
def run_app(cluster: Cluster, what: str, arguments: Sequence[str]) -> Iterator[App]:
    """Start an application with `serve run`, and end it."""
    from ray import serve as ray_serve

    app = App(cluster, what)
    options = ["--name", app.name, "--route-prefix", f"/{app.name}"]
    process = subprocess.Popen(
        [SERVE, "run", *options, "serve.app:deploy", *arguments],
        cwd=ROOT,
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield app
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        ray_serve.delete(app.name)


@contextmanager
def deployed(
    cluster: Cluster, what: str, args: dict[str, Any], deployments: Sequence[dict[str, Any]]
) -> Iterator[App]:
    """Start an application of a Serve YAML, and end it; it is the only one that is deployed so."""
    app = App(cluster, what)
    app.deploy(args, deployments)
    try:
        yield app
    finally:
        cluster.deploy()
