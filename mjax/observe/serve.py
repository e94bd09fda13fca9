"""`python -m mjax.observe serve`: a live page of a run for a browser.

    python -m mjax.observe serve --work-dir DIR [--listen HOST:PORT]

Input: flags. Output: a page on a port until Ctrl-C or SIGTERM, and its address with
the access token on stdout. The run is only read, and may start later than the page.
Exit codes: 0 done, 2 bad input.
"""

import dataclasses
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mjax.cli import flags, listening
from mjax.observe import output, spans

if TYPE_CHECKING:
    from mjax.observe.page.answers import Page
    from mjax.observe.page.server import PageServer

_BEGUN = ("checkpoints", "config.json", "starts", "launch", "events.jsonl")
"""Files that a run writes to its work dir before its first spans."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Show a run in a browser while it runs, or afterwards."""

    work_dir: Path
    """Work dir of the run. If the folder is empty or does not exist yet, the page waits
    for the run; its parent must exist."""
    listen: str = "127.0.0.1:7450"
    """Address to listen on, HOST:PORT. Other machines reach a loopback address through
    `ssh -L`; on other addresses the page is not encrypted."""
    spans_dir: Path | None = None
    """Folder of the spans, as given to the run with --observe.spans-dir. None: the
    folder spans in the work dir."""
    store: str | None = None
    """Database that ingesters fill, postgresql://USER@HOST/NAME: spans are read from
    it; rows, events and the config from the work dir. None: spans are read from
    files."""
    run: str | None = None
    """Run in the store to show. None: the one that began last."""
    token_file: Path | None = None
    """File with the token that viewers need. None: a new token at each start."""

    def __post_init__(self) -> None:
        if self.run is not None and self.store is None:
            raise ValueError("--run needs --store; a work dir has one run")
        if self.spans_dir is not None and self.store is not None:
            raise ValueError(
                "--spans-dir and --store are two sources of spans; give one"
            )


def main(argv: Sequence[str]) -> int:
    """Serve until a signal; return the exit code."""
    try:
        given = flags.read(
            ServeFlags,
            argv,
            prog="python -m mjax.observe serve",
        )
        waits = check_work_dir(given.work_dir)
        if given.store is None and not waits:
            check_run(given.work_dir, given.spans_dir)
        token = read_token(given.token_file)
        page, server = _start(given, token)
    except ValueError as error:
        return output.refuse(error)
    except RuntimeError as error:  # the database is unreachable
        print(f"error: {output.printable(str(error))}", file=sys.stderr)
        return 1
    from mjax.observe.stream.service import stopped_by_signals

    with stopped_by_signals() as stop:
        output.warn(server.problems)
        if waits:
            print(output.printable(waits), file=sys.stderr)
        print(server.address, flush=True)
        while not stop.wait(1.0) and server.is_alive():
            pass
    server.close()
    page.close()
    return 0


def check_work_dir(path: Path) -> str:
    """Refuse a work dir that no run can be in.

    Returns:
      a line that says why the page waits for the run; "" if the folder has files.
    Raises:
      ValueError: it is not a folder, cannot be read, or its parent does not exist.
    """
    wait = "the page shows the run once it starts"
    try:
        if path.is_dir():
            is_empty = next(path.iterdir(), None) is None
            return f"--work-dir {path} is empty; {wait}" if is_empty else ""
        if path.exists() or path.is_symlink():
            output.check_folder(path)
        if path.absolute().parent.is_dir():
            return f"--work-dir {path} does not exist yet; {wait}"
    except OSError as error:
        raise ValueError(
            f"--work-dir {path} cannot be read: {error.strerror}; give the work dir of "
            "a run"
        ) from error
    raise ValueError(
        f"--work-dir {path} does not exist, and neither does its parent; give the work "
        f"dir of a run, or mkdir -p {path.parent} to wait for one"
    )


def check_run(work_dir: Path, spans_dir: Path | None) -> None:
    """Refuse a folder without spans, unless a run is just starting in it.

    Raises:
      ValueError: there is nothing to show.
    """
    folder = spans_dir or work_dir / spans.FOLDER
    if any(folder.glob("*.jsonl*")):
        return
    rows = work_dir / "metrics.jsonl"
    if rows.is_file() and rows.stat().st_size:
        raise ValueError(
            f"{folder} has no spans, but {work_dir} has steps: it was started with "
            "--observe.no-spans, or writes its spans elsewhere; name that folder with "
            "--spans-dir"
        )
    if not any((work_dir / name).exists() for name in _BEGUN):
        raise ValueError(
            f"--work-dir {work_dir} has no spans and no run that is starting; name the "
            "work dir of a run"
        )


def _start(given: ServeFlags, token: str) -> "tuple[Page, PageServer]":
    """Follow the run and serve its page.

    Raises:
      ValueError: a package is missing, or the address cannot be used.
    """
    try:
        from mjax.observe.page import store_feed
        from mjax.observe.page.answers import Page
        from mjax.observe.page.file_feed import FileFeed
        from mjax.observe.page.server import PageServer
    except ImportError as error:
        raise ValueError(
            f"{error.name} is not installed; pip install 'mjax[observe]'"
        ) from error
    work_dir = given.work_dir.absolute()
    if given.store is None:
        feed = FileFeed(work_dir, given.spans_dir)
    else:
        store = store_feed.open_reader(given.store)
        feed = store_feed.StoreFeed(work_dir, store, given.run)
    page = Page(feed, name=output.printable(work_dir.name), work_dir=work_dir)
    try:
        return page, PageServer(page, listen=given.listen, token=token)
    except BaseException:
        page.close()
        raise


def read_token(path: Path | None) -> str:
    """Return the token in a file; without a path, return a new one.

    Raises:
      ValueError: the file cannot be read, other users may read it, or it has no token.
    """
    if path is None:
        return secrets.token_hex(16)
    text = listening.read_private(
        path, "write a word of at least 16 letters and digits into it"
    )
    token = text.strip()
    if not listening.TOKEN.fullmatch(token):
        raise ValueError(
            f"--token-file {path} must have one word of 16 to 256 letters, digits, "
            "hyphens, dots, tildes or underscores; write one, as openssl rand -hex 16 "
            "prints it"
        )
    return token


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
