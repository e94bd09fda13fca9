"""The interface of an object store, and its errors.

Names of objects are relative to the URL that was opened, with slashes between their
parts. Writes are atomic: a reader sees a complete object or none. Nothing is renamed.
Every method may be called from several threads.
"""

import abc
import dataclasses
import enum
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

CHUNK_BYTES = 8 << 20
"""Bytes per part of a large upload, and per read of `stream`."""
MAX_PARTS = 9_000
"""Parts of an upload; S3 and GCS allow 10,000."""


class MissingError(FileNotFoundError):
    """The object does not exist."""


class ConflictError(RuntimeError):
    """The object does not have the expected version; nothing was written."""


class RefusedError(ValueError):
    """The store refuses the request: no such bucket, no permission, no credentials."""


class UnavailableError(OSError):
    """The store does not answer, or reports a transient error."""


class Absent(enum.Enum):
    """See `ABSENT`."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""Expected version of an object that must not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Version:
    """Identifies the content of an object; different content has another version."""

    etag: str | None
    generation: str | None
    """Version number on GCS, or in an S3 bucket that keeps versions."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Object:
    """An object, without its content."""

    name: str
    num_bytes: int
    version: Version
    modified_s: float
    """Time of the write: seconds since 1970, by the clock of the store."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Metadata written with the content; empty in listings, which leave it out."""


class ObjectStore(abc.ABC):
    """The objects below one URL.

    In addition to the errors that each method names, all methods raise RefusedError and
    UnavailableError, with the URL in the message.
    """

    url: str

    @abc.abstractmethod
    def objects(self, under: str = "") -> Iterator[Object]:
        """Yield all objects below a folder, in the order of their names.

        Args:
          under: the folder, such as `steps/120`; its name is matched whole.
        """

    @abc.abstractmethod
    def folders(self, under: str = "") -> list[str]:
        """List the names of the direct subfolders of a folder, in order."""

    @abc.abstractmethod
    def find(self, name: str) -> Object:
        """Describe an object.

        Raises:
          MissingError: there is no such object, or no such bucket: the answer of the
            store is the same.
        """

    @abc.abstractmethod
    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        version: Version | None = None,
    ) -> bytes:
        """Return the bytes from `start` to before `stop`; None: to the end.

        If the object ends before `stop`, fewer bytes are returned.

        Args:
          name: name of the object.
          start: the first byte.
          stop: the byte after the last.
          version: version that the object must have; None: any.
        Raises:
          MissingError: there is no such object.
          ConflictError: it has another version now.
          ValueError: `start` is behind its end.
        """

    @abc.abstractmethod
    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        """Return the complete content and its version.

        Raises:
          MissingError: there is no such object.
        """

    @abc.abstractmethod
    def write(
        self,
        name: str,
        data: bytes,
        *,
        expected: Version | Absent | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Version:
        """Write a small object in one request.

        A request whose answer was lost is sent again. With `expected` the second one
        then raises ConflictError although the first one has written the object:
        compare the content.

        Args:
          name: name of the object.
          data: its content.
          expected: the version to replace, or ABSENT; None replaces any version.
          facts: metadata to keep with the content: lower-case names, ASCII values.
        Returns:
          the new version.
        Raises:
          ConflictError: the object has another version, or exists.
        """

    @abc.abstractmethod
    def upload(self, name: str, path: Path, *, facts: Mapping[str, str]) -> None:
        """Copy a local file into an object, and replace an existing object.

        A large file is sent in parts, a few at a time, with bounded memory. Parts of an
        upload that was killed stay in the bucket unseen, until a lifecycle rule of the
        bucket deletes them.

        Args:
          name: name of the object.
          path: path of the file, which must not change during the call.
          facts: as for `write`.
        Raises:
          OSError: the file cannot be read.
        """

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""

    def stream(
        self, name: str, start: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[bytes]:
        """Yield the content from `start` on in chunks, each read on its own.

        One chunk is in memory at a time. All chunks are of one version of the object.

        Raises:
          MissingError: there is no such object.
          ConflictError: it was replaced during the read.
          UnavailableError: the store sends too few or too many bytes.
          ValueError: `start` is behind its end.
        """
        found = self.find(name)
        if start > found.num_bytes:
            raise ValueError(
                f"{self.url}/{name} has {found.num_bytes} bytes, fewer than {start}"
            )
        for first in range(start, found.num_bytes, chunk_bytes):
            last = min(first + chunk_bytes, found.num_bytes)
            chunk = self.read(name, first, last, version=found.version)
            if len(chunk) != last - first:  # the version is the same: not damage
                raise UnavailableError(
                    f"cannot read {self.url}/{name}: the store sent {len(chunk)} bytes "
                    f"for bytes {first} to {last} of {found.num_bytes}"
                )
            yield chunk


def part_bytes(num_bytes: int) -> int:
    """Return the size of the parts of an upload."""
    return max(CHUNK_BYTES, -(-num_bytes // MAX_PARTS))
