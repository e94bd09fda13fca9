"""Names of data sets on a Hugging Face hub in, local folders of their files out.

A name is `hf://datasets/NAME@REVISION`. The hub says which commit the revision is; its
files of text are downloaded into the cache of `huggingface_hub` (HF_HOME), where half a
download is continued. A list of the files is kept when all are there: without the hub
only a data set with such a list is read, never a part of one.

Source: https://huggingface.co/docs/huggingface_hub (HfApi.dataset_info and
hf_hub_download; HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN).
"""

import hashlib
import importlib
import json
import logging
import os
import pathlib
import re
import urllib.parse
from typing import Any, NamedTuple

from mjax import checked_json
from mjax.data import cache_files
from mjax.data.compressed import plain_name

PREFIX = "hf://"
_NAME = re.compile(r"hf://datasets/((?:[\w.-]+/)?[\w.-]+)@([\w./-]+)")
_COMMIT = re.compile(r"[0-9a-f]{40}")
# Of a URL: what is before the host, and the query, which may be a signature.
_SECRET = re.compile(r"(?<=://)[^/@\s]*@|\?[^\s'\"()]*")
_SUFFIXES = frozenset({".txt", ".jsonl", ".ndjson", ".parquet"})
_TIMEOUT_S = 30
_log = logging.getLogger(__name__)


class Fetched(NamedTuple):
    """The files of a data set on this machine."""

    folder: pathlib.Path
    files: list[str]
    """Paths in the folder, which may hold other files too."""
    origin: str
    """hf://datasets/NAME@COMMIT, with the commit that the revision was."""


class _Listing(NamedTuple):
    commit: str
    files: dict[str, str]
    """Checksum of each file, as sha256:HEX, or git:HEX for the hash of a git blob."""


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
    library = _import_library(path)
    configured = os.environ.get("HF_HUB_CACHE")
    cache = pathlib.Path(configured or library.constants.HF_HUB_CACHE)
    home = cache / f"datasets--{name.replace('/', '--')}"
    kept = home / "mjax" / f"{urllib.parse.quote(revision, safe='')}.json"
    listing = _ask(library, path, name, revision, kept)
    folder = home / "snapshots" / listing.commit
    if not _is_whole(folder, listing, kept):
        try:
            with cache_files.locked(kept):  # processes of a host start together
                is_checked = _read_kept(kept) == listing
                for file, checksum in listing.files.items():
                    is_new = not (folder / file).is_file()
                    if is_new:
                        _download(library, path, name, file, listing.commit, cache)
                    if is_new or not is_checked:
                        _check(folder / file, checksum, path)
                with cache_files.written_whole(kept) as temporary:
                    temporary.write_text(json.dumps(listing._asdict()))
        except cache_files.UnwritableError as error:
            what = str(error).partition(";")[0]
            raise ValueError(
                f"--data.path {path}: {what}; set HF_HUB_CACHE to a folder that can be"
            ) from None
    _log.info("--data.path %s is commit %s", path, listing.commit)
    files = sorted(listing.files)
    return Fetched(folder, files, f"hf://datasets/{name}@{listing.commit}")


def _is_whole(folder: pathlib.Path, listing: _Listing, kept: pathlib.Path) -> bool:
    """Say whether all files are here and were compared with their checksums."""
    are_there = all((folder / file).is_file() for file in listing.files)
    return are_there and _read_kept(kept) == listing


def _import_library(path: str) -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
    except ImportError:
        raise ValueError(
            f"--data.path {path} needs huggingface_hub; pip install 'mjax[hub]'"
        ) from None
    return huggingface_hub


def _ask(
    library: Any, path: str, name: str, revision: str, kept: pathlib.Path
) -> _Listing:
    """Return the commit of a revision, and its files of text."""
    errors = library.errors
    api = library.HfApi(endpoint=_endpoint(library))
    try:
        info = api.dataset_info(
            name, revision=revision, timeout=_TIMEOUT_S, files_metadata=True
        )
    except errors.RevisionNotFoundError:
        raise ValueError(
            f"--data.path {path}: the data set {name} has no revision {revision!r}; "
            "give a branch, a tag or a commit of it, such as main"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ValueError(
            f"--data.path {path}: {_host(library)} has no data set {name}, or it "
            "is private; check the name, or set HF_TOKEN to a token that may read it"
        ) from None
    except (OSError, _http_error(library), ValueError) as error:
        return _known(path, kept, library, error)
    except (KeyError, TypeError):  # JSON, but of something else
        error = ValueError("the answer does not describe a data set")
        return _known(path, kept, library, error)
    if not _COMMIT.fullmatch(info.sha or ""):  # it becomes a part of a path
        error = ValueError(f"the commit is {info.sha!r}")
        return _known(path, kept, library, error)
    files = {
        s.rfilename: f"sha256:{s.lfs.sha256}" if s.lfs else f"git:{s.blob_id}"
        for s in info.siblings or []
        if _is_text(s.rfilename)
    }
    if not files:
        raise ValueError(
            f"--data.path {path} holds no file of text; files that are read end in "
            f"{', '.join(sorted(_SUFFIXES))}, with .gz or .zst after that or without"
        )
    return _Listing(info.sha, files)


def _known(path: str, kept: pathlib.Path, library: Any, error: Exception) -> _Listing:
    """Return what the hub said about a revision before, now that it does not answer."""
    listing = _read_kept(kept)
    if listing is None:
        raise ValueError(
            f"--data.path {path}: the hub {_host(library)} does not answer as it "
            f"should ({_first_line(error)}), and this machine has no whole copy of the "
            "data set; start again when the hub can be reached, or set HF_ENDPOINT"
        )
    _log.warning(
        "--data.path %s: the hub %s does not answer as it should (%s); reading the "
        "copy of commit %s on this machine",
        *(path, _host(library), _first_line(error), listing.commit),
    )
    return listing


def _read_kept(path: pathlib.Path) -> _Listing | None:
    """Return the files of a whole copy; None if there is none."""
    try:
        found = checked_json.read(path.read_bytes(), dict[str, Any])
        return _Listing(found["commit"], found["files"])
    except (OSError, ValueError, KeyError):
        return None


def _download(
    library: Any, path: str, name: str, file: str, commit: str, cache: pathlib.Path
) -> None:
    try:
        library.hf_hub_download(
            *(name, file),
            repo_type="dataset",
            revision=commit,
            endpoint=_endpoint(library),
            cache_dir=cache,
        )
    except (OSError, _http_error(library), ValueError) as error:
        raise ValueError(
            f"--data.path {path}: the download of {file} stopped "
            f"({_first_line(error)}); start again, what has arrived is kept"
        ) from None


def _check(file: pathlib.Path, checksum: str, path: str) -> None:
    """Refuse a file that is not what the hub says that it is, and remove it."""
    kind, _, expected = checksum.partition(":")
    digest = hashlib.sha256()
    if kind == "git":
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size)
    with file.open("rb") as opened:
        while block := opened.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != expected:
        file.resolve().unlink()
        file.unlink(missing_ok=True)
        raise ValueError(
            f"--data.path {path}: {file.name} arrived damaged (checksum "
            f"{digest.hexdigest()}, the hub says {expected}), and was removed; start "
            "again"
        )


def _http_error(library: Any) -> type[Exception]:
    """Return the class of what the HTTP client of the library raises."""
    module = type(library.get_session()).__module__.partition(".")[0]
    return importlib.import_module(module).HTTPError


def _endpoint(library: Any) -> str:
    return os.environ.get("HF_ENDPOINT") or library.constants.ENDPOINT


def _host(library: Any) -> str:
    """Return the address of the hub as it may be shown."""
    return _SECRET.sub("", _endpoint(library))


def _is_text(file: str) -> bool:
    """Say whether a file is read: not if it is hidden, or outside of the data set."""
    parts = pathlib.PurePosixPath(file)
    is_hidden = any(part.startswith((".", "/")) for part in parts.parts)
    return not is_hidden and pathlib.Path(plain_name(file)).suffix.lower() in _SUFFIXES


def _first_line(error: Exception) -> str:
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return _SECRET.sub("", text)
