"""Listening sockets of servers, and checks of their clients.

Input: a host, a port, headers of requests, the path of a token file. Output: a bound
socket, results of checks, tokens. The limits on connections are in `admission`; servers
of uvicorn get them from `asgi`, servers with threads from `threads`.
"""

import errno
import hmac
import ipaddress
import os
import re
import socket
import urllib.parse
from collections.abc import Callable
from pathlib import Path

BACKLOG = 4096
"""Connections that the kernel keeps until a server accepts them. If there are more, it
drops the packets of honest clients too, which retry after seconds. The limit of Linux
(somaxconn)."""
AT_ONCE = 64
"""Connections that a server accepts before it handles them. asyncio accepts as many as
its backlog, and would run out of file descriptors before a limit takes effect."""
_LISTEN = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})")
TOKEN = re.compile(r"[A-Za-z0-9._~-]{16,256}")
"""Characters without special meaning in URLs, cookies and headers (RFC 3986, 2.3)."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def address_of(listen: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address needs brackets.

    Raises:
      ValueError: the text is not an address.
    """
    match = _LISTEN.fullmatch(listen)
    if match is None or int(match[3]) > 65535:
        raise ValueError(
            f"--listen must be HOST:PORT with a port up to 65535, got {listen}; write "
            "--listen 127.0.0.1:7450"
        )
    return match[1] or match[2], int(match[3])


def bind(
    host: str, port: int, *, named: str, instead: Callable[[int], str], default: str
) -> socket.socket:
    """Return a socket that listens.

    Args:
      host: name or address of this machine.
      port: 0 chooses a free one.
      named: the flag and its value, for messages.
      instead: maps another port to the flag with that port, for messages.
      default: flags that work on every machine, for messages.
    Raises:
      ValueError: the address is in use, or does not belong to this machine.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ValueError(
            f"{named}: the host is not known ({error.strerror}); write {default}"
        ) from error
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without it, the old connections of a server that has just ended would hold the
        # port for a minute. Even with it, two servers cannot listen on one port.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise ValueError(
                f"{named}: the port is in use; stop the program that uses it, or write "
                f"{instead(port + 1 if port < 65535 else 0)}"
            ) from error
        raise ValueError(
            f"{named} cannot be used: {error.strerror}; write {default}"
        ) from error
    return made


def keep_more(descriptor: int) -> None:
    """Let the kernel keep `BACKLOG` connections of a socket that asyncio listens on."""
    with socket.socket(fileno=os.dup(descriptor)) as same:
        same.listen(BACKLOG)


def is_known_host(host: str, names: frozenset[str]) -> bool:
    """Return whether a Host header names this machine, with any port."""
    name = urllib.parse.urlsplit(f"//{host}").hostname if _is_plain(host) else None
    if not name:
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return name.rstrip(".") in names
    return True


def _is_plain(host: str) -> bool:
    """Return whether a text is a valid host, with or without a port."""
    try:
        urllib.parse.urlsplit(f"//{host}")
    except ValueError:
        return False
    return not set(host) & set("/?#@\\ \t")


def is_equal(given: str, token: str) -> bool:
    """Compare two tokens in constant time."""
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def read_private(path: Path, remedy: str) -> str:
    """Return the text of a --token-file, which only its owner may be able to read.

    Args:
      path: path of the file.
      remedy: the content to write into it, for messages.
    Raises:
      ValueError: the file cannot be read, or others may read it.
    """
    try:
        mode = path.stat().st_mode & 0o777
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ValueError(
            f"--token-file {path} cannot be read: {error.strerror}; {remedy}"
        ) from error
    if mode & 0o077:
        raise ValueError(
            f"--token-file {path} has mode {mode:04o}, others may read it; chmod 600"
        )
    return text
