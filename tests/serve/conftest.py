"""Lockstep as its users start it: `serve run` in a process of its own, over real HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import openai

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "model" / "checkpoints"))
SERVE = Path(sys.executable).with_name("serve")
"""Ray's command, in the environment that runs the tests."""

FIGURES = ("prompt_tokens_computed", "kv_bytes_sent", "kv_bytes_received")
Ranks = dict[str, list[dict[str, Any]]]
"""By pool: what `/ready` tells of each rank."""
Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
"""By name and labels: a figure of `/metrics`."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def printed() -> Callable[..., str]:
    """What a command prints, which must not fail: `printed(sys.executable, ..., VARIABLE="1")`."""

    def run(*command: str | Path, **env: str) -> str:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@dataclass
class Server:
    """A running application."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    address: str

    def get(self, path: str) -> tuple[int, dict[str, Any]]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read() or b"{}")

    def client(self, api_key: str = "none") -> openai.OpenAI:
        """Return the official client, which asks once; a GPU machine may lack it."""
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0)

    def metrics(self, accept: str = "text/plain") -> tuple[str, str]:
        """Return the text of `/metrics` and its content type."""
        request = urllib.request.Request(self.url + "/metrics", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=120) as answer:
            return answer.read().decode(), answer.headers["Content-Type"]

    def totals(self) -> Series:
        """Return all series that may never fall: of counters and histograms."""
        from prometheus_client.parser import text_string_to_metric_families

        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.metrics()[0])
            if family.type in ("counter", "histogram")
            for sample in family.samples
        }

    def num_drafted(self, what: str) -> Counter[str]:
        """Return by pool how many drafts, tokens of drafts or accepted ones metrics tell."""
        found = Counter[str]()
        for (name, labels), value in self.totals().items():
            if name == f"lockstep:spec_decode_num_{what}_total":
                found[dict(labels)["engine"].partition("-")[0]] += int(value)
        return found

    def wait_until(
        self,
        is_met: Callable[[], Any],
        told: Callable[[], Any] | None = None,
        timeout_s: float = 600,
        period_s: float = 0.05,
    ) -> Any:
        """Return what `is_met` returns once that is true.

        Asks again what has no answer, or one without what is looked for. Fails with what is told,
        or with the log.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(OSError, KeyError, ValueError):
                if found := is_met():
                    return found
            assert time.monotonic() < deadline, told() if told else self.log.read_text()
            time.sleep(period_s)

    def ranks(self, pool: str) -> list[dict[str, Any]]:
        _, body = self.get("/ready")
        return self._ranks(body["pools"][pool])

    def ready_ranks(self, pool: str, timeout_s: float = 300) -> list[dict[str, Any]]:
        """Return a pool's ranks once each has reported that it is ready.

        A group is ready a moment before `/ready` shows its ranks' next reports.
        """
        self.wait_until(
            lambda: all(rank["state"] == "ready" for rank in self.ranks(pool)),
            lambda: self.ranks(pool),
            timeout_s,
        )
        return self.ranks(pool)

    def settled_ranks(
        self, have_told: Callable[[Ranks], bool] = lambda ranks: True, timeout_s: float = 300
    ) -> Ranks:
        """Wait until nothing runs; return the ranks by pool, whose figures two looks found alike.

        Ranks, their pool and the ingress each tell four times a second what they have heard, and
        are late where the machine is busy: `have_told` says that what is waited for is there.
        """
        deadline = time.monotonic() + timeout_s
        last: list[Any] = []
        while True:
            _, body = self.get("/ready")
            ranks = {name: self._ranks(pool) for name, pool in body["pools"].items()}
            every = [rank for pool in ranks.values() for rank in pool]
            figures = [rank[name] for rank in every for name in FIGURES]
            is_idle = all(r["num_free_blocks"] == r["num_blocks"] for r in every)
            if is_idle and figures == last and have_told(ranks):
                return ranks
            assert time.monotonic() < deadline, ranks
            last = figures
            time.sleep(1)

    def wait_until_ready(self, timeout_s: float = 900, *, is_compiled: bool = True) -> None:
        """Wait for all pools; unless told otherwise also until they have gone over to graphs.

        What starts needs the processor more than who asks whether it has.
        """

        def is_ready() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            status, body = self.get("/ready")
            return status == 200 and not (is_compiled and body["compiling"])

        self.wait_until(is_ready, timeout_s=timeout_s, period_s=0.25)

    def _ranks(self, pool: dict[str, Any]) -> list[dict[str, Any]]:
        return [rank for replica in pool["replicas"] for rank in replica["ranks"]]


@pytest.fixture(scope="session")
def mtp_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 model of three layers with an MTP layer, whose drafts are often right, and with
    the tokenizer of the bundled model."""
    import torch
    import transformers
    from mtp import save_with_mtp

    from model.config import ModelConfig
    from serve.config import bundled_model

    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("v3")
    latent = {"kv_lora_rank": 12, "q_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    config = transformers.DeepseekV3Config(
        **{"vocab_size": ModelConfig.from_dir(bundled_model()).vocab_size, "hidden_size": 32},
        **{"intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
        **{"num_key_value_heads": 2, "v_head_dim": 8, "first_k_dense_replace": 1},
        **{"n_group": 1, "topk_group": 1, "max_position_embeddings": 96, "initializer_range": 0.3},
        **latent,
        **experts,
    )
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    save_with_mtp(path, model, noise=0.05, volume=0.1)
    for file in bundled_model().glob("*token*.json"):
        shutil.copy(file, path)
    return path


@pytest.fixture(scope="session")
def http_port(ray_cluster: Any, new_port: Callable[[], int]) -> Iterator[int]:
    """Ray Serve's HTTP proxy on a free port of the run's cluster.

    `serve run` takes no port, but joins an instance that is there: two proxies on one port would
    share its requests in silence.
    """
    from ray import serve as ray_serve

    port = new_port()
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield port
    ray_serve.shutdown()


def start_server(
    args: Sequence[str | Path], *, address: str, port: int, log: Path, route: str = ""
) -> Server:
    """Start `serve run` with these arguments on a cluster, which `local` makes."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            [SERVE, "run", *args],
            cwd=ROOT,
            env=os.environ | {"RAY_ADDRESS": address},
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    return Server(f"http://127.0.0.1:{port}{route}", process, log, address)


@pytest.fixture
def start_serve() -> Iterator[Callable[..., Server]]:
    """Start `serve run`: `start_serve([...], address="local", port=..., log=...)`."""
    # Of who runs the tests in the background or under `nohup`: what they start would inherit it.
    signals = (signal.SIGINT, signal.SIGHUP)
    ignored = [number for number in signals if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield start_server
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.fixture(scope="session")
def server(
    ray_cluster: Any, http_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """`serve run serve.app:deploy` without arguments: the bundled model, two pools."""
    log = tmp_path_factory.mktemp("serve") / "log"
    address = ray_cluster.address_info["gcs_address"]
    started = start_server(["serve.app:deploy"], address=address, port=http_port, log=log)
    try:
        started.wait_until_ready()
        yield started
    finally:
        # As a user ends it. The instance stays: the proxy belongs to `http_port`.
        started.process.send_signal(signal.SIGTERM)
        started.process.wait(timeout=300)


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[openai.OpenAI]:
    """The official client of the run's application."""
    with server.client() as made:
        yield made


@contextmanager
def starting(ray_cluster: Any, port: int, directory: Path) -> Iterator[Callable[..., Server]]:
    """Yield a function that starts an application with these arguments; it ends with the block."""
    from ray import serve as ray_serve

    started: dict[str, Server] = {}
    address = ray_cluster.address_info["gcs_address"]

    def start(name: str, *arguments: str, is_compiled: bool = True) -> Server:
        options = ["--name", name, "--route-prefix", f"/{name}", "serve.app:deploy", *arguments]
        started[name] = start_server(
            options, address=address, port=port, log=directory / name, route=f"/{name}"
        )
        started[name].wait_until_ready(is_compiled=is_compiled)
        return started[name]

    try:
        yield start
    finally:
        for name, app in started.items():
            app.process.send_signal(signal.SIGTERM)
            app.process.wait(timeout=300)
            ray_serve.delete(name)


@pytest.fixture
def start_app(ray_cluster: Any, http_port: int, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Return a function that starts an application with these arguments; it ends with the test."""
    with starting(ray_cluster, http_port, tmp_path) as start:
        yield start


@pytest.fixture(scope="module")
def start_shared_app(
    ray_cluster: Any, http_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """As `start_app`; the application ends with the module."""
    with starting(ray_cluster, http_port, tmp_path_factory.mktemp("shared")) as start:
        yield start
