"""Ray's own commands on a cluster of its own: build, deploy, status, shutdown, and jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
BODY = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


class Cluster(NamedTuple):
    """A cluster that `ray start` has made, with a dashboard."""

    gcs: str
    dashboard: str


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, new_port: Callable[[], int]
) -> Iterator[Cluster]:
    gcs, dashboard, agent, client = (new_port() for _ in range(4))
    ports = [f"--port={gcs}", f"--dashboard-port={dashboard}"]
    ports += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    size = ("--num-cpus=8", "--object-store-memory=200000000")
    log = tmp_path_factory.mktemp("ray") / "log"
    # Sockets below it have long names, which the system bounds.
    with log.open("wb") as out, tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        process = subprocess.Popen(
            [BIN / "ray", "start", "--head", "--block", f"--temp-dir={temporary}", *ports, *size],
            cwd="/",
            env={
                **{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"},
                "PATH": f"{BIN}:{os.environ['PATH']}",  # as in an activated environment
            },
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        found = Cluster(f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}")
        version = f"{found.dashboard}/api/version"
        wait_until(lambda: process.poll() or get(version)[0] == 200, log.read_text)
        assert process.poll() is None, log.read_text()
        yield found
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(children, timeout=5)
        for child in alive:
            child.kill()
        process.wait(30)


def wait_until(is_met: Callable[[], Any], told: Callable[[], Any] = lambda: "in vain") -> None:
    deadline = time.monotonic() + 900
    while not is_met():
        assert time.monotonic() < deadline, told()
        time.sleep(0.2)


def get(url: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
    """Return code and JSON of an answer; code 0 where there is none."""
    method = "GET" if body is None else "POST"
    with suppress(httpx.HTTPError, ValueError):
        answer = httpx.request(method, url, json=body, timeout=300, follow_redirects=True)
        return answer.status_code, answer.json() if answer.is_success else None
    return 0, None


def run(
    cluster: Cluster, *command: str | Path, cwd: Path = ROOT, fails: bool = False, address: str = ""
) -> str:
    """Run one of Ray's commands against the cluster, and return what it printed."""
    addresses = {"RAY_ADDRESS": address or cluster.gcs, "RAY_DASHBOARD_ADDRESS": cluster.dashboard}
    if not address and (command[0] == "serve" or command[:2] == ("ray", "job")):
        addresses["RAY_ADDRESS"] = cluster.dashboard
    done = subprocess.run(
        [BIN / command[0], *command[1:]],
        cwd=cwd,
        env=os.environ | addresses,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr


def told_by_status(cluster: Cluster) -> dict[str, Any]:
    """Return by application what `serve status` says, which takes seconds to start."""
    printed = run(cluster, "serve", "status")
    return dict(yaml.safe_load(printed[printed.index("proxies:") :])["applications"])


def wait_for_status(cluster: Cluster, application: str, wanted: str) -> None:
    def status() -> str:
        _, told = get(f"{cluster.dashboard}/api/serve/applications/")
        return str(told["applications"].get(application, {}).get("status")) if told else ""

    wait_until(lambda: status() == wanted, status)


def wait_until_ready(url: str) -> None:
    wait_until(lambda: get(f"{url}/ready")[0] == 200)


def answer_of(url: str) -> tuple[str, str]:
    """Return the model that answers, and its answer."""
    status, body = get(f"{url}/v1/chat/completions", BODY)
    assert status == 200
    return body["model"], body["choices"][0]["message"]["content"]


def deployable(path: Path, port: int, *applications: dict[str, Any]) -> Path:
    """Write a Serve YAML whose applications find this checkout."""
    found = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [{"runtime_env": found, **each} for each in applications],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def serve_started(cluster: Cluster) -> None:
    """Serve runs, without proxies: `serve run` joins it instead of asking for a port of its own."""
    run(cluster, "serve", "start", "--proxy-location=Disabled", address=cluster.gcs)


@pytest.fixture(scope="module")
def http_port(new_port: Callable[[], int]) -> int:
    """Of Serve, which keeps it for as long as the cluster lives."""
    return new_port()


def application(name: str, route: str, **args: Any) -> dict[str, Any]:
    args = {"pools": "mixed", "O": 0, **args}
    path = "serve.app:deploy"
    return {"name": name, "route_prefix": route, "import_path": path, "args": args}


@pytest.mark.feature("R02")
def test_two_applications_are_deployed_asked_and_shut_down(
    cluster: Cluster, http_port: int, tmp_path: Path
) -> None:
    """A name and a route each, one with two names; then refused arguments; then nothing is left.

    They show in `serve status`, in the line that `serve run` would end with. `port` is for that
    command alone.
    """
    url = f"http://127.0.0.1:{http_port}"
    one = application("one", "/one", served_model_name="first,also-first")
    two = application("two", "/two/deeper", served_model_name="second")
    file = deployable(tmp_path / "apps.yaml", http_port, one, two)
    assert "Sent deploy request successfully" in run(cluster, "serve", "deploy", str(file))
    for name in ("one", "two"):
        wait_for_status(cluster, name, "RUNNING")
    told = told_by_status(cluster)
    assert [told[name]["status"] for name in ("one", "two")] == ["RUNNING"] * 2
    wait_until_ready(f"{url}/one")
    wait_until_ready(f"{url}/two/deeper")
    assert answer_of(f"{url}/one") == ("first", "42")
    assert answer_of(f"{url}/two/deeper") == ("second", "42")
    names = [model["id"] for model in get(f"{url}/one/v1/models")[1]["data"]]
    assert names == ["first", "also-first"]
    assert get(f"{url}/v1/models")[0] == 404

    wrong = application("two", "/two/deeper", decode={"replicas": "many"}, pools="pd")
    address = application("three", "/three", port=9000)
    file = deployable(tmp_path / "wrong.yaml", http_port, one, wrong, address)
    run(cluster, "serve", "deploy", str(file))
    for name in ("two", "three"):
        wait_for_status(cluster, name, "DEPLOY_FAILED")
    # What `serve status` prints.
    _, found = get(f"{cluster.dashboard}/api/serve/applications/")
    told = found["applications"]
    assert "decode.replicas: wanted int, found 'many'" in told["two"]["message"]
    wanted = "port: wanted nothing outside of `serve run` (name it in http_options"
    assert wanted in told["three"]["message"]
    assert told["one"]["status"] == "RUNNING"
    assert answer_of(f"{url}/one") == ("first", "42")

    run(cluster, "serve", "shutdown", "-y")
    wait_until(lambda: get(f"{url}/one/ready")[0] != 200)


@pytest.mark.feature("R02")
def test_what_serve_build_writes_is_deployed_with_more_replicas(
    cluster: Cluster, http_port: int, tmp_path: Path
) -> None:
    """`serve build serve.default:app`, whose YAML then asks for two decode replicas."""
    built = tmp_path / "built.yaml"
    run(cluster, "serve", "build", "serve.default:app", "-o", str(built))
    [made] = yaml.safe_load(built.read_text())["applications"]
    assert made["import_path"] == "serve.default:app"
    assert [each["name"] for each in made["deployments"]] == [
        *("PrefillPool", "DecodePool", "Ingress")
    ]
    made["deployments"][1]["num_replicas"] = 2
    del made["runtime_env"]
    file = deployable(tmp_path / "apps.yaml", http_port, made)
    run(cluster, "serve", "deploy", str(file))
    url = f"http://127.0.0.1:{http_port}"
    wait_for_status(cluster, made["name"], "RUNNING")
    wait_until_ready(url)
    wait_until(lambda: len(get(f"{url}/ready")[1]["pools"]["decode"]["replicas"]) == 2)
    wait_until_ready(url)
    # It is left running: the next application replaces it.
    assert answer_of(url) == ("lockstep-tiny", "42")


class Clients:
    """Streams of a fixed length, one after another at each of several clients."""

    def __init__(self, url: str, num_clients: int, num_tokens: int) -> None:
        self.answers: list[tuple[int, ...]] = []
        self.failures: list[str] = []
        self._url, self._num_tokens = url, num_tokens
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(num_clients)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(900)
            assert not thread.is_alive()

    def _ask(self) -> None:
        body = {
            **{"prompt": "Count from 3 to 9.", "temperature": 0, "stream": True},
            **{"max_tokens": self._num_tokens, "ignore_eos": True, "return_token_ids": True},
        }
        while not self._is_over.is_set():
            token_ids: list[int] = []
            try:
                with httpx.stream("POST", self._url, json=body, timeout=900) as answer:
                    if not answer.is_success:
                        self.failures.append(f"{answer.status_code} {answer.read()!r}")
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            for choice in json.loads(line[6:])["choices"]:
                                token_ids += choice["token_ids"] or []
            except (httpx.HTTPError, KeyError) as error:
                self.failures.append(repr(error))
            self.answers.append(tuple(token_ids))


@pytest.mark.feature("R02", "P08", "X08")
def test_no_stream_notices_that_replicas_go_and_others_take_their_place(
    cluster: Cluster, http_port: int, tmp_path: Path
) -> None:
    """`num_replicas` falls from two to one, and then other arguments replace the one that is left,
    and the ingress. What runs on a replica that is stopped goes on at another one, with its KV."""
    num_clients, num_tokens = 8, 600
    url = f"http://127.0.0.1:{http_port}/drains"

    def deployed(num_replicas: int, **args: Any) -> None:
        # In bfloat16 what is computed again may round to other tokens.
        made = application("drains", "/drains", dtype="float32", drain_timeout_s=600, **args)
        pool = {"name": "MixedPool", "num_replicas": num_replicas}
        file = deployable(tmp_path / "app.yaml", http_port, {**made, "deployments": [pool]})
        # What `serve deploy` sends, which takes as long to start as a stream to end.
        asked = yaml.safe_load(file.read_text())
        address = f"{cluster.dashboard}/api/serve/applications/"
        httpx.put(address, json=asked, timeout=300).raise_for_status()

    def replicas() -> list[dict[str, Any]]:
        _, body = get(f"{url}/status")
        return list(body["pools"]["mixed"]["replicas"]) if body is not None else []

    def are_busy(num_replicas: int) -> bool:
        """Return whether so many are there, and all serve and have something to do."""
        ranks = [rank for each in replicas() if each["state"] == "ready" for rank in each["ranks"]]
        is_all = len(ranks) == len(replicas()) == num_replicas
        return is_all and all(rank["num_running"] for rank in ranks)

    def max_live() -> int:
        _, body = get(f"{url}/status")
        return int(body["max_live"]) if body is not None else 0

    def num_transfers() -> float:
        """Return how often KV was read, which no engine of a mixed pool does but for this."""
        told = httpx.get(f"{url}/metrics", timeout=300).text
        return sum(map(float, re.findall(r"^lockstep:kv_transfers_total\{.*\} (\S+)$", told, re.M)))

    deployed(2, max_num_seqs=32)
    wait_for_status(cluster, "drains", "RUNNING")
    wait_until_ready(url)
    with Clients(f"{url}/v1/completions", num_clients, num_tokens) as clients:
        wait_until(lambda: are_busy(2), replicas)
        assert num_transfers() == 0
        deployed(1, max_num_seqs=32)
        wait_until(lambda: are_busy(1), replicas)
        assert num_transfers() > 0
        before = max_live()
        deployed(1, max_num_seqs=31)
        # Both ingresses answer for a while, and the one that goes knows nothing of its successor.
        wait_until(lambda: all(max_live() == before - 1 for _ in range(8)), replicas)
        wait_until(lambda: are_busy(1), replicas)
    assert not clients.failures
    [answer] = {*clients.answers}
    assert len(answer) == num_tokens and len(clients.answers) > num_clients
    run(cluster, "serve", "shutdown", "-y")


@pytest.mark.feature("P01", "R04")
def test_a_job_runs_an_offline_batch_on_several_ranks(cluster: Cluster, tmp_path: Path) -> None:
    """Its output and exit status are the job's; the files are those of the working directory, and
    its ranks are actors of the cluster. Alone, without a cluster, it writes the answers of a file.
    """
    asked = [{**BODY, "max_tokens": 8}, {**BODY, "max_tokens": 1}]
    (tmp_path / "asked.jsonl").write_text("".join(f"{json.dumps(body)}\n" for body in asked))
    submit = ("ray", "job", "submit", "--working-dir", ".", "--", "python", "examples/batch.py")
    group = ("tensor_parallel_size=2", "data_parallel_size=2", "O=0")
    printed = run(cluster, *submit, *group)
    assert '"text": "42"' in printed and "succeeded" in printed
    out = tmp_path / "out.jsonl"
    files = ("--input", str(tmp_path / "asked.jsonl"), "--output", str(out))
    run(cluster, "python", "examples/batch.py", *files, "O=0")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["text"] for answer in answers] == ["42", "4"]
    assert [answer["finish_reason"] for answer in answers] == ["stop", "length"]
    (tmp_path / "asked.jsonl").write_text('{"messages": [], "colour": "red"}\n')
    printed = run(cluster, *submit, "--input", str(tmp_path / "asked.jsonl"), fails=True)
    assert "line 1: wanted" in printed and "colour" in printed


@pytest.mark.feature("R03", "R04")
def test_a_job_serves_while_it_runs(cluster: Cluster) -> None:
    script = str(ROOT / "examples" / "serve_in_job.py")
    submit = ("ray", "job", "submit", "--working-dir", ".", "--", "python", script)
    printed = run(cluster, *submit, "O=0", "pools=mixed")
    assert "What is 12 + 30? -> 42" in printed and "succeeded" in printed


@pytest.mark.feature("Y05", "R05")
def test_ray_data_answers_a_dataset(cluster: Cluster) -> None:
    script = str(ROOT / "examples" / "ray_data.py")
    printed = run(cluster, "python", script, "--engines", "2", "--rows", "48")
    [right] = re.findall(r"(\d+) of 48 right", printed)
    assert int(right) > 40  # as the model is: it has learnt to add, not perfectly


@pytest.mark.feature("E01", "F07", "R01")
@pytest.mark.parametrize(
    ("arguments", "last_line"),
    [
        (
            # Found while the application serves: the option exists, and Inductor compares it.
            ("cc.inductor_compile_config.max_fusion_size=many",),
            r"InductorError: TypeError: .*",
        ),
        (
            ("O=0", "kv_memory=900TiB"),
            r"rank dp=0 tp=0 .* kv_memory: wanted at most the \d+ bytes that are available, .*",
        ),
    ],
    ids=["while it serves", "while it loads"],
)
def test_serve_run_ends_with_what_fails_every_start(
    cluster: Cluster,
    serve_started: None,
    tmp_path: Path,
    arguments: tuple[str, ...],
    last_line: str,
) -> None:
    command = ["serve", "run", "serve.app:deploy", "pools=mixed", f"cc.cache_dir={tmp_path}"]
    printed = run(cluster, *command, *arguments, fails=True, address=cluster.gcs)
    assert re.fullmatch(last_line, printed.strip().splitlines()[-1]), printed
