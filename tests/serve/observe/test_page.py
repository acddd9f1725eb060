"""The status page, as a browser meets it. That it needs no key: `test_wired.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from serve.observe.page import FILES

pytestmark = [pytest.mark.ray, pytest.mark.feature("R19")]

PAGE = Path(__file__).resolve().parents[3] / "serve" / "observe" / "page"


def get(url: str) -> httpx.Response:
    return httpx.get(url, timeout=300)


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
