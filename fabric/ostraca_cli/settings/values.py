"""Value of a setting as text, parsed and written. Pure.

Times are seconds, or a number with a unit (``200ms``, ``5min``, ``6h``). Sizes are bytes, or a number with a
unit (``64MiB``). Rates are sizes per second. Negative values are invalid. ``as_toml`` writes all settings as
an annotated file.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections.abc import Iterator, Mapping

from ostraca_cli.settings.fields import Group, Setting, Unit, group_of, value_of
from ostraca_cli.terminal.units import parse_size
from ostraca_fabric.errors import UsageError

Value = int | float | bool | str | tuple[str, ...]

_SECONDS = {"": 1, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "d": 86_400}
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")
_BOOLS = {"true": True, "false": False}
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

_HOW = {
    Unit.SECONDS: "write seconds, or a number with a unit, as in 0.5, 200ms or 6h",
    Unit.BYTES: "write bytes, or a number with a unit, as in 64MiB",
    Unit.BYTES_PER_SECOND: "write bytes a second, or a number with a unit, as in 20MB",
    Unit.SHARE: "write a part of 1, as in 0.25",
}
_HOW_TYPE = {
    int: "write a whole number of 0 or more",
    float: "write a number of 0 or more",
    bool: "write true or false",
    str: "write a text",
    tuple: "write a list of texts",
}


def read_value(setting: Setting, raw: object) -> Value:
    """Parse *raw*, a text or a TOML value; raises UsageError with the correct form."""
    try:
        value = _parsed(setting, raw)
    except (ValueError, OverflowError):  # UsageError is a ValueError
        value = None
    if value is None:
        how = _HOW.get(setting.unit, _HOW_TYPE[setting.type])
        if setting.unit is Unit.SECONDS and setting.type is int:
            how = "write whole seconds"
        raise UsageError(f"the value {shown_value(raw)} is invalid: {how}")
    return value


def write_value(setting: Setting, value: Value) -> str:
    """Write a value as TOML, in units without loss."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, tuple):
        return f"[{', '.join(map(json.dumps, value))}]"
    if setting.unit is Unit.BYTES and value:
        for size, name in _SIZES:
            if value % size == 0:
                return f'"{int(value) // size}{name}"'
    return repr(value)


def shown_value(raw: object) -> str:
    """Return a value of the wrong type, shortened for a message."""
    text = repr(raw)
    return text if len(text) <= 64 else f"{text[:60]}..."  # noqa: PLR2004 (a line of a message)


def _parsed(setting: Setting, raw: object) -> Value | None:
    """Return the value of a text or a TOML value, None if invalid; may raise ValueError."""
    if setting.type is str:
        return raw if isinstance(raw, str) else None
    if setting.type is tuple:
        listed = [part.strip() for part in raw.split(",") if part.strip()] if isinstance(raw, str) else raw
        is_texts = isinstance(listed, list) and all(isinstance(each, str) for each in listed)
        return tuple(listed) if is_texts and isinstance(listed, list) else None
    text = str(raw).strip().lower()
    if setting.type is bool:
        return _BOOLS.get(text)
    number, units = _NUMBER.fullmatch(text), _SECONDS if setting.unit is Unit.SECONDS else {"": 1}
    if setting.unit in (Unit.BYTES, Unit.BYTES_PER_SECOND) and not (number and not number[2]):
        value: float = parse_size(text)
    elif number is None or number[2] not in units:
        return None
    else:
        digits = number[1].replace("_", "")
        value = (int(digits) if digits.isdigit() else float(digits)) * units[number[2]]
    if setting.type is float and math.isfinite(value):
        return float(value)
    return int(value) if value == int(value) else None


_WIDTH = 100


def as_toml(settings: object, origins: Mapping[str, str]) -> str:
    """Write settings with their docstrings; ``load`` restores the same settings."""
    groups = group_of(type(settings)).all_groups()
    blocks = ["\n".join(_lines(group, settings, origins)) for group in groups]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _lines(group: Group, settings: object, origins: Mapping[str, str]) -> Iterator[str]:
    if group.name:
        yield f"[{group.name}]"
    yield from _comment(group.doc)
    for setting in group.settings:
        yield ""
        yield from _comment(setting.doc)
        written = write_value(setting, value_of(settings, setting.name))
        default = write_value(setting, setting.default)  # type: ignore[arg-type]  # of the setting's own type
        if setting.name in origins:
            yield f"# From {origins[setting.name]}; the default is {default}."
        elif written != default:
            yield f"# The default is {default}."
        yield f"{setting.name.rpartition('.')[2]} = {written}"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - 2, break_long_words=False, break_on_hyphens=False):
        yield f"# {line}"
