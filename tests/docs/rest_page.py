"""The table of docs/reference/admin-rest.md, made from the service's own OpenAPI.

``python -m tests.docs.rest_page`` writes it into the page anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ostraca_fabric.admin.api.app import ROUTERS, made_app
from ostraca_fabric.admin.api.context import Context
from ostraca_fabric.admin.api.roles import role_of

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "admin-rest.md"
BEGIN = "<!-- From here on made by `python -m tests.docs.rest_page`. -->\n"


def tables() -> str:
    """Return every path, by tag."""
    app = made_app(cast("Context", None), version="0")
    rows: dict[str, list[str]] = {}
    for path, methods in app.openapi()["paths"].items():
        for method, said in methods.items():
            first = said["description"].partition("\n\n")[0].replace("\n", " ")
            role = role_of(ROUTERS, method.upper(), path).value
            row = f"| `{method.upper()} {path}` | {role} | {first} |"
            rows.setdefault(said["tags"][0], []).append(row)
    head = "| path | role | what it does |\n|---|---|---|\n"
    return "".join(f"\n## {tag}\n\n{head}{chr(10).join(listed)}\n" for tag, listed in rows.items())


def page() -> str:
    """Return the page as it should be."""
    return f"{PAGE.read_text().partition(BEGIN)[0]}{BEGIN}{tables()}"


if __name__ == "__main__":
    PAGE.write_text(page())
