"""Errors of the server in OpenAI's form.

Enters: status, message, and what the message is about. Leaves: an exception with the
body `{"error": {"message", "type", "param", "code"}}`.

400: the request is malformed, or a value is out of range. 422: the request is well
formed but asks for something that this server cannot do.
"""

from typing import Any

import msgspec


class ApiError(Exception):
    """A request that gets an error as its answer."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Describe the error.

        Args:
          status: of HTTP.
          message: what is wrong, with the value, and what to do.
          param: the field of the request that is wrong.
          code: a word for programs.
          retry_after_s: when the same request may be accepted.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def content(self) -> dict[str, Any]:
        """Return the JSON of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """Return the answer as it is sent."""
        return msgspec.json.encode(self.content())


def _type_of(status: int) -> str:
    """Name the kind of error as OpenAI's API does."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def malformed(
    message: str, param: str | None = None, code: str | None = None
) -> ApiError:
    """Make the error for a request that is malformed or out of range."""
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str, message: str) -> ApiError:
    """Make the error for a field that this server cannot do."""
    return ApiError(422, message, param=name, code="unsupported_parameter")


def stopping() -> ApiError:
    """Make the error for a request that arrives while the server stops."""
    return ApiError(
        503,
        "the server is stopping and takes no new requests; send this one to another "
        "server, or later",
        code="stopping",
        retry_after_s=10,
    )
