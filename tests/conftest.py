"""What all tests share: the environment, the Ray cluster, the tiny model and the feature report.

The environment is set before anything imports ray or torch, which read it once. Ranks and replicas
inherit it from the raylet that a test starts.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

# Each of a run's hundreds of processes would otherwise compile every module from its source.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

if "LOCKSTEP_CACHE_ROOT" not in os.environ:
    # What is compiled is compiled once a run, and nothing is found that an earlier run left.
    os.environ["LOCKSTEP_CACHE_ROOT"] = tempfile.mkdtemp(prefix="lockstep-tests-")
    atexit.register(shutil.rmtree, os.environ["LOCKSTEP_CACHE_ROOT"], ignore_errors=True)

os.environ.update(
    # Tokens would be written into the home directory, and processes that disagree about them
    # fail with connection errors.
    RAY_AUTH_MODE="disabled",
    RAY_USAGE_STATS_ENABLED="0",
    # Two ranks with a thread per core each wait for one another at every OpenMP barrier: where a
    # test lets them have more than one, they sleep there and leave the core to others.
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="passive",
    # Inductor would find out by ten C++ builds what this processor and compiler can do, anew in
    # each process that compiles; tests of a start from nothing let it.
    TORCHINDUCTOR_VEC_ISA_OK="1",
    # No test asks the network for a model.
    HF_HUB_OFFLINE="1",
    # On a busy machine Serve's proxy needs longer than 5 s, after which it would be killed, or 10.
    RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="120",
    RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S="120",
    # Tokenizers warn when a process forks after they used threads.
    TOKENIZERS_PARALLELISM="false",
)

import asyncio
import contextlib
import functools
import gc
import importlib.util
import random
import re
import selectors
import socket
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.dont_write_bytecode = False
pytest_plugins = ["pytester"]

TESTS = Path(__file__).resolve().parent
NUM_WORKERS = 2
"""Processes that share the files of a whole run; one has all that share a Ray cluster."""

# A plain run draws the same examples every time, from seeds that hypothesis derives from each
# test's source. `--hypothesis-profile=explore` draws new ones and prints how to repeat a failure.
hypothesis.settings.register_profile("lockstep", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", print_blob=True, deadline=None, max_examples=500)
hypothesis.settings.load_profile("lockstep")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Add the options of fuzz tests and of slow machines, and load the feature report.

    By its path: the name `tests` may belong to another package.
    """
    parser.addoption(
        "--fuzz",
        type=int,
        default=1,
        metavar="FACTOR",
        help="run fuzz tests with so many times as many examples; 20 before a release",
    )
    parser.addoption(
        "--begin-until",
        type=float,
        metavar="SECONDS",
        help="skip tests that have not begun by then, in seconds since 1970, and say how many",
    )
    name = "lockstep_feature_report"
    if pluginmanager.has_plugin(name):
        return
    spec = importlib.util.spec_from_file_location(name, TESTS / "feature_report.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while it is executed.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    pluginmanager.register(module, name)


@pytest.hookimpl(optionalhook=True)  # the check of a GPU runs without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Share a whole run among workers; what is named on the command line runs in this process."""
    is_named = config.args_source is pytest.Config.ArgsSource.ARGS
    return 0 if is_named else min(NUM_WORKERS, os.cpu_count() or 1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all files that share the run's Ray cluster to one worker.

    Another would start the cluster and its application again. A file whose tests start a cluster
    of their own goes to whichever worker is free, as any other file does.
    """
    from xdist.scheduler import LoadFileScheduling

    if config.getoption("dist") != "loadfile":
        return None

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "ray" if _shares_ray(config.rootpath / file) else file

    return Scheduling(config, log)


SHARED = "ray_cluster|running_group|server|start_app|start_shared_app"
"""Fixtures that are, or need, the run's cluster."""


@functools.cache
def _starts_ray(file: Path) -> bool:
    """Return whether tests of a file start Ray.

    Read from its text: the process that hands files out does not collect their tests.
    """
    return "mark.ray" in file.read_text()


@functools.cache
def _shares_ray(file: Path) -> bool:
    """Return whether tests of a file use the run's cluster."""
    return _starts_ray(file) and re.search(rf"\b({SHARED}): ", file.read_text()) is not None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start Ray, before `-m` selects, and skip those that need a missing GPU.

    What shares the cluster comes first, as one worker has all of it; then what starts Ray, the
    simulator's files and those of the examples, which take longest, so that no worker is left with
    one of them alone.
    """
    long = (TESTS / "simulation", TESTS / "examples")
    items.sort(
        key=lambda item: (
            not _shares_ray(item.path),
            not _starts_ray(item.path),
            item.path.parent not in long,
        )
    )
    for item in items:
        if "ray_cluster" in getattr(item, "fixturenames", ()):
            item.add_marker("ray")
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if gpu_items and not _has_cuda():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, found none"))


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Path:
    """The bundled model: a directory with config.json, weights and tokenizer."""
    return TESTS.parent / "examples" / "tiny"


@pytest.fixture(scope="session")
def fuzz(request: pytest.FixtureRequest) -> Callable[[int], hypothesis.settings]:
    """Return settings of a fuzz test, with so many examples times what the command line says."""
    factor: int = request.config.getoption("--fuzz")

    def of(max_examples: int) -> hypothesis.settings:
        return hypothesis.settings(
            max_examples=max_examples * factor,
            deadline=None,
            database=None,
            print_blob=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )

    return of


class _JumpingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._now = 0.0
        selector = selectors.SelectSelector()
        selector.select = self._jump  # type: ignore[method-assign]
        super().__init__(selector)

    def time(self) -> float:
        return self._now

    def _jump(self, timeout: float | None = None) -> list[Any]:
        self._now += timeout or 0.0
        return []


@pytest.fixture
def run_in_jumps() -> Callable[..., Any]:
    """Returns what a coroutine returns on an event loop whose clock, which begins at 0, jumps to
    whatever is next instead of waiting for it."""

    def run(main: Coroutine[Any, Any, Any]) -> Any:
        with asyncio.Runner(loop_factory=_JumpingLoop) as runner:
            return runner.run(main)

    return run


@pytest.fixture(scope="session")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The one Ray cluster of the run; its value is ray's context with the addresses."""
    import ray

    request.session.stash[END_CLUSTER] = functools.partial(request._fixturedef.finish, request)
    yield _start_ray(ray)
    ray.shutdown()


END_CLUSTER = pytest.StashKey[Callable[[], None]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    until: float | None = item.config.getoption("--begin-until")
    if until is not None and time.time() > until:
        pytest.skip("the machine was too slow: not begun in time (--begin-until)")


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the run's cluster, and what it serves, after the last test that needs it: while it does
    nothing it takes a fifth of two cores."""
    if nextitem is not None and not _shares_ray(nextitem.path):
        item.session.stash.get(END_CLUSTER, lambda: None)()


def _start_ray(ray: Any, num_attempts: int = 5) -> Any:
    """Start a cluster; Ray gives up after 30 s, which a busy machine may need."""
    try:
        return ray.init(
            address="local",
            num_cpus=32,
            object_store_memory=200 * 2**20,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except Exception as error:  # Ray raises no other
        if "timed out during startup" not in str(error) or num_attempts == 1:
            raise
        ray.shutdown()
        return _start_ray(ray, num_attempts - 1)


@pytest.fixture(autouse=True, scope="session")
def _whole_heap_at_the_end() -> Iterator[None]:
    """Let the interpreter free everything when it ends: nanobind prints what it finds then."""
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _small_heap(_whole_heap_at_the_end: None) -> None:
    """Keep garbage collection from looking, again and again, through what was there before."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _unsealed() -> Iterator[None]:
    """An engine of this process seals it when it is ready; the next test starts afresh."""
    yield
    if capture := sys.modules.get("compile.graphs.capture"):
        capture.unseal()


@pytest.fixture(scope="session")
def new_port() -> Callable[[], int]:
    """Returns another TCP port with each call, on which nobody listened a moment ago.

    They lie between those that Ray gives its workers and those that the system gives to whoever
    asks for any, so that nobody comes upon one before the test uses it.
    """
    ports = random.SystemRandom().sample(range(20_000, 32_000), 1000)

    def new() -> int:
        while True:
            port = ports.pop()
            with socket.socket() as probe, contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port

    return new


@pytest.fixture
def free_port(new_port: Callable[[], int]) -> int:
    """A TCP port on which nobody listened a moment ago."""
    return new_port()
