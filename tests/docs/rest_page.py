"""The table of docs/reference/admin-rest.md, made from the service's own OpenAPI.

``python -m tests.docs.rest_page`` writes it into the page anew.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import cast

from ostraca_admin.api.app import ROUTERS, build_app
from ostraca_admin.api.context import Context
from ostraca_admin.api.description import role_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "admin-rest.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.rest_page`. -->\n"


def table() -> str:
    """Return every path, by tag."""
    app = build_app(cast("Context", None), version="0")
    rows: dict[str, list[str]] = {}
    for path, methods in app.openapi()["paths"].items():
        for method, said in methods.items():
            first = said["description"].partition("\n\n")[0].replace("\n", " ")
            role = role_of(ROUTERS, method.upper(), path).value
            row = f"| `{method.upper()} {path}` | {role} | {first} |\n"
            rows.setdefault(said["tags"][0], []).append(row)
    return "\n| path | role | action |\n|---|---|---|\n" + "".join(chain.from_iterable(rows.values()))


def page() -> str:
    """Return the page as it should be."""
    return f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}{table()}"


if __name__ == "__main__":
    PAGE.write_text(page())
