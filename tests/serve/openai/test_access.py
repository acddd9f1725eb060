"""Keys, hosts and origins: who may ask."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette

from compile.errors import FieldError
from serve.arguments import texts
from serve.clients import UNKNOWN, ApiKeys, Client, of_key
from serve.config import deploy_config
from serve.ingress import Ingress
from serve.openai.app import build_app
from serve.openai.generation import Serving

OPEN = ("/health", "/ready", "/version")


def guarded(serving: Serving, *, is_peer_known: bool = True, **arguments: Any) -> Starlette:
    """Return an app with these arguments of `deploy`."""
    args = msgspec.structs.replace(serving.settings.args, **arguments)
    serving.settings = msgspec.structs.replace(serving.settings, args=args)
    return build_app(serving, is_peer_known=is_peer_known)


@pytest.fixture
def ask(serving: Serving, send_to: Any) -> Any:
    """Ask an app that is guarded like this: `ask({...}, path, headers)`."""

    def send(access: dict[str, Any], path: str, headers: dict[str, str]) -> httpx.Response:
        defaults = {"open_paths": OPEN, "api_keys": "", "allowed_hosts": "", "allowed_origins": ""}
        app = guarded(serving, **{**defaults, **access})
        method = "OPTIONS" if "Access-Control-Request-Method" in headers else "GET"
        answer: httpx.Response = send_to(app, method, path, headers=headers)
        return answer

    return send


@pytest.mark.feature("R18")
def test_without_a_key_only_the_open_paths_answer(ask: Any) -> None:
    keys = {"api_keys": ("sesame", "simsim")}
    for path in OPEN:
        assert ask(keys, path, {}).status_code == 200
    assert ask({**keys, "open_paths": ("/version",)}, "/health", {}).status_code == 401
    assert ask(keys, "/v1/nothing", {}).status_code == 401
    for header in ("", "Bearer", "Bearer wrong", "Basic sesame", "sesame", "Bearer sesam\xe9"):
        answer = ask(keys, "/v1/models", {"Authorization": header.encode("latin-1")})
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert "sesam" not in answer.text
    for key in ("sesame", "simsim"):
        for scheme in ("Bearer", "bearer"):
            headers = {"Authorization": f"{scheme} {key}"}
            assert ask(keys, "/v1/models", headers).status_code == 200


@pytest.mark.parametrize(
    ("access", "is_peer_known", "headers", "client"),
    [
        ({"api_keys": ("sesame",)}, True, {"Authorization": "Bearer sesame"}, of_key("sesame")),
        ({}, True, {"Authorization": "Bearer sesame"}, "192.0.2.7"),
        ({}, True, {"X-Forwarded-For": "192.0.2.9"}, "192.0.2.7"),
        ({}, False, {"X-Forwarded-For": "192.0.2.9"}, UNKNOWN),
        ({"trusted_proxies": 1}, False, {"X-Forwarded-For": "192.0.2.9"}, "192.0.2.9"),
    ],
)
def test_a_place_is_its_clients(
    serving: Serving, access: Any, is_peer_known: bool, headers: dict[str, str], client: str
) -> None:
    app = guarded(serving, is_peer_known=is_peer_known, **access)
    assert entered_as(serving, app, headers) == [client]


@pytest.mark.parametrize(("is_behind", "client"), [(False, "192.0.2.7"), (True, UNKNOWN)])
def test_an_ingress_behind_haproxy_does_not_take_it_for_the_client(
    serving: Serving, is_behind: bool, client: str
) -> None:
    # An ingress is made in a Serve replica alone; this is what the method reads of one.
    ingress: Any = SimpleNamespace(
        _core=SimpleNamespace(serving=serving), _is_behind_haproxy=is_behind
    )
    assert entered_as(serving, Ingress.__serve_build_asgi_app__(ingress), {}) == [client]


def entered_as(serving: Serving, app: Starlette, headers: dict[str, str]) -> list[Client]:
    """Post a completion from 192.0.2.7; return the clients that got a place for it."""
    entered: list[Client] = []
    enter = serving.admission.enter
    serving.admission.enter = lambda client: (entered.append(client), enter(client))[1]  # type: ignore[method-assign]

    async def post() -> int:
        transport = httpx.ASGITransport(app=app, client=("192.0.2.7", 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as asking:
            answer = await asking.post("/v1/completions", json={"prompt": "a"}, headers=headers)
            return answer.status_code

    assert asyncio.run(post()) == 200
    return entered


@pytest.mark.feature("R18")
def test_a_file_of_keys_is_read_again_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, now = tmp_path / "keys", 0.0
    file.write_text("# ours\none\n\n  two  \n")
    keys = ApiKeys(["given"], file, clock=lambda: now)
    assert [keys.has(key) for key in ("one", "two", "given", "three", "# ours", "")] == [
        True, True, True, False, False, False,
    ]  # fmt: skip
    file.write_text("three\n")
    os.utime(file, ns=(5, 5))
    assert keys.has("one")  # it was looked at a moment ago
    now = 2.0
    assert [keys.has(key) for key in ("one", "three", "given")] == [False, True, True]
    for broken in ("", "two words\n", None):
        now += 2
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        assert keys.has("three") and not keys.has("")
    assert "the keys that were read before stay" in caplog.text
    assert "three" not in caplog.text and "words" not in caplog.text


@pytest.mark.feature("R18")
def test_keys_are_in_no_text_of_the_configuration(tmp_path: Path) -> None:
    config = deploy_config({"api_keys": "sesame, simsim"})
    assert texts(config.args.api_keys) == ("sesame", "simsim")
    assert "sesame" not in repr(config) and "simsim" not in repr(config)
    file = tmp_path / "keys"
    for raw in ({"api_keys": "two words"}, {"api_keys": ["ke\ty"]}, {"api_keys": [["sesame"]]}):
        with pytest.raises(FieldError, match=r"^api_keys") as raised:
            deploy_config(raw)
        assert "sesame" not in str(raised.value) and "words" not in str(raised.value)
    with pytest.raises(FieldError, match=r"^api_keys_file: wanted a file of keys, found"):
        deploy_config({"api_keys_file": str(file)})
    file.write_text("# none\n")
    with pytest.raises(FieldError, match=r"^api_keys_file: wanted at least one key"):
        deploy_config({"api_keys_file": str(file)})


OURS = ["localhost:8000", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "gpu-box"]
OURS += ["lockstep.default.svc:80", "printer.local", ""]
OTHERS = ["evil.example.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "evil.com."]


@pytest.mark.parametrize(
    ("host", "is_allowed"), [*((o, True) for o in OURS), *((o, False) for o in OTHERS)]
)
def test_a_name_that_anybody_may_register_is_no_name_of_ours(
    ask: Any, host: str, is_allowed: bool
) -> None:
    answer = ask({}, "/v1/models", {"Host": host})
    assert answer.status_code == (200 if is_allowed else 403)
    for allowed in ((host,), ("*",)):
        assert ask({"allowed_hosts": allowed}, "/v1/models", {"Host": host}).status_code == 200
    # Who has a key has no need to be protected from pages.
    with_key = {"Host": host, "Authorization": "Bearer sesame"}
    assert ask({"api_keys": ("sesame",)}, "/v1/models", with_key).status_code == 200


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:8000", 200),
        ("https://localhost:8000", 200),
        ("http://localhost:9000", 403),
        ("https://evil.example.com", 403),
        ("null", 403),
    ],
)
def test_a_page_of_another_server_may_not_ask(ask: Any, origin: str, status: int) -> None:
    headers = {"Host": "localhost:8000", "Origin": origin}
    answer = ask({}, "/v1/models", headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers
    allowed = ask({"allowed_origins": (origin,)}, "/v1/models", headers)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == origin


def test_a_browser_may_ask_whether_a_page_may_ask(ask: Any) -> None:
    headers = {
        "Origin": "https://ours.example.com",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    access = {"api_keys": ("sesame",), "allowed_origins": ("https://ours.example.com",)}
    answer = ask(access, "/v1/chat/completions", headers)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://ours.example.com"
    other = ask(access, "/v1/chat/completions", {**headers, "Origin": "https://evil.example.com"})
    assert "access-control-allow-origin" not in other.headers
