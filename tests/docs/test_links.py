"""Links between pages lead to files and headings that exist, and files and modules named in pages exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
    ]
)
_FENCED = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    """Return a page without code blocks."""
    return _FENCED.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    """Return the links of a page without a file or a heading behind them."""
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert broken_links(page) == []


def test_a_link_to_a_missing_file_or_heading_is_broken(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `heading`, here\n\n[1](#a-heading-here) [2](#else) [3](none.md) [4](page.md) [5](https://a.b)\n"
    )
    assert broken_links(page) == ["#else", "none.md"]


_ROOTS = {
    "ostraca_admin": "fabric",
    "ostraca_cli": "fabric",
    "ostraca_fabric": "fabric",
    "ostraca_dpu_agent": "dpu_agent",
    "ostraca_enclosure": "enclosure",
    "benchmarks": "",
    "tests": "",
}
_FOLDERS = "benchmarks|dpu_agent|enclosure|fabric|scripts|sdk|tests"


def unknown_names(page: Path) -> list[str]:
    """Return the paths and modules that a page names, and that do not exist."""
    text = page.read_text()
    paths = re.findall(rf"`((?:{_FOLDERS})/[\w/.-]+)`", text)
    modules = re.findall(rf"(?:`|-m )((?:{'|'.join(_ROOTS)})(?:\.\w+)+)", text)
    return [
        *(path for path in paths if not (REPOSITORY / path).exists()),
        *(module for module in modules if not _is_module(module)),
    ]


def _is_module(name: str) -> bool:
    path = REPOSITORY / _ROOTS[name.split(".", maxsplit=1)[0]] / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").exists()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_file_and_module_that_a_page_names_exists(page: Path) -> None:
    assert unknown_names(page) == []


def test_a_missing_file_or_module_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`tests/docs`, `tests/none.py`, `ostraca_fabric.wire`, `python -m benchmarks.none --all`\n"
    )
    assert unknown_names(page) == ["tests/none.py", "benchmarks.none"]
