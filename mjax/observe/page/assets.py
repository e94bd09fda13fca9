"""The static files of the page: HTML, scripts, styles.

Input: a path below /static/. Output: the bytes of a file in the folder `static` beside
this module, or nothing. No path leads out of that folder.
"""

import dataclasses
import hashlib
from pathlib import Path

FOLDER = Path(__file__).parent / "static"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".txt": "text/plain; charset=utf-8",
}
"""Served file types; a file without a suffix is text."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asset:
    """A file that is ready to send."""

    data: bytes
    content_type: str
    etag: str


def read(name: str, folder: Path = FOLDER) -> Asset | None:
    """Return a file of the folder; None if there is no such file.

    Args:
      name: path below the folder, as a browser wrote it.
      folder: folder whose files every viewer of the page may read.
    """
    if "\0" in name:
        return None
    suffix = Path(name).suffix
    content_type = _TYPES[".txt"] if not suffix else _TYPES.get(suffix)
    path = (folder / name).resolve()
    if content_type is None or not path.is_relative_to(folder.resolve()):
        return None
    try:
        data = path.read_bytes()
    except OSError:
        return None
    etag = f'"{hashlib.sha256(data).hexdigest()[:16]}"'
    return Asset(data=data, content_type=content_type, etag=etag)
