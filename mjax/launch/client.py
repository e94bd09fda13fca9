"""Send requests to the driver of a run, such as `status`, `evict` and `stop`.

Input: a work dir, or the address and token of a driver. Output: the driver's answer.
"""

import asyncio
import contextlib
import getpass
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mjax.launch import messages
from mjax.launch.journal import read_ending
from mjax.processes.lock import ADDRESS


def ask(
    work_dir: Path,
    name: str,
    *,
    driver: tuple[str, int] | None = None,
    token_file: Path | None = None,
    host: str = "",
    reason: str = "",
    flags: Sequence[str] = (),
) -> messages.Answer:
    """Send a command to the driver, and return the answer.

    Args:
      work_dir: work dir of the run.
      name: name of the command.
      driver: (host, port) of the driver; None reads launch/address.json.
      token_file: file with the token; None reads launch/token.
      host: name of the host that the command is about.
      reason: text for the journal.
      flags: new trainer flags.
    Raises:
      ValueError: no launch has run in the work dir, or the run has ended; no driver
        answers, or the driver refuses the command. The message says why.
    """
    folder = work_dir / "launch"
    # Checked first, because another launch may use the port of a driver that has ended.
    if driver is None and (ending := read_ending(work_dir)) is not None:
        raise ValueError(f"{work_dir}: {ending}")
    address = driver or _address(folder)
    command = messages.Command(
        version=messages.VERSION,
        token=read_token(token_file or folder / "token"),
        name=name,
        actor=f"{getpass.getuser()}@{socket.gethostname()}",
        host=host,
        reason=reason,
        flags=[*flags],
    )
    try:
        answer = asyncio.run(_exchange(address, command))
    except ConnectionError as error:
        raise ValueError(f"{error}; {_end_of(work_dir)}") from error
    if isinstance(answer, messages.Refused):
        raise ValueError(answer.reason)
    return answer


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
      ValueError: the file cannot be read, is readable by others, or is empty.
    """
    try:
        mode, token = path.stat().st_mode & 0o777, path.read_text().strip()
    except OSError as error:
        raise ValueError(f"cannot read the token file {path}: {error}") from error
    if mode & 0o077:
        raise ValueError(
            f"the token file {path} has mode {mode:04o}: others may read it; chmod 600 "
            f"{path}"
        )
    if not token:
        raise ValueError(f"the token file {path} is empty; write a long random word")
    return token


def write_private(path: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text)
    new.replace(path)


def _address(folder: Path) -> tuple[str, int]:
    try:
        host, port = json.loads((folder / ADDRESS.name).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{folder} does not say where the driver listens ({error}); give "
            "--driver HOST:PORT"
        ) from error
    return host, port


def _end_of(work_dir: Path) -> str:
    """Return a text on how the run has ended, or what to do if it has not."""
    try:
        ending = read_ending(work_dir)
    except ValueError as error:
        return str(error)
    if ending is not None:
        return str(ending)
    return (
        "the journal records no end of the run: if its driver was killed, repeat the "
        "command that started the launch"
    )


async def _exchange(
    address: tuple[str, int], command: messages.Command
) -> messages.Answer | messages.Refused:
    try:
        reader, writer = await asyncio.open_connection(
            *address, limit=messages.MAX_LINE_BYTES
        )
    except OSError as error:
        raise ConnectionError(
            f"no driver answers at {address[0]}:{address[1]} ({error})"
        ) from error
    with contextlib.closing(writer):
        writer.write(messages.encode(command))
        decoder = msgspec.json.Decoder(messages.ToPerson)
        try:
            return await messages.receive(reader, decoder)
        except EOFError:
            raise ValueError("the driver closed the connection") from None
