"""A small GCS on this machine: it has the part of the XML API that obstore uses.

Buckets, objects, ranges, listings, preconditions by generation and uploads in parts, in
memory. It does not test tokens and permissions, the checksums that GCS accepts, limits
of parts, or whether GCS behaves as documented.

Source: https://cloud.google.com/storage/docs/xml-api/reference-methods
"""

import dataclasses
import email.utils
import hashlib
import http.server
import itertools
import json
import re
import threading
import urllib.parse
from http import HTTPStatus
from xml.sax.saxutils import escape

_RANGE = re.compile(r"bytes=([0-9]+)-([0-9]*)")
_FACT = "x-goog-meta-"


@dataclasses.dataclass(frozen=True)
class Kept:
    """An object."""

    data: bytes
    facts: dict[str, str]
    generation: int

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class GcsServer(http.server.ThreadingHTTPServer):
    """A server whose buckets are created in code; it counts requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.buckets: dict[str, dict[str, Kept]] = {}
        self.parts: dict[str, dict[int, bytes]] = {}
        self.facts_of_uploads: dict[str, dict[str, str]] = {}
        self.count = itertools.count(1)
        self.lock = threading.Lock()
        self.denied: set[str] = set()
        """Names of buckets to which all access is refused."""

    @property
    def key(self) -> str:
        """Value of GOOGLE_SERVICE_ACCOUNT_KEY that directs clients to this server."""
        return json.dumps(
            {
                "gcs_base_url": f"http://127.0.0.1:{self.server_port}",
                "disable_oauth": True,
                "client_email": "",
                "private_key": "",
                "private_key_id": "",
            }
        )

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of a client that has disconnected."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Do not log requests."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        self._serve()

    def do_POST(self) -> None:
        self._serve()

    def do_DELETE(self) -> None:
        self._serve()

    def _serve(self) -> None:
        assert isinstance(self.server, GcsServer)
        url = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(url.query, keep_blank_values=True))
        bucket, _, name = urllib.parse.unquote(url.path).lstrip("/").partition("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            if bucket in self.server.denied:
                return self._fail(HTTPStatus.FORBIDDEN, "AccessDenied")
            if bucket not in self.server.buckets:
                return self._fail(HTTPStatus.NOT_FOUND, "NoSuchBucket")
            objects = self.server.buckets[bucket]
            if not name:
                return self._list(bucket, objects)
            if self.command in ("GET", "HEAD"):
                return self._get(objects, name)
            if self.command == "DELETE":
                return self._delete(objects, name)
            return self._put(bucket, objects, name)

    def _list(self, bucket: str, objects: dict[str, Kept]) -> None:
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        after = self.query.get("continuation-token", "")
        after = after or self.query.get("start-after", "")
        found, folders = [], set()
        for name in sorted(objects):
            rest = name[len(prefix) :]
            if not name.startswith(prefix) or name <= after:
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                found.append(name)
        page, rest_of = found[:1000], found[1000:]
        items = "".join(
            f"<Contents><Key>{escape(n)}</Key><Size>{len(objects[n].data)}</Size>"
            f"<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            f"<ETag>{escape(objects[n].etag)}</ETag></Contents>"
            for n in page
        )
        prefixes = "".join(
            f"<CommonPrefixes><Prefix>{escape(f)}</Prefix></CommonPrefixes>"
            for f in sorted(folders)
        )
        last = escape(page[-1]) if rest_of else ""
        token = f"<NextContinuationToken>{last}</NextContinuationToken>"
        text = (
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(page)}</KeyCount>"
            f"<IsTruncated>{'true' if rest_of else 'false'}</IsTruncated>"
            f"{token if rest_of else ''}{items}{prefixes}</ListBucketResult>"
        )
        self._answer(HTTPStatus.OK, text.encode())

    def _get(self, objects: dict[str, Kept], name: str) -> None:
        if name not in objects:
            return self._fail(HTTPStatus.NOT_FOUND, "NoSuchKey")
        kept, status, extra = objects[name], HTTPStatus.OK, {}
        if self.headers.get("If-Match") not in (None, kept.etag):
            return self._fail(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        data = kept.data
        if found := _RANGE.fullmatch(self.headers.get("Range") or ""):
            start, stop = int(found[1]), int(found[2] or len(data)) + 1
            if start >= len(data):
                return self._fail(
                    HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, "InvalidRange"
                )
            stop = min(stop, len(data))
            status = HTTPStatus.PARTIAL_CONTENT
            extra = {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}
            data = data[start:stop]
        facts = {f"{_FACT}{key}": value for key, value in kept.facts.items()}
        return self._answer(status, data, kept, extra | facts)

    def _delete(self, objects: dict[str, Kept], name: str) -> None:
        assert isinstance(self.server, GcsServer)
        if "uploadId" in self.query:
            self.server.parts.pop(self.query["uploadId"], None)
        elif objects.pop(name, None) is None:
            return self._fail(HTTPStatus.NOT_FOUND, "NoSuchKey")
        return self._answer(HTTPStatus.NO_CONTENT)

    def _put(self, bucket: str, objects: dict[str, Kept], name: str) -> None:
        assert isinstance(self.server, GcsServer)
        facts = {
            key.lower().removeprefix(_FACT): value
            for key, value in self.headers.items()
            if key.lower().startswith(_FACT)
        }
        upload = self.query.get("uploadId", "")
        if "uploads" in self.query:
            upload = str(next(self.server.count))
            self.server.parts[upload] = {}
            self.server.facts_of_uploads[upload] = facts
            text = (
                f"<InitiateMultipartUploadResult><Bucket>{bucket}</Bucket><Key>"
                f"{escape(name)}</Key><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
            return self._answer(HTTPStatus.OK, text.encode())
        if upload and upload not in self.server.parts:
            return self._fail(HTTPStatus.NOT_FOUND, "NoSuchUpload")
        if "partNumber" in self.query:
            self.server.parts[upload][int(self.query["partNumber"])] = self.body
            return self._answer(HTTPStatus.OK, b"", Kept(self.body, {}, 0))
        expected = self.headers.get("x-goog-if-generation-match")
        now = objects[name].generation if name in objects else 0
        if expected is not None and int(expected) != now:
            return self._fail(HTTPStatus.PRECONDITION_FAILED, "PreconditionFailed")
        data = self.body
        if upload:
            parts = self.server.parts.pop(upload)
            data = b"".join(parts[number] for number in sorted(parts))
            facts = self.server.facts_of_uploads.pop(upload)
        kept = objects[name] = Kept(data, facts, next(self.server.count))
        text = f"<CompleteMultipartUploadResult><ETag>{escape(kept.etag)}</ETag>"
        text += "</CompleteMultipartUploadResult>"
        return self._answer(HTTPStatus.OK, text.encode() if upload else b"", kept)

    def _fail(self, status: HTTPStatus, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{status.phrase}</Message></Error>"
        self._answer(status, text.encode())

    def _answer(
        self,
        status: HTTPStatus,
        data: bytes = b"",
        kept: Kept | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.send_response(status)
        if kept is not None:
            self.send_header("ETag", kept.etag)
            self.send_header("x-goog-generation", str(kept.generation))
            self.send_header("Last-Modified", email.utils.formatdate(0, usegmt=True))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
