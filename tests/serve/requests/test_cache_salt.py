"""Which requests find each other's prompts in the prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.wire.messages import SALT_BYTES
from compile.errors import FieldError
from model.fields import Source, convert
from serve.arguments import parse_args
from serve.clients import HANDLE, MAX_SALT_CHARS, CacheSalt, CacheSalts, Client, of_key
from serve.config import deploy_config

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
    with pytest.raises(FieldError, match=r"^prefix_cache_sharing: wanted key or all, found 'no'"):
        parse_args({"prefix_cache_sharing": "no"})
