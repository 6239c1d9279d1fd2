"""The service put together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from ostraca_fabric.admin.api import blocks, drives, enclosures, fabric, history, settings, tenants, volumes
from ostraca_fabric.admin.api.description import described
from ostraca_fabric.admin.api.problems import RESPONSES, tell_problems

if TYPE_CHECKING:
    from ostraca_fabric.admin.api.context import Context

_DESCRIPTION = """
Enclosures are onboarded, drained, repaired and retired here; tenants are made, and what they have is erased;
volumes are switched. Everything it keeps is in the fabric's etcd: any number of these services may run.

Long work is an operation: a change answers at once, with its path in the header Location. PUTs may be
repeated. Every change is in the audit log, with who made it. Refusals are problem details (RFC 9457).
"""

ROUTERS = (
    enclosures.router,
    tenants.router,
    volumes.router,
    blocks.router,
    fabric.router,
    drives.router,
    settings.router,
    history.router,
)
"""All paths."""


def made_app(context: Context, *, version: str) -> FastAPI:
    """Return the service, as ASGI."""
    app = FastAPI(
        title="Ostraca admin",
        version=version,
        description=_DESCRIPTION,
        responses=RESPONSES,
        docs_url=None,  # that page is a program from elsewhere: ``description``
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    tell_problems(app)
    page = described(app.openapi(), ROUTERS)

    @app.get("/docs", include_in_schema=False, response_class=HTMLResponse)
    async def docs() -> str:
        return page

    return app
