"""Compare content with the checksum that the remote gives."""

import hashlib

_NAMES = {"sha256": "SHA-256", "git": "hash of its git blob"}


class Comparison:
    """Comparison of content that arrives in pieces with a checksum."""

    def __init__(self, checksum: str, num_bytes: int) -> None:
        """Begin a comparison.

        Args:
          checksum: sha256:HEX, or git:HEX for the hash of a git blob. With any other
            text nothing is compared.
          num_bytes: size of the whole content.
        """
        self._kind, _, self._expected = checksum.partition(":")
        self._sha256 = hashlib.sha256()
        self._git = hashlib.sha1(b"blob %d\0" % num_bytes)

    def update(self, data: bytes | memoryview) -> None:
        """Add the next piece of the content."""
        self._sha256.update(data)
        if self._kind == "git":
            self._git.update(data)

    @property
    def sha256(self) -> str:
        """Hexadecimal SHA-256 of all pieces so far."""
        return self._sha256.hexdigest()

    @property
    def difference(self) -> str:
        """Text that describes the difference; empty if the checksums are equal."""
        found = self._git.hexdigest() if self._kind == "git" else self.sha256
        if self._kind not in _NAMES or found == self._expected:
            return ""
        return f"{_NAMES[self._kind]} {found} instead of {self._expected}"
