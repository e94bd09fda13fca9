"""Read the remote files of --data.path through blocks on the disks of the hosts.

With --data.cache.mirror-dir the hosts of a run share the blocks (see `mirror` and
`remote_hosts`). Each host reads every file completely once, to check its checksum and
to store the SHA-256 of the file and of its blocks. Later starts do not compute these
hashes again, and refuse blocks that differ from them.
"""

import contextlib
import json
import logging
import pathlib
import secrets
import socket
import time
from collections.abc import Iterator, Mapping

from mjax import checked_json
from mjax.data import bucket_files, cache_files, hub, hub_datasets
from mjax.data.config import CacheConfig, DataConfig
from mjax.data.files import RemotePath
from mjax.data.listing import Listing
from mjax.data.mirror.config import MirrorConfig
from mjax.data.mirror.mirror import Mirror, RemoteFile
from mjax.data.unfinished import SAVE_S, Meter
from mjax.stores.address import is_url

_HASHES = "sha256.json"
_GIB, _MIB = 1 << 30, 1 << 20
_log = logging.getLogger(__name__)


class RemoteFiles:
    """The files of the remote paths of a run; usable while the mirror is open."""

    def __init__(
        self, listings: Mapping[str, Listing], mirror: Mirror, folder: pathlib.Path
    ) -> None:
        """Store the listings and the mirror.

        Args:
          listings: remote path -> listing.
          mirror: mirror of the files of all paths, see `_Remote`.
          folder: folder of the blocks.
        """
        self._listings, self._mirror = listings, mirror
        self._table = folder / _HASHES
        # Identity of a file -> SHA-256 of the file, then of each block. `_kept` is the
        # stored table, which includes files of other runs.
        self._digests: dict[str, list[str]] = {}
        self._kept: dict[str, list[str]] = {}

    def __contains__(self, path: str) -> bool:
        """Return whether a path of a corpus is read through blocks."""
        return path in self._listings

    def origin(self, path: str) -> str:
        """Return a path, with the version that is read."""
        return self._listings[path].origin

    @property
    def versions(self) -> dict[str, str]:
        """Return URL -> text with size and version, for files in object stores."""
        found = {}
        for listing in self._listings.values():
            found |= listing.versions
        return found

    def files(self, path: str) -> list[tuple[str, RemotePath]]:
        """Return (name relative to the path, file) for the files of a remote path."""
        listing = self._listings[path]
        return [(f.name, self._path(_named(listing, f))) for f in listing.files]

    def _path(self, file: RemoteFile) -> RemotePath:
        return RemotePath(
            url=file.name,
            num_bytes=file.size,
            block_bytes=self._mirror.config.block_bytes,
            read_range=lambda start, length: self._mirror.read_range(
                file.name, start, length
            ),
            sha256=lambda: self._sha256(file),
        )

    # ------------------------------------------------------------------------- hashes

    def _sha256(self, file: RemoteFile) -> str:
        """Return the SHA-256 of a file; the first call hashes all unhashed files."""
        if file.identity not in self._digests:
            self._read_hashes()
            try:
                if not self._has_all():
                    self._hash_missing()
            except OSError as error:  # also WrongContentError
                raise ValueError(f"--data.path: {error}") from None
            for listing in self._listings.values():
                listing.remember()
        return self._digests[file.identity][0]

    def _has_all(self) -> bool:
        return all(f.identity in self._digests for f in self._all())

    def _all(self) -> Iterator[RemoteFile]:
        return (_named(o, file) for o in self._listings.values() for file in o.files)

    def _hash_missing(self) -> None:
        with contextlib.ExitStack() as stack:
            can_keep = True
            try:
                stack.enter_context(cache_files.locked(self._table))
            except cache_files.UnwritableError as error:
                can_keep = False
                _log.warning("hashes of remote files cannot be kept: %s", error)
            self._read_hashes()  # another process of the host may have hashed them
            if self._has_all():
                return
            self._fetch()
            missing = {
                f.identity: f for f in self._all() if f.identity not in self._digests
            }
            meter = Meter("hashing", sum(f.size for f in missing.values()))
            saved = time.monotonic()
            try:
                for file in missing.values():
                    digest = self._mirror.check(file.name, meter.add)
                    blocks = self._mirror.digests(file.name)
                    self._digests[file.identity] = [digest, *blocks]
                    if can_keep and time.monotonic() - saved >= SAVE_S:
                        self._write_hashes()
                        saved = time.monotonic()
            finally:  # after a stop, hashes computed so far are kept
                if can_keep:
                    self._write_hashes()

    def _fetch(self) -> None:
        """Fetch the blocks of this host, while the other hosts fetch theirs."""
        mirror = self._mirror
        num_bytes, limit = mirror.num_own_bytes, mirror.limit_bytes
        if limit is not None and num_bytes > limit:
            _log.warning(
                "--data.cache.limit-gib %g is below the %.3g GiB of blocks that this "
                "host keeps; bytes that are evicted are read from the remote again",
                *(limit / _GIB, num_bytes / _GIB),
            )
            return
        mirror.fetch(Meter("fetching", num_bytes).add)

    def _read_hashes(self) -> None:
        try:
            found = cache_files.read_json(self._table)
            self._kept |= checked_json.check(found, dict[str, list[str]], "")
        except (cache_files.DamagedFileError, ValueError):
            return  # the table is missing or cannot be read: files are hashed again
        for file in self._all():
            digests = self._kept.get(file.identity, [])[1:]
            if file.identity not in self._digests and self._trusts(file, digests):
                self._digests[file.identity] = self._kept[file.identity]

    def _trusts(self, file: RemoteFile, digests: list[str]) -> bool:
        try:
            return self._mirror.trust(file.name, digests)
        except ValueError:  # not hexadecimal digits
            return False

    def _write_hashes(self) -> None:
        try:
            with cache_files.written_whole(self._table) as temporary:
                cache_files.write_json(temporary, self._kept | self._digests)
        except cache_files.UnwritableError as error:
            _log.warning("hashes of remote files cannot be kept: %s", error)


@contextlib.contextmanager
def alone(config: DataConfig) -> Iterator[RemoteFiles | None]:
    """Open the remote files of one process.

    Args:
      config: data of the run, which names the remote paths.
    Yields:
      The files; None if no path is read through blocks.
    Raises:
      ValueError: a path does not exist or cannot be listed, or the folder of blocks
        cannot be created.
    """
    listings = listed(config)
    if not listings:
        yield None
        return
    host = socket.gethostname()
    address = {host: ("127.0.0.1", 0)}  # there is no other host
    terms = mirror_config(config.cache, address, secrets.token_hex(16))
    mirror = opened(config, listings, host, terms)
    with contextlib.closing(mirror):
        yield RemoteFiles(listings, mirror, block_folder(config))


# ---------------------------------------------------------------------------- listings


def listed(config: DataConfig) -> dict[str, Listing]:
    """List the files of the paths that are read through blocks.

    Returns:
      Remote path -> listing.
    Raises:
      ValueError: a path does not exist, or cannot be listed.
    """
    found, cache = {}, config.cache
    for path in dict.fromkeys(path for paths in config.paths for path in paths):
        if path.startswith(hub.PREFIX) and cache.mirror_dir is not None:
            found[path] = hub_datasets.list_files(path)
        elif is_url(path):
            found[path] = bucket_files.list_files(path, block_folder(config))
    if cache.mirror_dir is not None and not found:
        _log.warning(
            "--data.cache.mirror-dir %s has no effect: no --data.path is remote",
            cache.mirror_dir,
        )
    return found


def kept_lists(config: DataConfig) -> str:
    """Return the lists of objects on this host, for `keep_lists` on another host."""
    found = {}
    for path in filter(is_url, (p for paths in config.paths for p in paths)):
        kept = bucket_files.kept_list(path, block_folder(config))
        with contextlib.suppress(OSError):  # no list is stored
            found[path] = kept.read_text()
    return json.dumps(found)


def keep_lists(config: DataConfig, lists: str) -> None:
    """Store the lists of another host.

    Args:
      config: data of the run, which names the paths and the folder.
      lists: result of `kept_lists` on the other host.
    Raises:
      ValueError: the folder cannot be written.
    """
    for path, text in json.loads(lists).items():
        kept = bucket_files.kept_list(path, block_folder(config))
        with cache_files.locked(kept), cache_files.written_whole(kept) as temporary:
            temporary.write_text(text)


class _Remote:
    """Remote of a mirror: the files of all remote paths, named by their URLs."""

    def __init__(self, listings: Mapping[str, Listing]) -> None:
        self._readers = {
            _named(listing, file).name: (listing, file.name)
            for listing in listings.values()
            for file in listing.files
        }
        named = [_named(o, file) for o in listings.values() for file in o.files]
        self.files = [*{file.name: file for file in named}.values()]

    def read_range(self, name: str, start: int, length: int) -> bytes:
        listing, own_name = self._readers[name]
        return listing.read_range(own_name, start, length)


def _named(listing: Listing, file: RemoteFile) -> RemoteFile:
    """Return a file of a listing with its URL as name."""
    return RemoteFile(f"{listing.base}/{file.name}", file.size, file.checksum)


# ------------------------------------------------------------------------------ blocks


def block_folder(config: DataConfig) -> pathlib.Path:
    """Return the folder of the blocks of this host."""
    if config.cache.mirror_dir is not None:
        return pathlib.Path(config.cache.mirror_dir).expanduser()
    return cache_files.cache_dir(config.cache_dir) / "blocks"


def mirror_config(
    cache: CacheConfig, addresses: Mapping[str, tuple[str, int]], token: str
) -> MirrorConfig:
    """Return the settings that must be equal on all hosts.

    Args:
      cache: number of replicas, and rate limit of the whole run.
      addresses: host -> (address, port), for each host that serves blocks.
      token: secret that each request carries.
    """
    rate = cache.mib_per_s
    return MirrorConfig(
        addresses=addresses,
        token=token,
        num_replicas=cache.replicas,
        bytes_per_s=None if rate is None else rate * _MIB,
    )


def opened(
    config: DataConfig, listings: Mapping[str, Listing], host: str, terms: MirrorConfig
) -> Mirror:
    """Open the blocks of the listed files on this host.

    Args:
      config: data of the run, with the folder and its size limit.
      listings: remote path -> listing.
      host: name of this host in `terms`.
      terms: settings that are equal on all hosts.
    Raises:
      ValueError: the folder cannot be created.
    """
    limit, folder = config.cache.limit_gib, block_folder(config)
    limit_bytes = None if limit is None else int(limit * _GIB)
    try:
        return Mirror(host, _Remote(listings), terms, folder, limit_bytes)
    except OSError as error:
        raise ValueError(
            f"the folder {folder} of blocks of remote files cannot be made "
            f"({error.strerror}); set --data.cache.mirror-dir to one that can be"
        ) from None
