"""Converts errors to RFC 9457 problem documents and HTTP status codes. Pure."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from muster.core import errors

MEDIA_TYPE = "application/problem+json"

#: The most specific class first.
STATUSES: tuple[tuple[type[errors.MusterError], int], ...] = (
    (errors.Unauthorized, 401),
    (errors.Forbidden, 403),
    (errors.Conflict, 409),
    (errors.StaleEpoch, 409),
    (errors.LimitExceeded, 413),
    (errors.Refused, 409),
    (errors.InvalidInput, 400),
    (errors.NotFound, 404),
    (errors.AlreadyExists, 409),
    (errors.TimedOut, 504),
    (errors.Overloaded, 429),
    (errors.Unavailable, 503),
    (errors.MissingDependency, 501),
)


class PreconditionFailed(errors.Conflict):
    """``If-Match`` does not match the current version."""

    code = "precondition-failed"


def status_of(error: errors.MusterError) -> int:
    if isinstance(error, PreconditionFailed):
        return 412
    return next((status for kind, status in STATUSES if isinstance(error, kind)), 500)


def document(error: errors.MusterError) -> dict[str, Any]:
    problem: dict[str, Any] = {
        "type": f"urn:muster:error:{error.code}",
        "title": error.code.replace("-", " "),
        "status": status_of(error),
        "detail": error.message,
        "code": error.code,
    }
    if error.hint:
        problem["hint"] = error.hint
    if isinstance(error, errors.ParseError):
        problem["position"] = error.position
    if isinstance(error, errors.Conflict) and error.actual is not None:
        problem["actual"] = error.actual
    return problem


def response(error: errors.MusterError) -> JSONResponse:
    return JSONResponse(document(error), status_of(error), headers(error), MEDIA_TYPE)


def headers(error: errors.MusterError) -> dict[str, str]:
    response_headers = {}
    if isinstance(error, errors.Unavailable) and error.retry_after_s:
        response_headers["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if status_of(error) == 401:
        response_headers["WWW-Authenticate"] = 'Bearer realm="muster"'
    return response_headers
