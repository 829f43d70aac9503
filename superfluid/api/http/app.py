"""The app's frame: every request is checked, every error has its envelope, and bodies are read with limits."""

from collections.abc import Callable
from typing import Any

import orjson
import trio
from quart import Response, request
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException, RequestEntityTooLarge

from superfluid.api.http.access_log import log_refusal
from superfluid.api.http.errors import SERVER, ApiError, draining
from superfluid.api.http.security import Access, bearer_token

MAX_BODY = 100 * 1024 * 1024  # bytes; published as max_request_bytes
SLOW_BODY = 30.0  # seconds a body may bring nothing
OPEN_ROUTES = {"/health"}  # answer without a credential


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(value), status=status, headers=headers, content_type="application/json")


def error_response(error: ApiError) -> Response:
    log_refusal(error.status, error.code)
    return json_response(error.envelope(), error.status, error.headers)


def make_app(access: Access, is_draining: Callable[[], bool]) -> QuartTrio:
    """An app without routes: every request is checked, and every error has its envelope."""
    app = QuartTrio("superfluid", static_folder=None)
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY
    app.config["RESPONSE_TIMEOUT"] = None  # a stream ends when it ends
    app.config["BODY_TIMEOUT"] = None  # `read_body` limits silence, not the whole
    app.config["PROVIDE_AUTOMATIC_OPTIONS"] = False  # no preflight answers
    app.url_map.strict_slashes = False
    app.url_map.merge_slashes = False

    @app.before_request
    async def check() -> Response | None:
        headers = request.headers
        shown = bearer_token(headers.get("Authorization")), headers.get("X-Api-Key")
        try:
            access.check_place(headers.get("Host") or None, headers.get("Origin"), shown[0] or shown[1])
            if request.path not in OPEN_ROUTES:
                access.check_credential(*shown)
            if is_draining():
                raise draining()
        except ApiError as error:
            return error_response(error)
        return None

    @app.errorhandler(ApiError)
    async def api_error(error: ApiError) -> Response:
        return error_response(error)

    @app.errorhandler(RequestEntityTooLarge)
    async def too_large(_: RequestEntityTooLarge) -> Response:
        return error_response(ApiError(413, "Request body too large", code="payload_too_large"))

    @app.errorhandler(HTTPException)
    async def http_error(error: HTTPException) -> Response:
        status = error.code or 500
        if status == 404:
            message = f"no such route: {request.method} {request.path}"
        elif status == 405:
            message = f"{request.path} does not take {request.method}"
        else:
            message = error.description or error.name
        response = error_response(ApiError(status, message))
        for name, value in error.get_headers():
            if name.lower() == "allow":
                response.headers[name] = value
        return response

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        app.logger.error("request failed: %s %s", request.method, request.path, exc_info=error)
        return error_response(ApiError(500, f"internal error: {type(error).__name__}", kind=SERVER))

    return app


async def read_body(most: int | None = None) -> bytes:
    """The request's body. Raises ApiError 408 when it brings nothing for a while, 413 when it is too large."""
    parts: list[bytes] = []
    size = 0
    body = request.body.__aiter__()
    while True:
        with trio.move_on_after(SLOW_BODY) as limit:
            try:
                part = await anext(body)
            except StopAsyncIteration:
                return b"".join(parts)
        if limit.cancelled_caught:
            raise ApiError(
                408, f"the request's body brought nothing for {SLOW_BODY:g} s", headers={"Connection": "close"}
            )
        size += len(part)
        if size > (MAX_BODY if most is None else most):
            raise ApiError(413, "Request body too large", code="payload_too_large")
        parts.append(part)
