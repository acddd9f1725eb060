"""A pool that Ray Serve scales while requests run."""

from __future__ import annotations

import json
import re
import threading
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]

OPTIONS = ["pools=mixed", "O=0", "max_num_seqs=4", "mixed.max_replicas=2"]
# A queue and rows decide: the targets are far from any step that a busy machine may take.
OPTIONS += ["ttft_target_s=60", "tpot_target_s=60", "drain_timeout_s=300", "scale_down_after_s=10"]
BODY = {"prompt": "Count from 3 to 9.", "temperature": 0, "max_tokens": 60, "ignore_eos": True}


class Client(threading.Thread):
    """Asks one request after the other; later with pauses, so that what it asks is a small part of
    what one replica can do, whatever time its steps took beside the other's."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self.ends = threading.Event()
        self.pause_s = 0.0
        self.found: list[tuple[int, str]] = []

    def run(self) -> None:
        while not self.ends.wait(self.pause_s):
            answer = httpx.post(self._url + "/v1/completions", json=BODY, timeout=600)
            text = answer.json()["choices"][0]["text"] if answer.is_success else answer.text
            self.found.append((answer.status_code, text))


@pytest.mark.feature("R16")
def test_a_pool_grows_under_load_and_shrinks_after_it_and_no_request_notices(
    start_app: Any,
) -> None:
    app = start_app("scaled", *OPTIONS, is_compiled=False)
    readiness: list[int] = []

    def pool() -> Any:
        _, body = app.get("/status")
        readiness.append(app.get("/ready")[0])
        states = [replica["state"] for replica in body["pools"]["mixed"]["replicas"]]
        return states, body["pools"]["mixed"].get("scaling"), body["max_live"] - 256

    wanted = httpx.post(app.url + "/v1/completions", json=BODY, timeout=600).json()
    clients = [Client(app.url) for _ in range(10)]
    for client in clients:
        client.start()
    app.wait_until(lambda: pool()[0] == ["ready", "ready"] and pool()[2] == 8, pool)
    _, scaling, _ = pool()
    assert (scaling["wanted"], scaling["least"], scaling["most"]) == (2, 1, 2)
    assert (scaling["was"], scaling["why"]) == (1, "load")
    clients[0].pause_s = 5.0
    for client in clients[1:]:
        client.ends.set()
    app.wait_until(lambda: pool()[0] == ["ready"] and pool()[2] == 4, pool)
    series = r'lockstep:replicas_wanted\{[^}]*engine="mixed"[^}]*\} (\S+)'
    assert [float(n) for n in re.findall(series, app.metrics()[0])] == [1]
    clients[0].ends.set()
    for client in clients:
        client.join(600)
    found = {each for client in clients for each in client.found}
    assert found == {(200, wanted["choices"][0]["text"])}, json.dumps(sorted(found))
    assert set(readiness) == {200}, "beside one that serves, another may load or drain"
    log = app.log.read_text()
    assert "mixed pool: 1 to 2 replicas (load)" in log
    assert "mixed pool: 2 to 1 replicas (calm)" in log
