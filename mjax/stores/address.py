"""Split the URL of an object store into bucket and prefix, without network access."""

import dataclasses
import re
from typing import Literal

_SCHEMES = ("s3", "gs")
_URL = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
# S3's rules for bucket names. GCS also allows underscores and up to 222 characters.
# https://docs.aws.amazon.com/AmazonS3/latest/userguide/bucketnamingrules.html
# https://cloud.google.com/storage/docs/buckets#naming
_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_FORMS = "s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Address:
    """A bucket and a prefix."""

    scheme: Literal["s3", "gs"]
    bucket: str
    prefix: str
    """Prefix of the names of all objects, without leading or trailing slashes; "" if
    there is none."""

    @property
    def url(self) -> str:
        """The address as a URL, without a trailing slash."""
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    def child(self, name: str) -> "Address":
        """Return the address of a folder below this one."""
        return dataclasses.replace(self, prefix=f"{self.prefix}/{name}".strip("/"))


def is_url(text: str) -> bool:
    """Return whether a path names an object store: it begins with s3:// or gs://."""
    return text.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES))


def parse(text: str, flag: str) -> Address:
    """Parse the URL of an object store.

    Args:
      text: the URL.
      flag: flag that gave the URL, such as --ckpt.remote; error messages begin with it.
    Raises:
      ValueError: the URL is not of the form s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.
    """
    found = _URL.fullmatch(text)
    if found is None or found["scheme"] not in _SCHEMES:
        raise ValueError(f"{flag} must be {_FORMS}, got {text!r}")
    bucket, _, prefix = found["rest"].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise ValueError(
            f"{flag} {text}: {bucket!r} is not the name of a bucket; write {_FORMS}"
        )
    prefix = prefix.removesuffix("/")
    parts = prefix.split("/") if prefix else []
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"{flag} {text}: the prefix has an empty part, '.' or '..'; write {_FORMS}"
        )
    if not prefix.isprintable() or any(sign in prefix for sign in "?#*\\"):
        raise ValueError(
            f"{flag} {text}: the prefix has one of ? # * \\ or a character that cannot "
            "be printed; name it without them"
        )
    scheme: Literal["s3", "gs"] = "s3" if found["scheme"] == "s3" else "gs"
    return Address(scheme=scheme, bucket=bucket, prefix=prefix)
