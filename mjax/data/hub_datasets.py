"""Names of data sets on a Hugging Face hub in, local folders of their files out.

A name is `hf://datasets/NAME@REVISION`. Its files of text are read, in the order of
their names; nothing else of the data set is downloaded.
"""

import pathlib
import re
from collections.abc import Iterable

from mjax.data import hub
from mjax.data.compressed import plain_name
from mjax.data.hub import Fetched, Repository, Snapshot

_NAME = re.compile(r"hf://datasets/((?:[\w.-]+/)?[\w.-]+)@([\w./-]+)")
_SUFFIXES = frozenset({".txt", ".jsonl", ".ndjson", ".parquet"})


def fetch(path: str) -> Fetched:
    """Bring the text files of a data set to this machine.

    Args:
      path: hf://datasets/NAME@REVISION; a branch, a tag or a commit.
    Raises:
      ValueError: the name is of another form, the data set or the revision does not
        exist or holds no text, or the hub cannot be reached and this machine does not
        have all files.
    """
    match = _NAME.fullmatch(path)
    if match is None:
        raise ValueError(
            "--data.path must be hf://datasets/NAME@REVISION (a branch, tag or "
            f"commit), got {path!r}; for example hf://datasets/org/texts@main"
        )
    name, revision = match.groups()
    repository = Repository("dataset", name, revision, "--data.path")
    return hub.fetch(repository, lambda snapshot: _choose(snapshot, path))


def _choose(snapshot: Snapshot, path: str) -> Iterable[str]:
    files = [file for file in snapshot.files if _is_text(file)]
    if not files:
        raise ValueError(
            f"--data.path {path} holds no file of text; files that are read end in "
            f"{', '.join(sorted(_SUFFIXES))}, with .gz or .zst after that or without"
        )
    return files


def _is_text(file: str) -> bool:
    return pathlib.Path(plain_name(file)).suffix.lower() in _SUFFIXES
