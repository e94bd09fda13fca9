"""List and read the files below s3://BUCKET/PREFIX and gs://BUCKET/PREFIX.

A file is read only in the version that the store listed; a file that was replaced later
is refused. Once all files have been downloaded, this host keeps the list, so a later
start needs no answer from the store.
"""

import difflib
import functools
import hashlib
import logging
import pathlib
from typing import Any

from mjax import checked_json
from mjax.data import cache_files, hub_cards
from mjax.data.listing import Listing, log_left_out
from mjax.data.mirror.mirror import RemoteFile
from mjax.stores.address import Address, parse
from mjax.stores.objects import (
    ConflictError,
    MissingError,
    ObjectStore,
    UnavailableError,
    Version,
)
from mjax.stores.opened import open_store

FLAG = "--data.path"
_PATIENCE_S = 15  # seconds for which a request is repeated; the mirror then retries
_log = logging.getLogger(__name__)


def list_files(path: str, folder: pathlib.Path) -> Listing:
    """List the objects below a prefix, or a single object, without reading them.

    Args:
      path: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.
      folder: folder in which the list is kept.
    Raises:
      ValueError: there is no object, or no text among them; the store refuses access
        (bucket, permission, credentials); or it does not answer and no list is kept.
    """
    address = parse(path, FLAG)
    kept = kept_list(path, folder)
    store = open_store(address, FLAG, patience_s=_PATIENCE_S)
    base, problem, objects = address.url, None, {}
    try:
        objects = _objects(store)
        if not objects and address.prefix:
            base = address.url.rpartition("/")[0]
            store, objects = _only_object(address)
    except UnavailableError as error:
        base, objects = _read(kept)
        problem = error
        if not objects:
            raise ValueError(
                f"{FLAG} {path}: {error}, and this host has no complete list of its "
                "files; start again when the store can be reached"
            ) from None
        if base != address.url:
            store = open_store(parse(base, FLAG), FLAG, patience_s=_PATIENCE_S)
    if problem is not None:
        _log.warning(
            "%s %s: %s; reading the %d files of the list that this host keeps",
            *(FLAG, path, problem, len(objects)),
        )
    files = [name for name in objects if hub_cards.is_text(name)]
    if not files:
        shown = ", ".join([*objects][:3])
        raise ValueError(
            f"{FLAG} {path} holds no file of text{f', only {shown}' if shown else ''}; "
            f"{hub_cards.endings()}"
        )
    log_left_out(path, sorted({*objects} - {*files}))
    versions = {f"{base}/{name}": _describe(*objects[name]) for name in files}
    digest = hashlib.sha256(repr(versions).encode()).hexdigest()[:12]
    return Listing(
        base=base,
        origin=f"{address.url} ({len(files)} files, versions {digest})",
        files=[
            RemoteFile(name, num_bytes, f"version:{version.etag}/{version.generation}")
            for name, (num_bytes, version) in ((n, objects[n]) for n in files)
        ],
        read_range=functools.partial(_read_range, store, objects),
        remember=functools.partial(_write, kept, base, objects),
        versions=versions,
    )


def kept_list(path: str, folder: pathlib.Path) -> pathlib.Path:
    """Return the path of the file in which a list is kept.

    Args:
      path: s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.
      folder: folder in which lists are kept.
    Raises:
      ValueError: `path` is not the URL of a store.
    """
    url = parse(path, FLAG).url
    return folder / f"{hashlib.sha256(url.encode()).hexdigest()[:32]}.listing"


_Objects = dict[str, tuple[int, Version]]
"""Name of an object -> (bytes, version)."""


def _objects(store: ObjectStore) -> _Objects:
    """Return the objects of a store that are neither hidden nor empty."""
    return {
        found.name: (found.num_bytes, found.version)
        for found in store.objects()
        if found.num_bytes and not any(p.startswith(".") for p in found.name.split("/"))
    }


def _only_object(address: Address) -> tuple[ObjectStore, _Objects]:
    """Return the store of a URL's parent prefix, and the object that the URL names."""
    above, _, name = address.url.rpartition("/")
    store = open_store(parse(above, FLAG), FLAG, patience_s=_PATIENCE_S)
    try:
        found = store.find(name)
    except MissingError:
        near = difflib.get_close_matches(name, store.folders(), n=1)
        hint = f"; did you mean {above}/{near[0]}?" if near else ""
        raise ValueError(
            f"{FLAG} {address.url}: there is no such object, and none below it{hint}"
        ) from None
    return store, {name: (found.num_bytes, found.version)}


def _read_range(
    store: ObjectStore, objects: _Objects, name: str, start: int, length: int
) -> bytes:
    """Return bytes of an object in the version that was listed.

    Raises:
      OSError: the store does not answer.
      ValueError: the store refuses access, or the object was replaced or removed.
    """
    try:
        return store.read(name, start, start + length, version=objects[name][1])
    except (ConflictError, MissingError) as error:
        what = "deleted" if isinstance(error, MissingError) else "replaced"
        raise ValueError(
            f"{FLAG}: {store.url}/{name} was {what} after it was listed "
            f"({_describe(*objects[name])}); start again when nothing writes there"
        ) from None


def _describe(num_bytes: int, version: Version) -> str:
    parts = [f"{num_bytes} bytes"]
    parts += [f"ETag {version.etag.strip('"')}"] if version.etag else []
    parts += [f"generation {version.generation}"] if version.generation else []
    return ", ".join(parts)


# ------------------------------------------------------------------------ kept listings


def _write(kept: pathlib.Path, base: str, objects: _Objects) -> None:
    rows = {n: [size, v.etag, v.generation] for n, (size, v) in objects.items()}
    try:
        with cache_files.locked(kept), cache_files.written_whole(kept) as temporary:
            cache_files.write_json(temporary, {"base": base, "objects": rows})
    except cache_files.UnwritableError as error:
        _log.warning("the list of %s cannot be kept: %s", base, error)


def _read(kept: pathlib.Path) -> tuple[str, _Objects]:
    """Return the base URL and the objects of a kept list; ("", {}) without a list."""
    try:
        found = checked_json.check(cache_files.read_json(kept), dict[str, Any], "")
        rows = checked_json.check(found["objects"], dict[str, list[Any]], "")
        return checked_json.check(found["base"], str, ""), {
            name: (size, Version(etag=etag, generation=generation))
            for name, (size, etag, generation) in rows.items()
        }
    except (cache_files.DamagedFileError, ValueError, KeyError):
        return "", {}
