"""Object stores accessed through obstore: S3, compatible stores, and GCS.

Credentials and endpoints come from the environment variables and services that obstore
reads: for S3 AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_REGION,
AWS_ENDPOINT_URL, a web identity, a container or the instance; for GCS
GOOGLE_APPLICATION_CREDENTIALS, GOOGLE_SERVICE_ACCOUNT, the login of gcloud or the
instance. Profiles in ~/.aws are not read.

If the connection or the server fails, obstore repeats the request after 0.1 s, 0.2 s
and so on up to 15 s. Requests to S3 are signed over the SHA-256 of their content, which
S3 verifies. No call holds the interpreter's lock while it waits.

Source: https://developmentseed.org/obstore (put, get, list, RetryConfig).
"""

import contextlib
import datetime
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from mjax.stores.address import Address
from mjax.stores.objects import (
    CHUNK_BYTES,
    Absent,
    ConflictError,
    MissingError,
    Object,
    ObjectStore,
    RefusedError,
    UnavailableError,
    Version,
    part_bytes,
)

_CONNECT_S, _REQUEST_S = 10, 120
_PARTS_AT_A_TIME = 4
_ENDPOINTS = (
    *("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    *("GOOGLE_BASE_URL", "GOOGLE_SERVICE_ACCOUNT_KEY"),
)
_STATUS = re.compile(r"status code: ([0-9]{3})")
_XML_REASON = re.compile(
    r"<Code>([^<]*)</Code>.*?<Message>([^<]*)</Message>", re.DOTALL
)
# Parts of error texts about credentials: addresses that issue them, and messages.
_CREDENTIALS = (
    *("169.254.16", "169.254.17", "metadata.google", "token request"),
    *("Missing AccessKeyId", "Missing SecretAccessKey"),
    *("<Code>ExpiredToken<", "<Code>InvalidToken<"),  # status 400 of S3
)
_INVALID_NAME = "Encountered object with invalid path"
"""Error text for a listed object whose name has empty parts, '.', '..' or control
characters."""
_REMEDIES = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give the instance a "
    'role; ~/.aws is not read: eval "$(aws configure export-credentials --format env)"',
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run gcloud auth application-default "
    "login",
}


def require(address: Address, flag: str) -> None:
    """Check that obstore is installed, without importing it.

    Args:
      address: URL to open.
      flag: flag that gave the URL, for messages.
    Raises:
      ValueError: obstore is not installed.
    """
    if importlib.util.find_spec("obstore") is None:
        raise ValueError(
            f"{flag} {address.url} needs obstore; pip install 'mjax[{address.scheme}]'"
        )


def open_store(
    address: Address, flag: str, *, patience_s: int | float = 60
) -> ObjectStore:
    """Return the store of the objects below a URL; this makes no request.

    Args:
      address: the URL.
      flag: flag that gave the URL, for messages.
      patience_s: seconds for which a request is repeated before UnavailableError.
    Raises:
      ValueError: obstore is not installed, or a setting in the environment is wrong.
    """
    require(address, flag)
    return _Opened(address, flag, patience_s)


class _Opened(ObjectStore):
    def __init__(self, address: Address, flag: str, patience_s: int | float) -> None:
        self._obstore: Any = importlib.import_module("obstore")
        stores: Any = importlib.import_module("obstore.store")
        errors: Any = importlib.import_module("obstore.exceptions")
        self._conflicts = (errors.AlreadyExistsError, errors.PreconditionError)
        self._errors = (errors.BaseError,)
        self._address, self._flag, self.url = address, flag, address.url
        kind = stores.S3Store if address.scheme == "s3" else stores.GCSStore
        second = datetime.timedelta(seconds=1)
        with self._told("", "open"):
            self._store = kind(
                address.bucket,
                prefix=address.prefix or None,
                client_options={
                    "connect_timeout": _CONNECT_S * second,
                    "timeout": _REQUEST_S * second,
                    # Plain http is allowed only if an http:// endpoint was set.
                    "allow_http": any(
                        "http://" in os.environ.get(name, "") for name in _ENDPOINTS
                    ),
                },
                retry_config={"max_retries": 100, "retry_timeout": patience_s * second},
            )

    def objects(self, under: str = "") -> Iterator[Object]:
        with self._told(under, "list"):
            pages = iter(self._obstore.list(self._store, under or None))
        while True:
            with self._told(under, "list"):
                page = next(pages, ())
            if not page:
                return
            yield from map(_object, page)

    def folders(self, under: str = "") -> list[str]:
        with self._told(under, "list"):
            found = self._obstore.list_with_delimiter(self._store, under or None)
            return sorted(path.rpartition("/")[2] for path in found["common_prefixes"])

    def find(self, name: str) -> Object:
        with self._told(name, "read"):
            found = self._obstore.get(self._store, name, options={"head": True})
            return _object(found.meta, found.attributes)

    def read(
        self,
        name: str,
        start: int = 0,
        stop: int | None = None,
        *,
        version: Version | None = None,
    ) -> bytes:
        if stop is not None and stop <= start:
            return b""
        options: dict[str, Any] = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        if version is not None and version.etag is not None:
            options["if_match"] = version.etag
        with self._told(name, "read"):
            return bytes(self._obstore.get(self._store, name, options=options).bytes())

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        with self._told(name, "read"):
            found = self._obstore.get(self._store, name)
            return bytes(found.bytes()), _version(found.meta)

    def write(
        self,
        name: str,
        data: bytes,
        *,
        expected: Version | Absent | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> Version:
        mode: Any = "overwrite"
        if isinstance(expected, Absent):
            mode = "create"
        elif expected is not None:
            mode = {"e_tag": expected.etag, "version": expected.generation}
            mode = {key: value for key, value in mode.items() if value is not None}
        with self._told(name, "write"):
            done = self._obstore.put(
                self._store,
                name,
                data,
                mode=mode,
                attributes=dict(facts or {}),
                use_multipart=False,
            )
        return _version(done)

    def upload(self, name: str, path: Path, *, facts: Mapping[str, str]) -> None:
        num_bytes = path.stat().st_size
        with self._told(name, "write"):
            self._obstore.put(
                self._store,
                name,
                path,
                attributes=dict(facts),
                use_multipart=num_bytes > CHUNK_BYTES,
                chunk_size=part_bytes(num_bytes),
                max_concurrency=_PARTS_AT_A_TIME,
            )

    def delete(self, names: Iterable[str]) -> None:
        doomed = [*names]
        if self._address.scheme == "s3" and doomed:
            with self._told(doomed[0], "delete"):
                return self._obstore.delete(self._store, doomed)
        for name in doomed:  # on GCS a missing object would abort the whole deletion
            with contextlib.suppress(MissingError), self._told(name, "delete"):
                self._obstore.delete(self._store, name)
        return None

    @contextlib.contextmanager
    def _told(self, name: str, action: str) -> Iterator[None]:
        """Turn obstore's errors into errors of `objects`, with URL and remedy."""
        where = f"{self.url}/{name}".rstrip("/")
        try:
            yield
        except self._conflicts as error:
            raise ConflictError(f"{where} is in another version") from error
        except FileNotFoundError as error:
            if _is_bucket(text := str(error)):
                raise self._refused(text) from error
            raise MissingError(f"{where} is missing") from error
        except self._errors as error:
            raise self._problem(str(error), where, action) from error

    def _problem(self, text: str, where: str, action: str) -> Exception:
        """Return the error of `objects` for an error of obstore, from its text.

        The text decides, because obstore raises most errors as the same class.
        """
        status = found[1] if (found := _STATUS.search(text)) else ""
        if status == "416":
            return ValueError(f"{where} ends before the requested bytes")
        if _INVALID_NAME in text:
            return RefusedError(
                f"{self._flag} {self.url}: {_reason(text)}; rename or delete that "
                "object, or give a prefix without it"
            )
        is_refused = status in ("401", "403") or "PermissionDenied" in text
        if _is_bucket(text) or is_refused or _is_of_credentials(text):
            return self._refused(text)
        return UnavailableError(f"cannot {action} {where}: {_reason(text)}")

    def _refused(self, text: str) -> RefusedError:
        bucket, scheme = self._address.bucket, self._address.scheme
        where = f"{self._flag} {self.url}"
        if _is_bucket(text) and not _is_of_credentials(text):
            return RefusedError(
                f"{where}: there is no bucket {bucket}; make it, or give another"
            )
        return RefusedError(f"{where}: {_reason(text)}; {_REMEDIES[scheme]}")


def _is_bucket(text: str) -> bool:
    return "NoSuchBucket" in text


def _is_of_credentials(text: str) -> bool:
    return any(part in text for part in _CREDENTIALS)


def _reason(text: str) -> str:
    """Return obstore's error text without its end, which is the cause in debug form."""
    if found := _XML_REASON.search(text):
        return f"{found[1]} ({found[2]})"
    return text.partition("\n")[0].partition(" - ")[2] or text.partition("\n")[0]


def _version(meta: Mapping[str, Any]) -> Version:
    return Version(etag=meta.get("e_tag"), generation=meta.get("version"))


def _object(
    meta: Mapping[str, Any], attributes: Mapping[str, str] | None = None
) -> Object:
    return Object(
        name=meta["path"],
        num_bytes=meta["size"],
        version=_version(meta),
        modified_s=meta["last_modified"].timestamp(),
        # Attributes set by the store have capital letters in their names, like
        # Content-Type.
        facts={k: v for k, v in (attributes or {}).items() if k.islower()},
    )
