"""`python -m mjax.observe ingest`: own the database, and write what collectors send.

Input: flags. Output: a database that receives batches until SIGTERM or Ctrl-C.
"""

import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from mjax.cli import flags
from mjax.observe.store.base import StoreGoneError
from mjax.observe.store.retention import Keep
from mjax.observe.stream.service import (
    FOLDER,
    IngestService,
    make_token,
    stopped_by_signals,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class IngestFlags:
    """Write what collectors send into a database, exactly once."""

    work_dir: Path
    """Work dir of the run; the database, the socket and the token are in its folder
    observe."""
    store: str | None = None
    """Database: path of a DuckDB file, or postgresql://USER@HOST/NAME. None:
    observe/store.duckdb in the work dir."""
    listen: str | None = None
    """Address to listen on: unix:PATH, or HOST:PORT, which needs the token. None:
    observe/ingest.sock in the work dir."""
    token_file: Path | None = None
    """File of mode 0600 with the token for requests on a port; created if absent. None:
    observe/token in the work dir."""
    nats: str | None = None
    """NATS server from which to take batches as well, nats://HOST:PORT."""
    threads: int = 2
    """Number of DuckDB threads."""
    keep_days: float | None = None
    """Delete spans and metrics of runs whose last span is older than this many days.
    The files of these runs still count as stored. None: keep them."""
    keep_sums_days: float | None = None
    """With --keep-days: also delete the sums of the heat map after this many days.
    None: keep them."""
    compact: bool = False
    """Rewrite the database before listening, to return the space of deleted rows to the
    disk. Needs space for a second copy."""

    def __post_init__(self) -> None:
        for flag, days in (
            ("--keep-days", self.keep_days),
            ("--keep-sums-days", self.keep_sums_days),
        ):
            if days is not None and not 0 < days < math.inf:
                raise ValueError(f"{flag} must be above 0, got {days:g}")
        if self.keep_sums_days is not None:
            if self.keep_days is None:
                raise ValueError(
                    f"--keep-sums-days {self.keep_sums_days:g} needs --keep-days; add "
                    f"--keep-days {self.keep_sums_days:g} or less"
                )
            if self.keep_sums_days < self.keep_days:
                raise ValueError(
                    f"--keep-sums-days must be at least --keep-days "
                    f"{self.keep_days:g}, got {self.keep_sums_days:g}"
                )
        if self.threads < 1:
            raise ValueError(f"--threads must be at least 1, got {self.threads}")


def main(argv: Sequence[str]) -> int:
    """Run until a signal; return the exit code."""
    try:
        given = flags.read(
            IngestFlags,
            argv,
            prog="python -m mjax.observe ingest",
        )
        service = _start(given)
    except (ValueError, StoreGoneError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    with stopped_by_signals() as stop:
        _say(f"ingest: {service.address}")
        stop.wait()
    service.close()
    return 0


def _start(given: IngestFlags) -> IngestService:
    folder = given.work_dir / FOLDER
    if not given.work_dir.is_dir():
        raise ValueError(
            f"--work-dir {given.work_dir} is not a folder; give the work dir of a run"
        )
    listen = given.listen or f"unix:{folder.absolute() / 'ingest.sock'}"
    token = ""
    if not listen.startswith("unix:"):
        token = make_token(given.token_file or folder / "token")
    keep = None
    if given.keep_days is not None:
        keep = Keep(days=given.keep_days, sums_days=given.keep_sums_days)
    return IngestService(
        store=given.store or str(folder / "store.duckdb"),
        listen=listen,
        token=token,
        nats=given.nats,
        threads=given.threads,
        keep=keep,
        compact=given.compact,
        say=_say,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
