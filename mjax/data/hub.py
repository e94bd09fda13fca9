"""Download files of repositories on a Hugging Face hub.

The hub returns the commit of a revision, and the files of the commit with their
checksums. Files are downloaded into the cache of `huggingface_hub` (HF_HOME), which
continues partial downloads, and compared with their checksums. A list records the
compared files, so only complete files are read when the hub is unreachable.

Source: https://huggingface.co/docs/huggingface_hub (HfApi.repo_info and
hf_hub_download; HF_ENDPOINT, HF_HUB_OFFLINE, HF_TOKEN).
"""

import contextlib
import logging
import pathlib
import re
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from mjax import checked_json
from mjax.data import cache_files
from mjax.data.file_hashes import hash_files
from mjax.data.hub_library import (
    cache_dir_of,
    endpoint_of,
    first_line,
    host_of,
    http_error_of,
    import_library,
)
from mjax.data.mirror.checksums import Comparison
from mjax.data.mirror.mirror import RemoteFile

PREFIX = "hf://"
COMMIT = re.compile(r"[0-9a-f]{40}")
"""Pattern of a commit, a revision that never changes."""
_NOUNS = {"dataset": "data set", "model": "model"}
_TIMEOUT_S = 30
_PARTIAL = 206  # HTTP: the answer has the requested range
_REFUSED = (401, 403)  # HTTP: no authentication, or no permission
_log = logging.getLogger(__name__)


class NoCopyError(ValueError):
    """The hub does not answer, and this machine has no copy of what is needed."""

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind
        """Kind of the repository, as in `Repository`."""


class Repository(NamedTuple):
    """A repository at a revision, and the flag that names it."""

    kind: Literal["dataset", "model"]
    name: str
    """ORG/NAME, or NAME."""
    revision: str
    """A branch, a tag or a commit."""
    flag: str
    """Flag that names the repository, such as --data.path; begins error messages."""

    @property
    def is_fixed(self) -> bool:
        """Whether the revision is a commit, which never changes."""
        return COMMIT.fullmatch(self.revision) is not None

    @property
    def noun(self) -> str:
        """Kind of the repository, for messages."""
        return f"{_NOUNS[self.kind]} {self.name}"

    def at(self, revision: str) -> str:
        """Return the name of the repository at a revision, in the format of flags."""
        folder = "datasets/" if self.kind == "dataset" else ""
        return f"{PREFIX}{folder}{self.name}@{revision}"

    def __str__(self) -> str:
        return f"{self.flag} {self.at(self.revision)}"


class Fetched(NamedTuple):
    """Files of a repository on this machine."""

    folder: pathlib.Path
    files: list[str]
    """Paths relative to the folder, which may also hold other files."""
    origin: str
    """Name of the repository at the commit of the revision."""


class _Listing(NamedTuple):
    """Files of a commit, as the hub lists them."""

    commit: str
    files: dict[str, str]
    """File -> checksum: sha256:HEX, or git:HEX for the hash of a git blob."""
    sizes: dict[str, int]
    """File -> size in bytes; empty in a listing that an older version recorded."""


class Snapshot:
    """A repository at one commit; its files are downloaded on request."""

    def __init__(self, repository: Repository) -> None:
        """Ask the hub about a revision, unless it is a commit with a recorded listing.

        Raises:
          ValueError: the repository or the revision does not exist, or the hub does not
            answer and this machine has no complete copy.
        """
        self.repository = repository
        self._library = import_library(repository)
        self._cache = cache_dir_of(self._library)
        self._home = _home(repository, self._cache)
        self._failure: Exception | None = None
        known = self._read_listing(repository.revision) if repository.is_fixed else None
        self._listing = known or self._ask()

    @property
    def commit(self) -> str:
        """Commit of the revision when the hub last answered."""
        return self._listing.commit

    @property
    def files(self) -> list[str]:
        """Paths of all files inside the repository that are not hidden."""
        return [file for file in self._listing.files if _is_inside(file)]

    def bring(self, files: Iterable[str]) -> Fetched:
        """Return files of the repository; download those not on this machine yet.

        Args:
          files: some of `self.files`.
        Raises:
          ValueError: a download stops, a file arrives damaged, a local file was
            changed, or files are missing and the hub does not answer.
        """
        files, folder = sorted(files), self._home / "snapshots" / self.commit
        arrived = self._read_arrived()
        self._check_unchanged(folder, arrived, files)
        if not all(f in arrived and (folder / f).is_file() for f in files):
            if self._failure is not None:
                raise self._has_no_copy(self._failure)
            with _writable(self.repository), cache_files.locked(self._kept("arrived")):
                arrived = self._read_arrived()  # perhaps by another process
                self._download_missing(files, folder, arrived)
        return Fetched(folder, files, self.repository.at(self.commit))

    def remote_files(self, files: Iterable[str]) -> list[RemoteFile]:
        """Describe files that are to be read with `read_range` instead of `bring`.

        Args:
          files: some of `self.files`.
        Raises:
          ValueError: the hub does not return the sizes, or the library's cache, where
            the list of files is kept, cannot be written.
        """
        files = sorted(files)
        if not self._listing.sizes.keys() >= {*files}:
            error = self._failure or ValueError("sizes of files are not known")
            raise self._has_no_copy(error)
        with _writable(self.repository):
            self._keep_listing()
        checksums, sizes = self._listing.files, self._listing.sizes
        return [RemoteFile(file, sizes[file], checksums[file]) for file in files]

    def read_range(self, file: str, start: int, length: int) -> bytes:
        """Return bytes of a file of the hub.

        Raises:
          OSError: the hub does not answer.
          ValueError: the hub refuses the request.
        """
        library, repository = self._library, self.repository
        url = library.hf_hub_url(
            *(repository.name, file),
            repo_type=repository.kind,
            revision=self.commit,
            endpoint=endpoint_of(library),
        )
        headers = library.utils.build_hf_headers()
        headers["Range"] = f"bytes={start}-{start + length - 1}"
        try:
            answer = library.get_session().get(
                url, headers=headers, timeout=_TIMEOUT_S, follow_redirects=True
            )
            library.utils.hf_raise_for_status(answer)
        except library.errors.GatedRepoError:
            raise self._is_gated() from None
        except (OSError, http_error_of(library)) as error:
            raise OSError(first_line(error)) from None
        if answer.status_code == _PARTIAL:
            return answer.content
        return answer.content[start : start + length]  # no support for ranges

    def tell(self) -> None:
        """Log which commit is read; if the hub did not answer, log its error too."""
        repository = self.repository
        if self._failure is not None:
            _log.warning(
                "%s: the hub %s does not answer as it should (%s); reading the copy of "
                "commit %s on this machine",
                *(repository, host_of(self._library), first_line(self._failure)),
                self.commit,
            )
        elif not repository.is_fixed:
            _log.info("%s is commit %s", repository, self.commit)

    def remember(self) -> None:
        """Record the commit of the revision; call this after all downloads."""
        if self._failure is None and not self.repository.is_fixed:
            remember(self.repository, self.commit)

    # ------------------------------------------------------------------------- the hub

    def _ask(self) -> _Listing:
        """Return the hub's listing: the commit of the revision, and its files."""
        repository, library = self.repository, self._library
        errors, host, noun = library.errors, host_of(library), _NOUNS[repository.kind]
        api = library.HfApi(endpoint=endpoint_of(library))
        try:
            info = api.repo_info(
                repository.name,
                repo_type=repository.kind,
                revision=repository.revision,
                timeout=_TIMEOUT_S,
                files_metadata=True,
            )
        except errors.RevisionNotFoundError:
            raise ValueError(
                f"{repository}: the {repository.noun} has no revision "
                f"{repository.revision!r}; give a branch, a tag or a commit of it, "
                "such as main"
            ) from None
        except errors.GatedRepoError:
            raise self._is_gated() from None
        except errors.RepositoryNotFoundError:
            raise ValueError(
                f"{repository}: {host} has no {noun} {repository.name}, or it is "
                "private; check the name, or set HF_TOKEN to a token that may read it"
            ) from None
        except (OSError, http_error_of(library), ValueError) as error:
            return self._known(error)
        except (KeyError, TypeError):  # JSON of another kind
            return self._known(ValueError(f"the answer does not describe a {noun}"))
        if not COMMIT.fullmatch(info.sha or ""):  # it becomes part of a path
            return self._known(ValueError(f"the commit is {info.sha!r}"))
        files = {
            s.rfilename: f"sha256:{s.lfs.sha256}" if s.lfs else f"git:{s.blob_id}"
            for s in info.siblings or []
        }
        sizes = {s.rfilename: s.size or 0 for s in info.siblings or []}
        return _Listing(info.sha, files, sizes)

    def _known(self, error: Exception) -> _Listing:
        """Return the last recorded listing, because the hub does not answer."""
        self._failure = error
        try:
            commit = self.repository.revision
            if not self.repository.is_fixed:
                commit = _ref(self.repository, self._home).read_text()
            listing = self._read_listing(commit)
        except (OSError, ValueError):
            listing = None
        if listing is None:
            raise self._has_no_copy(error)
        return listing

    def _has_no_copy(self, error: Exception) -> NoCopyError:
        if getattr(getattr(error, "response", None), "status_code", 0) in _REFUSED:
            remedy = "set HF_TOKEN to a token that may read it, or unset a wrong one"
        else:
            remedy = (
                f"copy {self._home} from a machine that has read it, start again when "
                "the hub can be reached, or set HF_ENDPOINT"
            )
        return NoCopyError(
            f"{self.repository}: the hub {host_of(self._library)} does not answer as "
            f"it should ({first_line(error)}), and this machine has no complete copy "
            f"of the {_NOUNS[self.repository.kind]}; {remedy}",
            self.repository.kind,
        )

    def _is_gated(self) -> ValueError:
        repository = self.repository
        page = repository.at("").removeprefix(PREFIX).removesuffix("@")
        return ValueError(
            f"{repository}: the {repository.noun} is only for users who accepted its "
            f"terms; accept them on {host_of(self._library)}/{page}, and set HF_TOKEN "
            "to your token"
        )

    # ----------------------------------------------------------------------- the cache

    def _download_missing(
        self, files: Iterable[str], folder: pathlib.Path, arrived: dict[str, str]
    ) -> None:
        """Download missing files, check them, and add them to the list `arrived`."""
        self._keep_listing()
        try:
            for file in files:
                is_there = (folder / file).is_file()
                if not is_there:
                    self._download(file)
                if not is_there or file not in arrived:
                    checksum = self._listing.files[file]
                    arrived[file] = self._checked(folder / file, checksum)
        finally:
            with cache_files.written_whole(self._kept("arrived")) as temporary:
                cache_files.write_json(temporary, arrived)

    def _check_unchanged(
        self, folder: pathlib.Path, arrived: Mapping[str, str], files: Iterable[str]
    ) -> None:
        """Refuse files that changed since their download; read each file once."""
        here = [folder / file for file in files if file in arrived]
        here = [path for path in here if path.is_file()]
        with _writable(self.repository):
            found = hash_files(here, self._home / "mjax")
        for path in here:
            expected = arrived[path.relative_to(folder).as_posix()]
            if found[path] != expected:
                raise ValueError(
                    f"{self.repository}: {path} is not what was downloaded (its "
                    f"SHA-256 is {found[path]}, not {expected}), so it was changed; "
                    f"delete {path.resolve()} and start again to download it again"
                )

    def _download(self, file: str) -> None:
        library = self._library
        try:
            library.hf_hub_download(
                *(self.repository.name, file),
                repo_type=self.repository.kind,
                revision=self.commit,
                endpoint=endpoint_of(library),
                cache_dir=self._cache,
            )
        except library.errors.GatedRepoError:
            raise self._is_gated() from None
        except (OSError, http_error_of(library), ValueError) as error:
            raise ValueError(
                f"{self.repository}: the download of {file} stopped "
                f"({first_line(error)}); start again; the downloaded part is kept"
            ) from None

    def _checked(self, file: pathlib.Path, checksum: str) -> str:
        """Return the SHA-256 of a file; delete it if the hub's checksum differs."""
        found = Comparison(checksum, file.stat().st_size)
        with file.open("rb") as opened:
            while block := opened.read(1 << 20):
                found.update(block)
        if found.difference:
            file.resolve().unlink()
            file.unlink(missing_ok=True)
            raise ValueError(
                f"{self.repository}: {file.name} arrived damaged ({found.difference}, "
                "which the hub states), and was removed; start again"
            )
        return found.sha256

    def _keep_listing(self) -> None:
        if self._read_listing(self.commit) != self._listing:
            path = self._kept("files")
            with cache_files.locked(path), cache_files.written_whole(path) as temporary:
                cache_files.write_json(temporary, self._listing._asdict())

    def _kept(self, what: str) -> pathlib.Path:
        return self._home / "mjax" / f"{self.commit}.{what}.json"

    def _read_listing(self, commit: str) -> _Listing | None:
        """Return the recorded list of files of a commit; None if there is none."""
        path = self._home / "mjax" / f"{commit}.files.json"
        try:
            found = checked_json.check(cache_files.read_json(path), dict[str, Any], "")
            return _Listing(found["commit"], found["files"], found.get("sizes", {}))
        except (cache_files.DamagedFileError, ValueError, KeyError):
            return None

    def _read_arrived(self) -> dict[str, str]:
        """Return file -> SHA-256, for files that were checked after their download."""
        try:
            found = cache_files.read_json(self._kept("arrived"))
            return checked_json.check(found, dict[str, str], "")
        except (cache_files.DamagedFileError, ValueError):
            return {}


def fetch(
    repository: Repository, choose: Callable[[Snapshot], Iterable[str]]
) -> Fetched:
    """Download files of a repository.

    Args:
      repository: the repository, at a revision.
      choose: function that selects the files.
    Raises:
      ValueError: the repository, the revision or the files do not exist, or the hub
        cannot be reached and this machine does not have all files.
    """
    snapshot = Snapshot(repository)
    fetched = snapshot.bring(choose(snapshot))
    snapshot.tell()
    snapshot.remember()
    return fetched


def remember(repository: Repository, commit: str) -> None:
    """Record the commit of a revision; call this when all files are downloaded.

    Args:
      repository: the repository, at the revision.
      commit: the commit of the revision.
    Raises:
      ValueError: the cache cannot be written.
    """
    path = _ref(repository, _home(repository, cache_dir_of(import_library(repository))))
    if not path.is_file() or path.read_text() != commit:
        with (
            _writable(repository),
            cache_files.locked(path),
            cache_files.written_whole(path) as temporary,
        ):
            temporary.write_text(commit)


def kept_commit(repository: Repository, before: str) -> str:
    """Return the commit with which a resumed run began.

    Logs a warning if the revision now refers to another commit.

    Args:
      repository: the repository, at the requested revision.
      before: the commit with which the run began.
    """
    try:
        now = Snapshot(repository).commit
    except ValueError as error:
        _log.warning("%s; the run continues with commit %s", error, before)
        return before
    if now != before:
        _log.warning(
            "%s is commit %s now, but the run began with commit %s and continues "
            "with that one; to use the new commit, give another --work-dir",
            *(repository, now, before),
        )
    return before


def _home(repository: Repository, cache: pathlib.Path) -> pathlib.Path:
    """Return the folder of a repository in the cache."""
    return cache / f"{repository.kind}s--{repository.name.replace('/', '--')}"


def _ref(repository: Repository, home: pathlib.Path) -> pathlib.Path:
    """Return the path of the file that holds the commit of the revision."""
    revision = urllib.parse.quote(repository.revision, safe="")
    return home / "mjax" / "refs" / f"{revision}.commit"


@contextlib.contextmanager
def _writable(repository: Repository) -> Iterator[None]:
    """Turn an error of writing the cache into a ValueError with a remedy."""
    try:
        yield
    except cache_files.UnwritableError as error:
        what = str(error).partition(";")[0]
        raise ValueError(
            f"{repository}: {what}; set HF_HUB_CACHE to a folder that can be"
        ) from None


def _is_inside(file: str) -> bool:
    """Return whether a path stays inside the repository and is not hidden."""
    parts = pathlib.PurePosixPath(file).parts
    return not any(part.startswith((".", "/")) for part in parts)
