"""The status page in headless Chromium: live figures, the chat, keyboard, phone, both schemes.

Chromium is driven by its own DevTools protocol over a pipe, so nothing but the browser is needed.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

pytestmark = [
    pytest.mark.ray,
    pytest.mark.feature("R19"),
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"needs one of {', '.join(NAMES)}, found none"),
]

ANSWER_S = 300.0
"""How long Chromium may take to answer a command."""
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(fd), fcntl.F_DUPFD, 10) for fd in sys.argv[1:3]]
for fd, end in zip((3, 4), ends):
    os.dup2(end, fd)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from descriptor 3 and answers on 4."""
KEYS = {"Tab": (9, ""), "Enter": (13, "\r")}
"""By key its Windows code, which the protocol wants, and its text."""
SHIFT = 8

CONTRASTS = """(() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const light = (color) => {
    const [r, g, b] = channels(color).map((c) => c / 255).map((c) =>
      c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [low, high] = [light(a), light(b)].sort((x, y) => x - y);
    return (high + 0.05) / (low + 0.05);
  };
  const ground = (element) => {
    for (let each = element; each; each = each.parentElement) {
      const [, , , alpha = 1] = channels(getComputedStyle(each).backgroundColor);
      if (alpha === 1) return getComputedStyle(each).backgroundColor;
    }
    return "rgb(255, 255, 255)";
  };
  const found = [];
  for (const element of document.body.querySelectorAll("*")) {
    const hasText = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!(hasText || element.matches("textarea")) || element.disabled) continue;
    if (!element.getClientRects().length) continue;
    const color = getComputedStyle(element).color;
    found.push([element.outerHTML.slice(0, 80), ratio(color, ground(element))]);
  }
  const probe = document.body.appendChild(document.createElement("i"));
  const color = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  for (const under of ["ground", "sheet"]) {
    for (const name of ["ink", "quiet", "good", "busy", "bad", "accent"])
      found.push([`${name} on ${under}`, ratio(color(name), color(under))]);
    // Of the edge of a field 3 is wanted.
    found.push([`edge on ${under}`, ratio(color("edge"), color(under)) * 1.5]);
  }
  probe.remove();
  return found;
})()"""
"""By text that can be seen, and colour of a state: its contrast with what is behind it."""


class Chromium:
    """A browser; its pages are `Page`s."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        read_end, self._commands = os.pipe()
        self._answers, write_end = os.pipe()
        command = [CHROMIUM, "--headless=new", "--remote-debugging-pipe", "--no-sandbox"]
        command += ["--disable-gpu", "--no-first-run", "--disable-background-networking"]
        command += ["--disable-component-update", "--disable-sync", f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(read_end), str(write_end), *command],
            pass_fds=(read_end, write_end),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read_end)
        os.close(write_end)
        self._ids, self._rest = itertools.count(1), b""
        self.exceptions: list[str] = []
        """What was thrown in pages and caught by nobody, and what their policy refused."""

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Return the result of a command."""
        request: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if session is not None:
            request["sessionId"] = session
        os.write(self._commands, json.dumps(request).encode() + b"\0")
        while True:
            message = self._receive()
            if message.get("method") == "Runtime.exceptionThrown":
                self.exceptions.append(json.dumps(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded":
                entry = message["params"]["entry"]
                if entry["source"] == "security":
                    self.exceptions.append(entry["text"])
            if message.get("id") == request["id"]:
                assert "error" not in message, (method, message["error"])
                result: dict[str, Any] = message["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + ANSWER_S
        while b"\0" not in self._rest:
            wait_s = deadline - time.monotonic()
            assert wait_s > 0 and select.select([self._answers], [], [], wait_s)[0], "no answer"
            piece = os.read(self._answers, 1 << 16)
            assert piece, "Chromium ended"
            self._rest += piece
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        return found

    def close(self) -> None:
        self.call("Browser.close")
        self._process.wait(timeout=300)
        os.close(self._commands)
        os.close(self._answers)


class Page:
    """A tab that shows one address."""

    def __init__(self, chromium: Chromium, url: str) -> None:
        self._chromium = chromium
        self._target = chromium.call("Target.createTarget", url="about:blank")["targetId"]
        attached = chromium.call("Target.attachToTarget", targetId=self._target, flatten=True)
        self._session: str = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        # A tab that is not in front counts as hidden, and the page rests.
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.protocol === 'http:'")
        self.value("window.isSame = true")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._chromium.call(method, self._session, **params)

    def value(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout_s: float = 600) -> Any:
        """Return its value once that is true."""
        deadline = time.monotonic() + timeout_s
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, (expression, self.value("document.body.innerText"))
            time.sleep(0.05)
        return found

    def press(self, key: str, modifiers: int = 0) -> None:
        code, text = KEYS[key]
        about = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int) -> None:
        shape = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **shape)

    def prefer(self, scheme: str) -> None:
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def close(self) -> None:
        self._chromium.call("Target.closeTarget", targetId=self._target)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    started = Chromium(tmp_path_factory.mktemp("chromium"))
    yield started
    started.close()


@pytest.fixture
def open_page(chromium: Chromium) -> Iterator[Callable[[Any], Page]]:
    """Return a function that shows an application's page; nothing may be thrown on it."""
    pages: list[Page] = []

    def show(app: Any) -> Page:
        pages.append(Page(chromium, app.url + "/"))
        pages[-1].wait_for("document.querySelector('#pools table') !== null")
        return pages[-1]

    yield show
    for page in pages:
        page.close()
    found, chromium.exceptions = chromium.exceptions, []
    assert found == []


@pytest.fixture(scope="module")
def server(start_shared_app: Callable[..., Any]) -> Any:
    """The application of the other tests, but that its pieces, as traced, are there in seconds."""
    return start_shared_app("shown", "compilation.use_inductor=false")


@pytest.fixture
def requests(server: Any) -> Iterator[None]:
    """Keep two requests running."""
    is_over = threading.Event()

    def ask() -> None:
        with server.client() as client:
            while not is_over.is_set():
                client.completions.create(model="lockstep-tiny", prompt="3 4 5", max_tokens=200)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    yield
    is_over.set()
    for thread in threads:
        thread.join(timeout=900)
        assert not thread.is_alive()


def number(selector: str) -> str:
    """Return an expression for the number that an element shows; NaN without one."""
    text = f"document.querySelector({json.dumps(selector)})?.textContent"
    return f"Number(({text} ?? '').replace(/[^0-9.]/g, '') || NaN)"


TOKENS = "#figures > div:first-child .value"
STEP = ".replica:nth-last-child(1 of .replica) tbody .step"


def test_figures_grow_while_requests_run(
    server: Any, open_page: Callable[[Any], Page], requests: None
) -> None:
    page = open_page(server)
    page.wait_for(f"{number(STEP)} >= 0")
    first = page.value(number(STEP))
    page.wait_for(f"{number(STEP)} > {first}")
    page.wait_for(f"{number(TOKENS)} > 0")
    page.wait_for(
        "[...document.querySelectorAll('.sizes .size:not(.unused) > :last-child')]"
        "  .some((each) => each.textContent.endsWith('% pad'))"
    )
    assert page.value("window.isSame") is True
    assert page.value("document.title") == "ready \u00b7 Lockstep"


def test_the_chat_is_used_by_keyboard_and_its_answer_grows(
    server: Any, open_page: Callable[[Any], Page]
) -> None:
    page = open_page(server)
    page.press("Tab")
    assert page.value("document.activeElement.className") == "skip"
    page.press("Enter")
    page.wait_for("document.activeElement.id === 'question'")
    page.value("document.activeElement.blur()")
    for _ in range(12):  # round, without the link
        page.press("Tab")
        if page.value("document.activeElement.id") == "question":
            break
    look = "getComputedStyle(document.activeElement)"
    assert page.value("document.activeElement.id") == "question"
    assert page.value(f"{look}.outlineStyle") == "solid"
    assert page.value(f"parseFloat({look}.outlineWidth)") >= 2

    page.type("Count from 3 to 90.")
    page.press("Enter", SHIFT)
    assert page.value("document.activeElement.value") == "Count from 3 to 90.\n"
    assert page.value("document.querySelectorAll('#talk p').length") == 0
    page.value(
        "new MutationObserver(() => window.changes += 1)"
        "  .observe(document.querySelector('#talk'), {childList: true, subtree: true}); 0"
    )
    for _ in range(20):  # a busy machine may bring a short answer in few pieces
        page.value("window.changes = 0; document.querySelector('#pace').textContent = ''; 0")
        page.press("Enter")
        page.wait_for("document.querySelector('#pace').textContent.includes('tokens')")
        # The question, a place for the answer, and each piece when it comes: a whole one is one.
        if page.value("window.changes") > 5:
            break
        page.type("Count from 3 to 90.")
    assert page.value("window.changes") > 5
    assert page.value("document.activeElement.id") == "question"
    assert page.value("document.activeElement.value") == ""


def test_a_phone_shows_all_without_scrolling_sideways(
    server: Any, open_page: Callable[[Any], Page], requests: None
) -> None:
    page = open_page(server)
    page.resize(400, 800)
    page.wait_for("innerWidth === 400 && document.querySelectorAll('.sizes .size').length > 2")
    assert page.value("document.documentElement.scrollWidth") <= 400
    cut = (
        "[...document.querySelectorAll('.scroll, th, td, .value, .note, .sheet')]"
        ".filter((each) => each.scrollWidth > each.clientWidth + 1).map((each) => each.outerHTML)"
    )
    assert page.value(cut) == []
    assert page.value("document.querySelector('#send').getBoundingClientRect().height") >= 44


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_stand_out_in_both_schemes(
    server: Any, open_page: Callable[[Any], Page], scheme: str
) -> None:
    page = open_page(server)
    page.prefer(scheme)
    is_dark = "getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128"
    page.wait_for(f"({is_dark}) === {str(scheme == 'dark').lower()}")
    for is_old in (False, True):  # so it looks while nothing answers
        page.value(f"document.querySelector('#main').className = '{'old' if is_old else ''}'")
        found = page.value(CONTRASTS)
        assert len(found) > 40
        assert [(what, ratio) for what, ratio in found if ratio < 4.5] == []


def test_the_page_tells_of_a_killed_rank_and_outlives_its_application(
    start_app: Callable[..., Any], open_page: Callable[[Any], Page]
) -> None:
    from ray import serve as ray_serve

    app = start_app("seen", "pools=mixed", "O=0", is_compiled=False)
    page = open_page(app)
    said = "document.querySelector('#events').textContent"
    state = "document.querySelector('#state').textContent"
    [rank] = app.ready_ranks("mixed")
    page.wait_for(f"document.querySelector('#pools').textContent.includes('{rank['pid']}')")
    os.kill(rank["pid"], signal.SIGKILL)
    pools = "document.querySelector('#pools').innerText"
    page.wait_for(rf"/rebuilding for \d+ s/.test({pools}) && {state} === 'mixed rebuilding'")
    assert page.value("document.querySelector('.error').textContent").startswith(
        f"rank dp 0 tp 0 of epoch 0 (pid {rank['pid']}) ended"
    )
    page.wait_for(f"document.querySelector('.progress') && {pools}.includes('loading')")
    page.wait_for(rf"/mixed ready again after \d+ s/.test({said}) && {state} === 'ready'", 240)

    app.process.send_signal(signal.SIGTERM)
    app.process.wait(timeout=600)
    ray_serve.delete("seen")
    page.wait_for(f"/^(status 404|no answer) for /.test({state})")
    assert page.value("document.querySelector('#main').className") == "old"
    start_app("seen", "pools=mixed", "O=0", is_compiled=False)
    page.wait_for(f"{said}.includes('answers again') && {state} === 'ready'", 240)
    assert page.value("document.querySelector('#main').className") == ""
    assert page.value("window.isSame") is True
    page.value("document.querySelector('#question').focus(); 0")
    page.type("Count from 3 to 9.")
    page.press("Enter")
    page.wait_for("document.querySelector('#pace').textContent.includes('tokens')")
