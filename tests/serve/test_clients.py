"""Who asks: by key or by address, and never by a stranger's word."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.clients import UNKNOWN, Client, of_address, of_key


def scope(peer: str | None, *forwarded: str) -> dict[str, Any]:
    """Return what is read of a request's scope."""
    headers = [(b"x-forwarded-for", value.encode("latin1")) for value in forwarded]
    return {"client": None if peer is None else (peer, 5), "headers": headers}


def client(peer: str | None, *forwarded: str, trusted: int = 0, is_known: bool = True) -> Client:
    found = scope(peer, *forwarded)
    return of_address(found, trusted_proxies=trusted, is_peer_known=is_known)


@pytest.mark.parametrize(
    ("peer", "expected"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("[2001:db8::1]:80", "2001:db8::/64"),
        ("192.0.2.7:80", "192.0.2.7"),
        ("nonsense", UNKNOWN),
        ("", UNKNOWN),
        (None, UNKNOWN),
    ],
)
def test_addresses_of_one_client_are_one(peer: str | None, expected: str) -> None:
    assert client(peer) == expected


def test_an_address_that_may_come_from_a_header_is_not_believed() -> None:
    assert client("192.0.2.9", "192.0.2.9") == UNKNOWN
    assert client("192.0.2.9", "192.0.2.1, 192.0.2.9:77") == UNKNOWN
    assert client("192.0.2.7", "192.0.2.9") == "192.0.2.7"


def test_of_trusted_proxies_each_has_added_one_address() -> None:
    assert client("127.0.0.1", "1.1.1.1, 192.0.2.9", trusted=1) == "192.0.2.9"
    assert client("127.0.0.1", "1.1.1.1", "192.0.2.9, 10.0.0.1", trusted=2) == "192.0.2.9"
    assert client("127.0.0.1", "192.0.2.9", trusted=2) == UNKNOWN
    assert client("127.0.0.1", trusted=1) == UNKNOWN


ADDRESSES = st.ip_addresses().map(str) | st.sampled_from(["", "x", "192.0.2.7", "[::1]:5"])


@given(st.lists(ADDRESSES, max_size=3), st.integers(1, 3))
def test_no_header_makes_a_client_another_one(told: list[str], trusted: int) -> None:
    assert client("192.0.2.7", ",".join(told)) in ("192.0.2.7", UNKNOWN)
    hops = ["192.0.2.7", *(f"10.0.0.{i}" for i in range(trusted - 1))]
    assert client("127.0.0.1", ",".join([*told, *hops]), trusted=trusted) == "192.0.2.7"


def test_clients_with_keys_differ_and_tell_no_key() -> None:
    assert of_key("sesame") == of_key("sesame") != of_key("sesam")
    assert "sesame" not in of_key("sesame")
