"""Our own store with other settings than an owner's defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

from ostraca_dpu_agent.settings import OwnerSettings
from ostraca_fabric.errors import UsageError


@dataclass(frozen=True, slots=True)
class Variant:
    """Settings of an owner, and what to call them."""

    text: str = ""
    settings: OwnerSettings = field(default_factory=OwnerSettings)


def parse_variant(text: str) -> Variant:
    """Read ``free_segments=2,ghost_bytes=65536``: fields of ``OwnerSettings`` and of its ``endurance``.

    Raises UsageError that names them.
    """
    usual = OwnerSettings()
    known = _numbers(usual) | _numbers(usual.endurance)
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in known:
            raise UsageError(f"{name!r} is no setting of an owner: take any of {', '.join(sorted(known))}")
        try:
            given[name] = type(known[name])(value)
        except ValueError as error:
            raise UsageError(f"{name}={value!r}: write a number, as in {name}={known[name]}") from error
    of_endurance = {name: value for name, value in given.items() if hasattr(usual.endurance, name)}
    of_owner = {name: value for name, value in given.items() if name not in of_endurance}
    endurance = replace(usual.endurance, **of_endurance)
    return Variant(text, replace(usual, endurance=endurance, **of_owner))


def _numbers(settings: Any) -> dict[str, float]:  # noqa: ANN401 (any dataclass of settings)
    """Return the settings that are numbers, but for those that the replay itself decides."""
    found = {each.name: getattr(settings, each.name) for each in fields(settings)}
    return {
        name: value
        for name, value in found.items()
        if isinstance(value, (int, float)) and name not in _DECIDED
    }


_DECIDED = frozenset({"rated_dwpd", "rated_years", "budget_share", "burst_s"})
