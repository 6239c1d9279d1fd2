"""The service's description for people: one page, without a script and without anything from elsewhere, since
many pods reach no other network.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from ostraca_fabric.admin.api.roles import role_of

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
    """Return the page, as HTML."""
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
        for method, said in methods.items():
            role = role_of(known, method.upper(), path).value
            parts.append(f"<h3><code>{method.upper()} {escape(path)}</code> <small>{role}</small></h3>")
            parts += [f"<p>{escape(each)}</p>" for each in said["description"].split("\n\n")]
            parts += _fields(openapi, said)
    return "".join(parts)


def _fields(openapi: dict[str, Any], said: dict[str, Any]) -> Iterator[str]:
    """Say what is sent: query, headers, and the fields of a body."""
    told = [
        (each["name"], each.get("description", ""), each["required"])
        for each in said.get("parameters", ())
        if each["in"] != "path"
    ]
    body = said.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
    if name := body.get("$ref", "").rpartition("/")[2]:
        form = openapi["components"]["schemas"][name]
        required = form.get("required", ())
        told += [
            (field, what.get("description", ""), field in required)
            for field, what in form["properties"].items()
        ]
    if told:
        yield "<dl>"
        for name, what, is_required in told:
            must = " <small>(required)</small>" if is_required else ""
            yield f"<dt>{escape(name)}{must}</dt><dd>{escape(what)}</dd>"
        yield "</dl>"
