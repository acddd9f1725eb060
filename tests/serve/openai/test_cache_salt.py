"""Which requests find each other's prompts in the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.messages import SALT_BYTES
from compile.errors import FieldError
from model.fields import Source, convert
from serve.admission import Admission
from serve.clients import HANDLE, MAX_SALT_CHARS, CacheSalt, CacheSalts, Client, of_key
from serve.config import ApiSettings, deploy_config
from serve.llm import LLM
from serve.openai.app import build_app
from serve.openai.generation import Serving

Ask = Callable[..., int]
SECRET = b"s" * 32
_numbers = count(100)


@pytest.fixture
def new_text() -> str:
    """Several blocks of text that no other test has sent."""
    return " ".join(f"{next(_numbers)} and" for _ in range(60))


@pytest.fixture
def asker(llm: LLM, engine_backend: Any, admission: Admission, send_to: Any) -> Any:
    """Return a function that asks an application deployed with these arguments, again and again.

    It returns how many tokens of the prompt were cached.
    """

    def start(**arguments: str) -> Ask:
        settings = ApiSettings(
            served_model_name="tiny",
            max_model_len=llm.config.max_model_len,
            args=deploy_config({"api_keys": "one,two", **arguments}).args,
        )
        serving = Serving(settings, engine_backend, lambda: llm.tokenizer, admission, secret=SECRET)
        app = build_app(serving)

        def ask(key: str, path: str, text: str, **fields: Any) -> int:
            prompts: dict[str, dict[str, Any]] = {
                "completions": {"prompt": text, "max_tokens": 1},
                "chat/completions": {
                    "messages": [{"role": "user", "content": text}],
                    "max_tokens": 1,
                },
                "responses": {"input": text, "max_output_tokens": 1, "store": False},
            }
            answer = send_to(
                app,
                "POST",
                f"/v1/{path}",
                json={**prompts[path], "temperature": 0, **fields},
                headers={"Authorization": f"Bearer {key}"},
            )
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            return int(details["cached_tokens"])

        return ask

    return start


PATHS = ("completions", "chat/completions", "responses")


@pytest.mark.feature("R18")
@pytest.mark.parametrize("path", PATHS)
def test_a_key_finds_its_own_prompts_and_no_others(asker: Any, new_text: str, path: str) -> None:
    ask: Ask = asker()
    assert ask("one", path, new_text) == 0
    assert ask("two", path, new_text) == 0
    assert ask("one", path, new_text) > 32 and ask("two", path, new_text) > 32


@pytest.mark.parametrize("path", PATHS)
def test_a_salt_divides_what_one_key_finds(asker: Any, new_text: str, path: str) -> None:
    ask: Ask = asker()
    for salt in ({}, {"cache_salt": "a"}, {"cache_salt": "b"}):
        assert ask("one", path, new_text, **salt) == 0
        assert ask("one", path, new_text, **salt) > 32
    assert ask("two", path, new_text, cache_salt="a") == 0


def test_keys_share_where_they_are_said_to_and_salts_divide_all_the_same(
    asker: Any, new_text: str
) -> None:
    ask: Ask = asker(prefix_cache_sharing="all")
    assert ask("one", "completions", new_text) == 0
    assert ask("two", "completions", new_text) > 32
    assert ask("two", "completions", new_text, cache_salt="a") == 0
    assert ask("one", "completions", new_text, cache_salt="a") > 32


def test_choices_of_one_prompt_share(asker: Any, new_text: str) -> None:
    ask: Ask = asker()
    assert ask("one", "completions", new_text, n=3, temperature=1) == 0
    assert ask("one", "completions", new_text, n=3, temperature=1) > 32


CLIENTS = st.text(max_size=8).map(Client)
SALTS = st.none() | st.text(min_size=1, max_size=8)


@given(one=st.tuples(CLIENTS, SALTS), other=st.tuples(CLIENTS, SALTS))
def test_salts_are_equal_for_equal_clients_and_salts_alone(
    one: tuple[Client, str | None], other: tuple[Client, str | None]
) -> None:
    per_key, shared = CacheSalts(b"secret", is_per_key=True), CacheSalts(b"secret")
    assert (per_key.of(*one) == per_key.of(*other)) == (one == other)
    assert (shared.of(*one) == shared.of(*other)) == (one[1] == other[1])


def test_a_salt_tells_nothing_to_those_without_the_secret() -> None:
    client = of_key("sesame")
    salts = [CacheSalts(secret, is_per_key=True).of(client, None) for secret in (b"1", b"2")]
    assert salts[0] != salts[1] and {len(salt) for salt in salts} == {SALT_BYTES}
    assert CacheSalts(b"1").of(client, None) == b""
    assert CacheSalts(b"1", is_per_key=True).of(HANDLE, None) not in (b"", *salts)


@pytest.mark.parametrize("salt", ["", "x" * (MAX_SALT_CHARS + 1)])
def test_a_salt_that_is_empty_or_too_long_is_refused(salt: str) -> None:
    with pytest.raises(FieldError, match=r"^cache_salt: wanted 1 to 1024 characters, found"):
        convert(salt, CacheSalt, Source.PYTHON, "cache_salt")
    convert("x" * MAX_SALT_CHARS, CacheSalt, Source.PYTHON, "cache_salt")


def test_keys_share_the_prefix_cache_only_if_the_deployment_says_so() -> None:
    keys = {"device": "cpu", "api_keys": "one,other"}
    assert deploy_config(keys).args.divides_prefix_cache
    assert not deploy_config({**keys, "prefix_cache_sharing": "all"}).args.divides_prefix_cache
    assert not deploy_config({"device": "cpu"}).args.divides_prefix_cache
