"""HTTP errors and their envelopes: one error class, and the shape each route family gives it."""

import math
from typing import Any

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A request that is refused, or failed: status, message, and the envelope's `type`, `code` and `param`.

    `retry_after` (seconds) becomes a Retry-After header in whole seconds, at least 1, rounded up.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["Retry-After"] = str(max(1, math.ceil(retry_after)))

    def envelope(self) -> dict[str, Any]:
        """The OpenAI shape; `param` and `code` are null when there is none."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def frame(self) -> dict[str, Any]:
        """The shape inside a stream that has begun: `code` and `param` only when set."""
        error: dict[str, Any] = {"message": self.message, "type": self.kind}
        if self.code is not None:
            error["code"] = self.code
        if self.param is not None:
            error["param"] = self.param
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request itself is wrong."""
    return ApiError(400, message, code=code, param=param)


def wrong_type(field: str, expected: str, got: Any) -> ApiError:
    """A 400 for a field of the wrong JSON type."""
    shown = repr(got) if len(repr(got)) <= 80 else repr(got)[:80] + "..."
    return ApiError(400, f"invalid request: {field} must be {expected}, got {shown}", param=field)


def context_length_exceeded(limit: int, length: int, larger: str | None) -> ApiError:
    """A 400 with the two numbers that agents parse; `larger` is the flag that would give the model more, if one can."""
    advice = "shorten the conversation" + (f", or serve with a larger {larger}" if larger else "")
    return ApiError(
        400,
        f"this model's maximum context length is {limit} tokens, but your request has {length} tokens; {advice}",
        code="context_length_exceeded",
    )


def draining() -> ApiError:
    return ApiError(503, "the server is shutting down; try again", kind=SERVER, retry_after=5)
