"""The host names that a server accepts as its own, and its addresses."""

import pytest

from store.errors import UsageError
from store.hosts import is_loopback, is_own_name, listen

OWN = ("127.0.0.1", "127.0.0.1:8050", "localhost", "LocalHost:1", "[::1]:80", "[::1]", "192.168.1.7")
FOREIGN = (
    "",
    ":80",
    "[]",
    "evil.example",
    "evil.example:8050",
    "localhost.evil.example",
    "127.0.0.1.evil.example:8050",
    "1.2.3.4.evil",
    "localhost:80:80",
    "localhost:http",
    "[localhost",
    "127.0.0.1]",
    "user@localhost",
)


@pytest.mark.parametrize("host", OWN + FOREIGN)
def test_a_name_is_its_own_or_foreign(host: str):
    assert is_own_name(host, "127.0.0.1") == (host in OWN)


def test_the_configured_host_name_is_its_own():
    assert is_own_name("Big.Example:8000", "big.example")
    assert not is_own_name("other.example", "big.example")
    assert not is_own_name("big.example:8000:1", "big.example")


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.7", False),
        ("localhost.example", False),
    ],
)
def test_loopback_addresses_are_recognised(host: str, loopback: bool):
    assert is_loopback(host) == loopback


def test_an_address_that_is_taken_or_empty_is_refused():
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"127.0.0.1 port {port} must be free to listen on"):
            listen("127.0.0.1", port)
    with pytest.raises(UsageError, match="got none"):
        listen("", 0)
