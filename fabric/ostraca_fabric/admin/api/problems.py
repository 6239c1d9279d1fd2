"""How the service refuses: problem details (RFC 9457), of one shape for every error."""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException

from ostraca_fabric.admin.errors import ConflictError, NotFoundError, PreconditionError, UnansweredError
from ostraca_fabric.errors import (
    BlocksTooLargeError,
    ChangedError,
    MembershipError,
    OstracaError,
    PlacementBusyError,
    UsageError,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

log = logging.getLogger(__name__)

MEDIA_TYPE = "application/problem+json"
_RETRY_AFTER_S = "2"


class Problem(BaseModel):
    """Why something was refused."""

    type: str = Field("about:blank", description="What kind of problem it is.")
    title: str = Field(description="The status in words.")
    status: int
    detail: str = Field(description="What is wrong, and what to do.")
    instance: str = Field(description="The path that was asked for.")


RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {
        "description": HTTPStatus(status).phrase,
        "content": {MEDIA_TYPE: {"schema": Problem.model_json_schema()}},
    }
    for status in (400, 401, 403, 404, 409, 412, 413, 422, 503)
}
"""What any path may answer instead of what was asked for."""

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
    """Return a refusal."""
    said = Problem(title=HTTPStatus(status).phrase, status=status, detail=detail, instance=request.url.path)  # type: ignore[call-arg]  # the default is pydantic's
    return JSONResponse(said.model_dump(), status, headers, MEDIA_TYPE)


def tell_problems(app: FastAPI) -> None:
    """Have every error answered so. What is nobody's fault but ours is logged, and says nothing."""

    @app.exception_handler(OstracaError)
    async def refused(request: Request, error: OstracaError) -> Response:
        status = next((status for kind, status in _STATUS if isinstance(error, kind)), 500)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            log.error("A request failed", exc_info=error)
            return problem(request, status, "the admin service has met a bug: see its log")
        headers = {"Retry-After": _RETRY_AFTER_S} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
        return problem(request, status, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        told = "; ".join(
            f"{'.'.join(str(part) for part in each['loc'])}: {each['msg']}" for each in error.errors()[:8]
        )
        return problem(request, 422, told)

    @app.exception_handler(HTTPException)
    async def not_taken(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers) if error.headers else None
        return problem(request, error.status_code, str(error.detail), headers)

    @app.exception_handler(Exception)
    async def bug(request: Request, error: Exception) -> Response:
        log.error("A request met a bug", exc_info=error)
        return problem(request, 500, "the admin service has met a bug: see its log")
