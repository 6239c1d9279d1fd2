"""Figure: a measured quantity, its limit, and a target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ostraca_cli.tools.bench.series import Measurement, Series, spread

_MEDIAN = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a figure: exactly one of a minimum ratio, a maximum ratio and a maximum value."""

    ratio_at_least: float | None = None
    ratio_at_most: float | None = None
    value_at_most: float | None = None

    def text(self, unit: str) -> str:
        """Write the target for people."""
        if self.ratio_at_least is not None:
            return f"≥ {self.ratio_at_least:.2f}"
        if self.ratio_at_most is not None:
            return f"≤ {self.ratio_at_most:g} ×"
        return f"≤ {self.value_at_most:g} {unit}"


@dataclass(frozen=True, slots=True)
class Figure:
    """Row of the result."""

    row: str
    """Name of the target, such as D1c."""

    name: str
    unit: str
    finding: Measurement
    target: Target
    quantile: float = _MEDIAN

    @property
    def value(self) -> float:
        """Measured value."""
        return _value(self.finding.measured, self.quantile)

    @property
    def limit(self) -> float:
        """Median of the limit."""
        return self.finding.limit.median

    @property
    def ratio(self) -> float:
        """Value beside the limit: of both medians round by round, or of the quantile and the median limit."""
        if self.quantile == _MEDIAN:
            return self.finding.ratio
        return self.value / self.limit if self.limit else math.inf

    @property
    def is_met(self) -> bool:
        """Whether the figure meets the target."""
        if self.target.ratio_at_least is not None:
            return self.ratio >= self.target.ratio_at_least
        if self.target.ratio_at_most is not None:
            return self.ratio <= self.target.ratio_at_most
        assert self.target.value_at_most is not None
        return self.value <= self.target.value_at_most

    def summary(self) -> dict[str, Any]:
        """Return the figure without its single values."""
        return {
            "row": self.row,
            "name": self.name,
            "unit": self.unit,
            "value": round(self.value, 5),
            "spread": _rounded(spread(self.finding.measured)),
            "limit_name": self.finding.limit_name,
            "limit": round(self.limit, 5),
            "limit_spread": _rounded(spread(self.finding.limit)),
            "ratio": round(self.ratio, 3) if math.isfinite(self.ratio) else None,
            "target": self.target.text(self.unit),
            "is_met": self.is_met,
            "rounds": len(self.finding.measured.values),
        }

    def with_values(self) -> dict[str, Any]:
        """Return the figure with every measured value."""
        values = {"values": self.finding.measured.values, "limit_values": self.finding.limit.values}
        return self.summary() | values


def _value(series: Series, quantile: float) -> float:
    return series.median if quantile == _MEDIAN else series.quantile(quantile)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 5) for name, value in values.items()}
