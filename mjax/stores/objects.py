"""The interface of an object store, and its errors.

Object names are relative to the URL that was opened; slashes separate their parts.
Writes are atomic: a reader sees a complete object or none. Objects cannot be renamed.
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
"""Maximum number of parts of an upload; S3 and GCS allow 10,000."""


class MissingError(FileNotFoundError):
    """The object does not exist."""


class ConflictError(RuntimeError):
    """The object does not have the expected version, so it was not written or read."""


class RefusedError(ValueError):
    """The store refuses the request: missing bucket, permission or credentials."""


class UnavailableError(OSError):
    """The store does not answer, or reports a transient error."""


class Absent(enum.Enum):
    """Type of `ABSENT`."""

    ABSENT = "absent"


ABSENT = Absent.ABSENT
"""Passed as the expected version of an object that must not exist."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Version:
    """Identifies the content of an object; a change of content changes the version."""

    etag: str | None
    generation: str | None
    """Version number on GCS, or in a versioned S3 bucket."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Object:
    """Description of an object, without its content."""

    name: str
    num_bytes: int
    version: Version
    modified_s: float
    """Time of the write in seconds since 1970, by the store's clock."""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Metadata written with the content; always empty in a listing."""


class ObjectStore(abc.ABC):
    """The objects below one URL.

    In addition to the errors that each method names, all methods raise RefusedError and
    UnavailableError, with the URL in the message.
    """

    url: str

    @abc.abstractmethod
    def objects(self, under: str = "") -> Iterator[Object]:
        """Yield all objects below a folder, sorted by name.

        Args:
          under: the folder, such as `steps/120`, which does not match `steps/1200`.
        """

    @abc.abstractmethod
    def folders(self, under: str = "") -> list[str]:
        """List the names of the direct subfolders of a folder, sorted."""

    @abc.abstractmethod
    def find(self, name: str) -> Object:
        """Return the description of an object.

        Raises:
          MissingError: the object or the bucket does not exist; the store gives the
            same answer for both.
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
        """Return the bytes from `start` up to, but without, `stop`.

        If the object ends before `stop`, fewer bytes are returned.

        Args:
          name: name of the object.
          start: offset of the first byte.
          stop: offset after the last byte; None means the end of the object.
          version: version that the object must have; None means any.
        Raises:
          MissingError: there is no such object.
          ConflictError: the object now has another version.
          ValueError: `start` is beyond the end of the object.
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
        """Write a small object in one request; return its new version.

        If the answer to a request is lost, the request is repeated. With `expected` the
        repeated request then raises ConflictError although the first one wrote the
        object, so the caller must compare the content.

        Args:
          name: name of the object.
          data: its content.
          expected: the version to replace, or ABSENT to create the object; None
            replaces any version.
          facts: metadata to store with the content; lower-case names, ASCII values.
        Returns:
          The new version.
        Raises:
          ConflictError: the object has another version than `expected`, or exists
            although ABSENT was given.
        """

    @abc.abstractmethod
    def upload(self, name: str, path: Path, *, facts: Mapping[str, str]) -> None:
        """Copy a local file into an object, replacing an existing object.

        A large file is sent in parts, a few at a time, with bounded memory. The parts
        of a killed upload stay in the bucket, invisible to readers, until a lifecycle
        rule of the bucket deletes them.

        Args:
          name: name of the object.
          path: path of the file, which must not change during the call.
          facts: as in `write`.
        Raises:
          OSError: the file cannot be read.
        """

    @abc.abstractmethod
    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; ignore those that do not exist."""

    def stream(
        self, name: str, start: int = 0, *, chunk_bytes: int = CHUNK_BYTES
    ) -> Iterator[bytes]:
        """Yield the content from `start` on in chunks, with one request per chunk.

        Only one chunk is in memory at a time. All chunks are of the same version of the
        object.

        Raises:
          MissingError: there is no such object.
          ConflictError: the object was replaced during the read.
          UnavailableError: the store sends too few or too many bytes.
          ValueError: `start` is beyond the end of the object.
        """
        found = self.find(name)
        if start > found.num_bytes:
            raise ValueError(
                f"{self.url}/{name} has {found.num_bytes} bytes, fewer than {start}"
            )
        for first in range(start, found.num_bytes, chunk_bytes):
            last = min(first + chunk_bytes, found.num_bytes)
            chunk = self.read(name, first, last, version=found.version)
            if len(chunk) != last - first:  # `read` has checked only the version
                raise UnavailableError(
                    f"cannot read {self.url}/{name}: the store sent {len(chunk)} bytes "
                    f"for bytes {first} to {last} of {found.num_bytes}"
                )
            yield chunk


def part_bytes(num_bytes: int) -> int:
    """Return the size of the parts of an upload, in bytes."""
    return max(CHUNK_BYTES, -(-num_bytes // MAX_PARTS))
