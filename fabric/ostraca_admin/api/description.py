"""Description of the service for people: a page without scripts or external files, and roles of paths.

Many pods have no access to other networks.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from fastapi.routing import APIRoute

from ostraca_admin.api.access import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from fastapi import APIRouter

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
code { font-size: 0.95em; } h3 { margin-bottom: 0; }
dl { margin-left: 1.5rem; } dt { font-family: monospace; }
small { color: #666; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #ddd; } a { color: #8bf; } }
"""


def described(openapi: dict[str, Any], routers: Iterable[APIRouter]) -> str:
    """Return the page as HTML."""
    known = list(routers)
    info = openapi["info"]
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width'>",
        f"<title>{escape(info['title'])}</title><style>{_STYLE}</style>",
        f"<h1>{escape(info['title'])} <small>{escape(info['version'])}</small></h1>",
        *(f"<p>{escape(each)}</p>" for each in info["description"].strip().split("\n\n")),
        "<p>For programs: <a href='/v1/openapi.json'>/v1/openapi.json</a></p>",
    ]
    for path, methods in openapi["paths"].items():
        for method, route in methods.items():
            role = role_of(known, method.upper(), path).value
            parts.append(f"<h3><code>{method.upper()} {escape(path)}</code> <small>{role}</small></h3>")
            parts += [f"<p>{escape(each)}</p>" for each in route["description"].split("\n\n")]
            parts += _fields(openapi, route)
    return "".join(parts)


def _fields(openapi: dict[str, Any], route: dict[str, Any]) -> Iterator[str]:
    """Yield the request's fields: query, headers and body."""
    fields = [
        (each["name"], each.get("description", ""), each["required"])
        for each in route.get("parameters", ())
        if each["in"] != "path"
    ]
    body = route.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if name := body.get("$ref", "").rpartition("/")[2]:
        form = openapi["components"]["schemas"][name]
        required = form.get("required", ())
        fields += [
            (field, schema.get("description", ""), field in required)
            for field, schema in form["properties"].items()
        ]
    if fields:
        yield "<dl>"
        for name, meaning, is_required in fields:
            must = " <small>(required)</small>" if is_required else ""
            yield f"<dt>{escape(name)}{must}</dt><dd>{escape(meaning)}</dd>"
        yield "</dl>"


def role_of(routers: Iterable[APIRouter], method: str, path: str) -> Role:
    """Return the least role required by a path."""
    for route in (route for router in routers for route in router.routes):
        if isinstance(route, APIRoute) and route.path == path and method in (route.methods or ()):
            for dependency in route.dependant.dependencies:
                role = getattr(dependency.call, "role", None)
                if isinstance(role, Role):
                    return role
    raise LookupError(f"{method} {path} requires no role")
