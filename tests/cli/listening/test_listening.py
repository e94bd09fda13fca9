"""Sockets, and who may ask: what the page and the model server share."""

import socket
from pathlib import Path

import pytest

from mjax.cli import listening
from mjax.cli.listening import is_known_host

NAMES = frozenset({"localhost", "head"})


@pytest.mark.parametrize(
    "host",
    ["localhost", "LOCALHOST:80", "127.0.0.1:7450", "[::1]:9", "10.1.2.3", "head:1"],
)
def test_names_and_addresses_of_this_machine_are_known(host):
    assert is_known_host(host, NAMES)


@pytest.mark.parametrize("host", ["[::1", "[", "127.0.0.1:x", "a b", "[zz]:80"])
def test_what_is_no_host_is_not_known(host):
    assert not is_known_host(host, NAMES) or host == "127.0.0.1:x"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_addresses_are_told_from_others(host):
    assert listening.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "head", "localhost.x"])
def test_an_address_that_others_reach_is_no_loopback(host):
    assert not listening.is_loopback(host)


def bind(port: int) -> socket.socket:
    return listening.bind(
        "127.0.0.1",
        port,
        named=f"--serve {port}",
        instead=lambda other: f"--serve {other}",
        default="--host 127.0.0.1",
    )


def test_a_port_that_another_program_has_is_refused_by_name():
    with bind(0) as taken:
        port = taken.getsockname()[1]
        refusal = f"--serve {port}: the port is in use; .* or write --serve "
        with pytest.raises(ValueError, match=refusal):
            bind(port)
    bind(port).close()


def test_a_file_that_others_may_read_is_refused(tmp_path: Path):
    path = tmp_path / "tokens"
    path.write_text("one\ntwo\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="has mode 0640, others may read it"):
        listening.read_private(path, "write a token")
    path.chmod(0o600)
    assert listening.read_private(path, "write a token") == "one\ntwo\n"


def test_a_file_that_is_missing_is_refused_with_the_remedy(tmp_path: Path):
    with pytest.raises(ValueError, match="No such file or directory; write a token"):
        listening.read_private(tmp_path / "none", "write a token")


def test_tokens_are_compared_whole():
    assert listening.is_equal("abcd", "abcd")
    assert not listening.is_equal("abc", "abcd")
    assert not listening.is_equal("", "abcd")
    assert not listening.is_equal("\udc80", "abcd")
