"""Results of scenarios as a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def markdown_table(scenarios: Iterable[str], results: Mapping[str, Mapping[str, str]]) -> str:
    """Return a Markdown table: a row for each scenario, a column for each connector.

    *results* holds a cell by connector and scenario; a missing cell stays empty.
    """
    rows: list[Sequence[str]] = [("scenario", *results), ("---",) * (len(results) + 1)]
    rows += [(scenario, *(cells.get(scenario, "") for cells in results.values())) for scenario in scenarios]
    return "\n".join("|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in rows)
