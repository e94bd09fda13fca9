"""Errors of the server in OpenAI's format.

Input: status, message and the field at fault. Output: an exception with the body
`{"error": {"message", "type", "param", "code"}}`.

400: the request is malformed, or a value is out of range. 422: the request is well
formed but needs a feature that this server lacks.
"""

from typing import Any

import msgspec


class ApiError(Exception):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        """Store the error.

        Args:
          status: HTTP status.
          message: what is wrong, with the value, and what to do.
          param: the invalid field of the request.
          code: name of the error for programs.
          retry_after_s: seconds after which the same request may be accepted.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers: dict[str, str] = {}
        if retry_after_s is not None:
            self.headers["retry-after"] = str(retry_after_s)
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def content(self) -> dict[str, Any]:
        """Return the JSON object of the answer."""
        return {
            "error": {
                "message": self.message,
                "type": _type_of(self.status),
                "param": self.param,
                "code": self.code,
            }
        }

    def body(self) -> bytes:
        """Return the body of the HTTP response."""
        return msgspec.json.encode(self.content())


def _type_of(status: int) -> str:
    """Return the type of an error in OpenAI's API."""
    if status >= 500:
        return "server_error"
    return "rate_limit_error" if status == 429 else "invalid_request_error"


def malformed(
    message: str, param: str | None = None, code: str | None = None
) -> ApiError:
    """Return the error for a request that is malformed or out of range."""
    return ApiError(400, message, param=param, code=code)


def unsupported(name: str, message: str) -> ApiError:
    """Return the error for an unsupported field."""
    return ApiError(422, message, param=name, code="unsupported_parameter")


def stopping() -> ApiError:
    """Return the error for a request that arrives while the server stops."""
    return ApiError(
        503,
        "the server is stopping and takes no new requests; send it to another server, "
        "or later",
        code="stopping",
        retry_after_s=10,
    )
