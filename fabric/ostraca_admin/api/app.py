"""Assembly of the service."""

from __future__ import annotations

from fastapi import FastAPI

from ostraca_admin.api.context import Context
from ostraca_admin.api.problems import RESPONSES, add_error_handlers
from ostraca_admin.api.routes import blocks, enclosures, fabric, history, settings, tenants, volumes

_DESCRIPTION = """
Onboard, drain, repair and retire enclosures; create, limit and erase tenants; switch volumes. All state is in
the fabric's etcd, so any number of admin services may run.

Long work is an operation: the response comes at once, with the operation's path in the header Location. PUTs
may be repeated. The audit log has every change, with the author. Refusals are problem details (RFC 9457).
"""

ROUTERS = (
    enclosures.router,
    tenants.router,
    volumes.router,
    blocks.router,
    fabric.router,
    settings.router,
    history.router,
)
"""All paths."""


def build_app(context: Context, *, version: str) -> FastAPI:
    """Return the service as an ASGI application."""
    app = FastAPI(
        title="Ostraca admin",
        version=version,
        description=_DESCRIPTION,
        responses=RESPONSES,
        docs_url=None,  # the page loads external scripts, and many pods have no access to other networks
        redoc_url=None,
        openapi_url="/v1/openapi.json",
        redirect_slashes=False,
    )
    app.state.context = context
    for router in ROUTERS:
        app.include_router(router)
    add_error_handlers(app)
    return app
