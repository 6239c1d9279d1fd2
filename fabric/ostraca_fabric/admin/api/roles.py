"""Which role a path takes, for the pages that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

from ostraca_fabric.admin.api.access import Role

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fastapi import APIRouter


def role_of(routers: Iterable[APIRouter], method: str, path: str) -> Role:
    """Return the role that a path takes at least."""
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.path == path and method in (route.methods or ()):
            for dependency in route.dependant.dependencies:
                role = getattr(dependency.call, "role", None)
                if isinstance(role, Role):
                    return role
    raise LookupError(f"{method} {path} asks nobody who they are")
