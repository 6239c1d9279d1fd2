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
from typing import TYPE_CHECKING

from ostraca_cli.settings.fields import Unit, group_of, value_of
from ostraca_cli.terminal.units import parse_size
from ostraca_fabric.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ostraca_cli.settings.fields import Group, Setting

Value = int | float | bool | str | tuple[str, ...]

_SECONDS = {"": 1.0, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = re.compile(r"([0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)")
_NUMBER_ALONE = re.compile(r"[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
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
        value = _of_text(setting, raw) if isinstance(raw, str) else _of_toml(setting, raw)
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


def _of_text(setting: Setting, text: str) -> Value | None:
    if setting.type is str:
        return text
    if setting.type is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if setting.type is bool:
        return _BOOLS.get(text.strip().lower())
    if setting.unit in (Unit.BYTES, Unit.BYTES_PER_SECOND) and not _NUMBER_ALONE.fullmatch(text.strip()):
        return _check_number(setting, parse_size(text))
    return _number(setting, text.strip())


def _number(setting: Setting, text: str) -> int | float | None:
    found = _NUMBER.fullmatch(text)
    units = _SECONDS if setting.unit is Unit.SECONDS else {"": 1.0}
    if found is None or found[2].lower() not in units:
        return None
    if setting.type is int and not found[2]:
        return int(found[1])
    return _check_number(setting, float(found[1]) * units[found[2].lower()])


def _of_toml(setting: Setting, raw: object) -> Value | None:
    if setting.type is tuple:
        is_texts = isinstance(raw, list) and all(isinstance(each, str) for each in raw)
        return tuple(raw) if is_texts and isinstance(raw, list) else None
    if isinstance(raw, bool):
        return raw if setting.type is bool else None
    if setting.type in (int, float) and isinstance(raw, int | float):
        return _check_number(setting, raw)
    return None


def _check_number(setting: Setting, number: float) -> int | float | None:
    if not (math.isfinite(number) and number >= 0):
        return None
    if setting.type is float:
        return float(number)
    return int(number) if number == int(number) else None


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
