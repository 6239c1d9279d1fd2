"""Errors as problem details (RFC 9457), in the same shape for all errors."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ostraca_admin.errors import ConflictError, NotFoundError, PreconditionError, UnansweredError
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    MembershipError,
    OstracaError,
    PlacementBusyError,
    UsageError,
)

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_S = "2"
_BUG = "internal error of the admin service: see the service's log"


class Problem(BaseModel):
    """Reason of a refusal."""

    type: str = Field("about:blank", description="Kind of the problem.")
    title: str = Field(description="Name of the status code.")
    status: int
    detail: str = Field(description="Cause of the refusal, and a remedy.")
    instance: str = Field(description="Requested path.")


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    }
    for status in (400, 401, 403, 404, 409, 412, 413, 422, 503)
}
"""Error answers possible on any path."""

_STATUS: tuple[tuple[type[OstracaError], int], ...] = (
    (NotFoundError, 404),
    (PreconditionError, 412),
    (ConflictError, 409),
    (ChangedError, 409),
    (PlacementBusyError, 409),
    (BlocksTooLargeError, 409),
    (UsageError, 422),
    (MembershipError, 503),
    (UnansweredError, 503),
)


def problem(request: Request, status: int, detail: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response."""
    body = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=request.url.path)  # type: ignore[call-arg]  # pydantic has the default
    return JSONResponse(body.model_dump(), status, headers, MEDIA_TYPE)


def add_error_handlers(app: FastAPI) -> None:
    """Register handlers for all errors. Bugs are logged, and answered without details."""

    @app.exception_handler(OstracaError)
    async def refused(request: Request, error: OstracaError) -> Response:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("Request failed", exc_info=error)
            return problem(request, status, _BUG)
        headers = {"Retry-After": _RETRY_AFTER_S} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        return problem(request, status, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        if error.body is not None and not _is_json(request):
            return problem(
                request, 422, "the body is not declared as JSON: send Content-Type: application/json"
            )
        detail = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()[:8]
        )
        return problem(request, 422, detail)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers) if error.headers else None
        return problem(request, error.status_code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        log.error("Request failed with an internal error", exc_info=error)
        return problem(request, 500, _BUG)


def _is_json(request: Request) -> bool:
    kind, _, _ = request.headers.get("content-type", "").partition(";")
    return kind.strip().lower() == "application/json" or kind.strip().lower().endswith("+json")
