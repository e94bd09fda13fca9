"""Hash the files of a run and mark those with equal content."""

import dataclasses
import hashlib
import pathlib
from collections.abc import Iterator, Mapping, Sequence

from mjax.data.corpora import Source
from mjax.data.file_hashes import changed, hash_files
from mjax.data.files import RemotePath


def hash_sources(
    corpora: Sequence[list[Source]], cache_dir: pathlib.Path
) -> list[list[Source]]:
    """Return the files with their hashes, marking files with equal content.

    Args:
      corpora: the files of each corpus of the run.
      cache_dir: folder of the table of hashes, see `file_hashes`.
    Raises:
      ValueError: a file cannot be read, changes while it is read, or has the same
        content as a file that is read in another format.
    """
    found = [source for sources in corpora for source in sources]
    digests = hash_files([path for s in found for path in s.files], cache_dir)
    first: dict[str, Source] = {}
    return [list(_with_contents(sources, digests, first)) for sources in corpora]


def check_unchanged(sources: list[Source], cache_dir: pathlib.Path) -> None:
    """Refuse files whose content no longer has the recorded hash.

    Remote files are read in a fixed version, so they cannot change.

    Raises:
      ValueError: a file has changed, or cannot be read.
    """
    now = hash_files([path for s in sources for path in s.files], cache_dir)
    for source in sources:
        if source.files and _digest(source, now) != source.digest:
            raise changed(source.files[0])


def _digest(source: Source, digests: Mapping[pathlib.Path, str]) -> str:
    """Return the hash of a file; for an indexed dataset, one hash of both files."""
    if isinstance(source.path, RemotePath):
        return source.path.sha256()
    found = [digests[path] for path in source.files]
    if len(found) == 1:
        return found[0]
    return hashlib.sha256("".join(found).encode()).hexdigest()


def _with_contents(
    sources: list[Source], digests: Mapping[pathlib.Path, str], first: dict[str, Source]
) -> Iterator[Source]:
    seen = set()
    for source in sources:
        digest = _digest(source, digests)
        original = first.setdefault(digest, source)
        if original.kind != source.kind:
            raise ValueError(
                f"--data.path: {original.path} and {source.path} have the same "
                f"content, but one is read as {original.kind} and one as "
                f"{source.kind}, so held-out text could be trained on; leave one out"
            )
        yield dataclasses.replace(
            source,
            digest=digest,
            first_name=original.name,
            is_repeat=digest in seen,
        )
        seen.add(digest)
