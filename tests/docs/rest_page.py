"""The table of docs/reference/admin-rest.md, made from the service's own OpenAPI.

``python -m tests.docs.rest_page`` writes it into the page anew.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import cast

from fastapi.routing import APIRoute

from ostraca_admin.api.access import Role
from ostraca_admin.api.app import ROUTERS, build_app
from ostraca_admin.api.context import Context

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "admin-rest.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.rest_page`. -->\n"


def table() -> str:
    """Return every path, by tag."""
    app = build_app(cast("Context", None), version="0")
    rows: dict[str, list[str]] = {}
    for path, methods in app.openapi()["paths"].items():
        for method, said in methods.items():
            first = said["description"].partition("\n\n")[0].replace("\n", " ")
            role = role_of(method.upper(), path).value
            row = f"| `{method.upper()} {path}` | {role} | {first} |\n"
            rows.setdefault(said["tags"][0], []).append(row)
    return "\n| path | role | action |\n|---|---|---|\n" + "".join(chain.from_iterable(rows.values()))


def role_of(method: str, path: str) -> Role:
    """Return the least role required by a path."""
    for route in (route for router in ROUTERS for route in router.routes):
        if isinstance(route, APIRoute) and route.path == path and method in (route.methods or ()):
            for dependency in route.dependant.dependencies:
                role = getattr(dependency.call, "role", None)
                if isinstance(role, Role):
                    return role
    raise LookupError(f"{method} {path} requires no role")


def page() -> str:
    """Return the page as it should be."""
    return f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}{table()}"


if __name__ == "__main__":
    PAGE.write_text(page())
