"""An application has one secret, which Ray alone hands out and nothing shows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from local_ranks import config_of
from zmq.utils import z85

from cluster.wire.credentials import SECRET_BYTES, Credentials

pytestmark = pytest.mark.ray


def test_all_processes_of_an_application_are_told_one_secret(ray_cluster: Any) -> None:
    """However many ask at once, and again after a redeploy: nothing of a deployment is in it."""
    import ray

    from cluster.actors.gcs_store import application_secret

    ask = ray.remote(num_cpus=0)(application_secret)
    told = ray.get([ask.remote(name) for name in ("one", "two") for _ in range(4)])
    ones, twos = set(told[:4]), set(told[4:])
    assert len(ones) == len(twos) == 1 and ones != twos
    assert {application_secret("one")} == ones
    assert len(told[0]) == SECRET_BYTES


def test_no_secret_is_made_up_outside_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    from cluster.actors import gcs_store

    monkeypatch.setattr(gcs_store.internal_kv, "_internal_kv_initialized", lambda: False)
    with pytest.raises(RuntimeError, match=r"^secret: wanted a process that is connected to Ray"):
        gcs_store.application_secret("one")


def test_the_secret_stands_in_no_log(running_group: Any, oracle: Any) -> None:
    """Nor does its key: of a group that loads, serves nothing and is told of by an error."""
    import ray

    from cluster.actors.rank_group import RankDied

    secret = b"Neither seen nor logged by a one"
    engine = config_of(oracle.path, num_kv_blocks=3)  # too few: loading fails

    async def scenario() -> None:
        async with running_group(engine, credentials=Credentials("test", secret)):
            raise AssertionError("it has loaded")

    with pytest.raises(RankDied, match="num_kv_blocks") as raised:
        asyncio.run(scenario())
    shown = [repr(raised.value), repr(raised.value.__cause__)]
    logs = Path(ray._private.worker._global_node.get_logs_dir_path())
    shown += [path.read_text(errors="replace") for path in logs.rglob("*") if path.is_file()]
    assert len(shown) > 5
    needles = ["Neither seen", secret.hex(), z85.encode(secret).decode()]
    assert not [needle for needle in needles for text in shown if needle in text]
