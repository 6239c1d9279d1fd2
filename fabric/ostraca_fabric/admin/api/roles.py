"""Which role a path takes, for the pages that say so."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi.routing import APIRoute

from ostraca_fabric.admin.api.access import Role

if TYPE_CHECKING:
    from fastapi import FastAPI


def role_of(app: FastAPI, method: str, path: str) -> Role:
    """Return the role that a path takes at least."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.path == path and method in route.methods:
            for dependency in route.dependant.dependencies:
                role = getattr(dependency.call, "role", None)
                if isinstance(role, Role):
                    return role
    raise LookupError(f"{method} {path} asks nobody who they are")
