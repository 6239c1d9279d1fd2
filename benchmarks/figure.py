"""A figure: what was measured, its limit beside it, and what is asked of it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ostraca.cli.bench.report import spread
from ostraca.cli.bench.series import Finding, Series


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked: a ratio of at least or at most so much, or at most a value. Exactly one of these."""

    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    value_at_most: float | None = None

    def text(self, unit: str) -> str:
        """Write it for people."""
        if self.ratio_at_least is not None:
            return f"≥ {self.ratio_at_least:.2f}"
        if self.ratio_at_most is not None:
            return f"≤ {self.ratio_at_most:g} ×"
        return f"≤ {self.value_at_most:g} {unit}"


@dataclass(frozen=True, slots=True)
class Figure:
    """One row of the result."""

    row: str
    """The target's name, such as D1c."""

    what: str
    unit: str
    finding: Finding
    target: Target
    quantile: float = 0.5

    @property
    def value(self) -> float:
        """The figure itself."""
        return _value(self.finding.measured, self.quantile)

    @property
    def limit(self) -> float:
        """What it is beside."""
        return self.finding.limit.median

    @property
    def is_met(self) -> bool:
        """Whether the figure is what is asked for."""
        if self.target.ratio_at_least is not None:
            return self.finding.ratio >= self.target.ratio_at_least
        if self.target.ratio_at_most is not None:
            return self.finding.ratio <= self.target.ratio_at_most
        assert self.target.value_at_most is not None
        return self.value <= self.target.value_at_most

    def summary(self) -> dict[str, Any]:
        """Return what is kept of it."""
        return {
            "row": self.row,
            "what": self.what,
            "unit": self.unit,
            "value": round(self.value, 5),
            "spread": _rounded(spread(self.finding.measured)),
            "limit_name": self.finding.limit_name,
            "limit": round(self.limit, 5),
            "limit_spread": _rounded(spread(self.finding.limit)),
            "ratio": round(self.finding.ratio, 3) if math.isfinite(self.finding.ratio) else None,
            "target": self.target.text(self.unit),
            "is_met": self.is_met,
            "rounds": len(self.finding.measured.values),
        }

    def everything(self) -> dict[str, Any]:
        """Return it with every value measured."""
        values = {"values": self.finding.measured.values, "limit_values": self.finding.limit.values}
        return self.summary() | values


def _value(series: Series, quantile: float) -> float:
    return series.median if quantile == 0.5 else series.quantile(quantile)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}
