"""The status page and the progress of a start, as a browser and a reader of the log meet them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.observe.page import FILES

pytestmark = [pytest.mark.ray, pytest.mark.feature("R19")]

PAGE = Path(__file__).resolve().parents[3] / "serve" / "observe" / "page"


def get(url: str, key: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.get(url, headers=headers, timeout=300)


def test_the_page_comes_with_all_that_it_needs_and_may_load_nothing_else(server: Any) -> None:
    for path, (name, kind) in FILES.items():
        answer = get(server.url + path)
        assert answer.status_code == 200 and answer.headers["Content-Type"].startswith(kind)
        assert answer.content == (PAGE / name).read_bytes()
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy
        assert "script-src 'self'" in policy and "connect-src 'self'" in policy
        # Of a namespace nothing is loaded.
        found = re.findall(r"(?:https?:)?//[\w.]+", answer.text.replace("// ", ""))
        assert set(found) <= {"http://www.w3.org"}
    html = (PAGE / "page.html").read_text()
    named = re.findall(r'(?:src|href)="(?!#|data:)([^"]+)"', html)
    assert {"page.css", "page.js"} <= set(named)
    assert all(get(f"{server.url}/{name}").status_code == 200 for name in named)
    assert "<style" not in html and not re.search(r"\son\w+=|\sstyle=", html)
    script = (PAGE / "page.js").read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)
    ids = set(re.findall(r'\$\("([\w-]+)"\)', script))
    assert ids and ids <= set(re.findall(r'id="([\w-]+)"', html))


@pytest.mark.feature("R20")
@pytest.mark.slow
def test_a_start_tells_how_far_it_is_and_the_page_needs_no_key(
    start_app: Callable[..., Any], tmp_path: Path
) -> None:
    """While pieces are compiled: lines in the log, and growing times in `/ready`."""
    cold = f"compilation.cache_dir={tmp_path}"
    app = start_app("page", "pools=mixed", "api_keys=sesame", cold, is_compiled=False)
    for path in (*FILES, "/status"):
        assert get(app.url + path).status_code == 200
    assert get(app.url + "/status").json()["needs_key"] is True
    assert get(app.url + "/v1/models").status_code == 401
    assert get(app.url + "/v1/models", "sesame").status_code == 200
    seen: list[dict[str, Any]] = []

    def is_compiled() -> bool:
        _, body = app.get("/ready")
        seen.extend(body["loading"])
        return body["status"] == "ready" and not body["compiling"]

    app.wait_until(is_compiled)
    compiling = [entry for entry in seen if entry["what"] == "mixed: compiling"]
    assert compiling[-1]["elapsed_s"] > compiling[0]["elapsed_s"] >= 0
    assert compiling[-1]["done"] > 0
    said = (
        r"loading, \d+ s: .* for \d+ s",
        r"serves after [\d.]+ s, and compiles meanwhile",
        r"compiling while it serves, \d+ s: mixed: compiling \d+/\d+ for \d+ s",
        r"ready after [\d.]+ s",
    )
    for line in said:  # what an ingress logs reaches the console a little later
        app.wait_until(
            lambda line=line: re.search(f"lockstep.ingress: {line}", app.log.read_text())
        )
