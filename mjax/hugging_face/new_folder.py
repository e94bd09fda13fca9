"""Create a folder atomically."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `path` when everything is on disk.

    An error leaves nothing behind; a killed process leaves only `.NAME.writing-ID`
    beside `path`.

    Raises:
      ValueError: `path` is a URL, a file, or a folder that is not empty.
      RuntimeError: the disk failed.
    """
    if "://" in os.fspath(path):
        raise ValueError(f"{path} is a URL; give a folder of a file system")
    path = Path(path).absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty folder; give another name")
    temporary = path.parent / f".{path.name}.writing-{uuid.uuid4().hex[:8]}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        yield temporary
        for file in temporary.iterdir():
            _flush(file)
        _flush(temporary)
        temporary.rename(path)
        _flush(path.parent)
    except OSError as error:
        raise RuntimeError(f"{path} was not written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
