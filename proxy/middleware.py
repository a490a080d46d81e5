"""What surrounds every endpoint: a request id, the API key, and errors in OpenAI's shape.

    {"error": {"message", "type", "param", "code"}}

The key is asked for everywhere but on an exact list of probes; unknown paths are no exception.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import re
import uuid
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from common.argument_parser import did_you_mean
from common.errors import OverloadedError, TandemError
from common.logging import log_event

log = logging.getLogger(__name__)

FREE_PATHS = frozenset({"/health", "/ready"})
REQUEST_ID_HEADER = "X-Request-Id"

_REQUEST_ID = web.RequestKey("request_id", str)
_VALID_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_DEFAULT_RETRY_SECONDS = 5.0
_MAX_GUESSED_PATH = 200  # characters; looking for a near one takes time in proportion
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class AuthenticationError(TandemError):
    status = 401
    code = "invalid_api_key"


def request_id_of(request: web.Request) -> str:
    return request[_REQUEST_ID]


def error_body(error: TandemError) -> dict[str, Any]:
    return _body(error.status, error.message, error.param, error.code)


def _body(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@web.middleware
async def request_ids(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The client's X-Request-Id if it is a sane one, else a new one; every response carries it."""
    given = request.headers.get(REQUEST_ID_HEADER, "")
    request[_REQUEST_ID] = given if _VALID_REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
    return await handler(request)


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """A signal handler: also streams have sent no header yet at this time."""
    if _REQUEST_ID in request:
        response.headers[REQUEST_ID_HEADER] = request[_REQUEST_ID]


@web.middleware
async def openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error of every path as an OpenAI error body."""
    try:
        return await handler(request)
    except TandemError as error:
        _log_refusal(request, error.status, error.code)
        return _response(error.status, error_body(error), _retry_headers(error))
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionResetError:
        raise  # nobody is there to read a body
    except Exception:
        log.exception("request_failed request_id=%s path=%s", request_id_of(request), request.path)
        message = f"internal error; the server's log has it under request id {request_id_of(request)}"
        return _response(500, _body(500, message, None, "internal_error"))


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    """aiohttp's own: no such path, wrong method, body too large."""
    if error.status < 400:
        raise error
    messages = {
        404: (f"there is no {request.path}{_near_path(request)}", "unknown_url"),
        405: (f"{request.path} does not take {request.method}", "method_not_allowed"),
        413: (f"the request body is too large: {error.text}", "request_too_large"),
    }
    message, code = messages.get(error.status, (error.reason, "http_error"))
    _log_refusal(request, error.status, code)
    headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
    return _response(error.status, _body(error.status, message, None, code), headers)


def _near_path(request: web.Request) -> str:
    """A client whose base URL lacks /v1, or has more than that, is told what it looks for."""
    known = [resource.canonical for resource in request.app.router.resources()]
    return did_you_mean(request.path, known) if len(request.path) <= _MAX_GUESSED_PATH else ""


def _log_refusal(request: web.Request, status: int, code: str) -> None:
    log_event(log, "request_refused", request_id=request_id_of(request), status=status, code=code)


def _retry_headers(error: TandemError) -> dict[str, str]:
    if error.status not in (429, 503):
        return {}
    seconds = error.retry_after_seconds if isinstance(error, OverloadedError) else _DEFAULT_RETRY_SECONDS
    return {"Retry-After": str(math.ceil(seconds))}


def _response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), status=status, content_type="application/json", headers=headers)


def require_api_key(api_key: str) -> Middleware:
    """A middleware that lets nothing through without `Authorization: Bearer <api_key>` but FREE_PATHS."""
    expected = hashlib.sha256(api_key.encode()).digest()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in FREE_PATHS:
            scheme, _, given = request.headers.get("Authorization", "").partition(" ")
            digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
            if not (hmac.compare_digest(digest, expected) and scheme.lower() == "bearer"):
                raise AuthenticationError("a valid API key is required: Authorization: Bearer KEY")
        return await handler(request)

    return check


def limit_body(max_body_bytes: int) -> Middleware:
    """A middleware that refuses a body by its declared length, before any of it is read."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if (request.content_length or 0) > max_body_bytes:
            raise web.HTTPRequestEntityTooLarge(max_size=max_body_bytes, actual_size=request.content_length or 0)
        return await handler(request)

    return check
