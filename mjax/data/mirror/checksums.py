"""Compare content with the checksum that a remote states."""

import hashlib

_NAMES = {"sha256": "SHA-256", "git": "hash of its git blob"}


class Comparison:
    """Content that arrives in pieces, compared with a checksum."""

    def __init__(self, checksum: str, num_bytes: int) -> None:
        """Begin.

        Args:
          checksum: sha256:HEX, or git:HEX for the hash of a git blob. Text of another
            form is not compared.
          num_bytes: size of the whole content.
        """
        self._kind, _, self._expected = checksum.partition(":")
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % num_bytes)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece."""
        self._sha256.update(data)
        if self._kind == "git":
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of the pieces so far."""
        return self._sha256.hexdigest()

    @property
    def difference(self) -> str:
        """Description of the differing checksum; empty if the checksums are equal."""
        found = self._git.hexdigest() if self._kind == "git" else self.sha256
        if self._kind not in _NAMES or found == self._expected:
            return ""
        return f"{_NAMES[self._kind]} {found} instead of {self._expected}"
