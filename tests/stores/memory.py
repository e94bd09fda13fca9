"""An object store in memory, whose failures a test chooses."""

import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from mjax.stores.objects import (
    Absent,
    ConflictError,
    MissingError,
    Object,
    ObjectStore,
    Version,
)


@dataclasses.dataclass(frozen=True)
class _Kept:
    data: bytes
    facts: Mapping[str, str]
    generation: int
    modified_s: float


class MemoryStore(ObjectStore):
    """Objects of one URL; several may see the same ones."""

    def __init__(
        self, url: str = "s3://bucket/run", kept: dict[str, _Kept] | None = None
    ) -> None:
        self.url = url
        self.kept: dict[str, _Kept] = {} if kept is None else kept
        self.calls: list[tuple[str, str]] = []
        """Requests so far: method and object name."""
        self.before: Callable[[str, str], None] = lambda method, name: None
        """Function called with each request; the method raises the exception that it
        raises."""
        self._lock = threading.Lock()

    def other(self) -> "MemoryStore":
        """Return the same objects, as another process sees them."""
        return MemoryStore(self.url, self.kept)

    def objects(self, under: str = "") -> Iterator[Object]:
        self._note("objects", under)
        names = sorted(n for n in self.kept if not under or n.startswith(f"{under}/"))
        return iter([dataclasses.replace(self._object(n), facts={}) for n in names])

    def folders(self, under: str = "") -> list[str]:
        self._note("folders", under)
        start = f"{under}/" if under else ""
        rest = [n[len(start) :] for n in self.kept if n.startswith(start)]
        return sorted({name.split("/")[0] for name in rest if "/" in name})

    def find(self, name: str) -> Object:
        self._note("find", name)
        return self._object(name)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        version: Version | None = None,
    ) -> bytes:
        self._note("read", name)
        found = self._object(name)
        if version not in (None, found.version):
            raise ConflictError(f"{self.url}/{name} is in another version")
        if start > found.num_bytes:
            raise ValueError(f"{self.url}/{name} ends before")
        return self.kept[name].data[start:stop]

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        self._note("read", name)
        return self.kept[self._object(name).name].data, self._object(name).version

    def write(
        self,
        name: str,
        data: bytes,
        *,
        expected: Version | Absent | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Version:
        self._note("write", name)
        with self._lock:
            is_there = name in self.kept
            if isinstance(expected, Absent):
                fits = not is_there
            else:
                fits = expected is None or (
                    is_there and self._object(name).version == expected
                )
            if not fits:
                raise ConflictError(f"{self.url}/{name} is in another version")
            return self._keep(name, data, facts or {})

    def upload(self, name: str, path: Path, *, facts: Mapping[str, str]) -> None:
        self._note("upload", name)
        self._keep(name, path.read_bytes(), facts)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            self._note("delete", name)
            self.kept.pop(name, None)

    def damage(self, name: str) -> None:
        """Change one bit of an object."""
        kept = self.kept[name]
        data = bytes([kept.data[0] ^ 1]) + kept.data[1:]
        self.kept[name] = dataclasses.replace(kept, data=data)

    def _keep(self, name: str, data: bytes, facts: Mapping[str, str]) -> Version:
        number = max((kept.generation for kept in self.kept.values()), default=0)
        self.kept[name] = _Kept(data, dict(facts), number + 1, time.time())
        return self._object(name).version

    def _object(self, name: str) -> Object:
        if name not in self.kept:
            raise MissingError(f"{self.url}/{name} is missing")
        kept = self.kept[name]
        etag = hashlib.md5(kept.data).hexdigest()
        return Object(
            name=name,
            num_bytes=len(kept.data),
            version=Version(etag=etag, generation=str(kept.generation)),
            modified_s=kept.modified_s,
            facts=kept.facts,
        )

    def _note(self, method: str, name: str) -> None:
        self.calls.append((method, name))
        self.before(method, name)
