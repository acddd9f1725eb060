"""Random checkpoints with transformers as their oracle, and a ZeroMQ context."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# The modules of `parity` and of the simulator find each other, here and in tests.
for folder in ("cluster/parity", "model/checkpoints", "simulation"):
    sys.path.append(str(Path(__file__).resolve().parents[1] / folder))


@pytest.fixture(scope="session")
def make_oracle(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return the checkpoint of a named shape, made once."""
    from parity_oracle import Oracle, new_oracle

    made: dict[str, Oracle] = {}

    def make(name: str) -> Oracle:
        if name not in made:
            made[name] = new_oracle(tmp_path_factory.mktemp("checkpoint"), name)
        return made[name]

    return make


@pytest.fixture
def context() -> Iterator[Any]:
    """A ZeroMQ context."""
    import zmq

    from cluster.wire.sockets import end_context

    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    end_context(made, "test", linger=0)


@pytest.fixture(scope="session")
def oracle(make_oracle: Callable[[str], Any]) -> Any:
    return make_oracle("tied")
