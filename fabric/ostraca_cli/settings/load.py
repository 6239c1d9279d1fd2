"""Settings from file, environment and options, with all errors reported together.

Pure, except for the file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, get_type_hints

from ostraca_cli.command import option
from ostraca_cli.settings.fields import Group, Setting, group_of
from ostraca_cli.settings.values import Value, read_value, shown_value
from ostraca_fabric.errors import UsageError
from ostraca_fabric.runtime.os_errors import explained

_T = TypeVar("_T")

AGENT_PREFIX = "OSTRACA_AGENT_"
"""Prefix of the environment variables of an agent's settings."""

FILE_BYTES_MAX = 1 << 20
"""Maximum size of a settings file; longer files are taken for other content."""


class SettingsError(UsageError):
    """Unusable settings: ``problems`` holds a line with a correction for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        """Write a single problem as the message itself, several in a line each."""
        if len(problems) == 1:
            super().__init__(problems[0])
        else:
            super().__init__("\n  ".join((f"{len(problems)} settings problems:", *problems)))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of settings; later fields win."""

    file: Path | None = None
    """TOML file, or None."""

    environment: Mapping[str, str] | None = None
    """Complete environment; only variables with the daemon's prefix count."""

    flags: Sequence[str] = ()
    """Texts of the form ``name=value``."""

    options: Sequence[tuple[str, str, str | list[str]]] = ()
    """Command options equivalent to settings: (option, name of the setting, value)."""


@dataclass(frozen=True, slots=True)
class Loaded(Generic[_T]):
    """Settings, and the source of each non-default setting."""

    settings: _T
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    origin: str
    name: str
    raw: object


def load(cls: type[_T], sources: Sources, *, prefix: str) -> Loaded[_T]:
    """Return an instance of the dataclass *cls*; raises SettingsError.

    *prefix* begins the names of environment variables, as in ``OSTRACA_AGENT_``. A variable with the prefix
    and without a matching setting is an error.
    """
    group = group_of(cls)
    problems: list[str] = []
    given = [
        *_of_file(group, sources.file, problems),
        *_of_environment(group, sources.environment or {}, prefix, problems),
        *_of_flags(group, sources.flags, problems),
        *(_Given(option, name, raw) for option, name, raw in sources.options),
    ]
    known = {setting.name: setting for setting in group.all_settings()}
    values: dict[str, Value] = {}
    origins: dict[str, str] = {}
    for each in given:
        try:
            values[each.name] = read_value(known[each.name], each.raw)
        except UsageError as error:
            problems.append(f"{each.origin}: {each.name}: {error}")
        origins[each.name] = each.origin
    settings = _built(cls, "", values, problems)
    if problems:
        raise SettingsError(problems)
    return Loaded(cast("_T", settings), origins)


def variable(prefix: str, setting: Setting) -> str:
    """Return the name of the environment variable for a setting."""
    return prefix + setting.name.upper().replace(".", "_")


def _of_file(group: Group, file: Path | None, problems: list[str]) -> Iterator[_Given]:
    if file is None:
        return
    try:
        with file.open("rb") as opened:
            content = opened.read(FILE_BYTES_MAX + 1)
        if len(content) > FILE_BYTES_MAX:
            problems.append(f"{file}: longer than {FILE_BYTES_MAX} bytes: not a settings file")
            return
        table = tomllib.loads(content.decode())
    except OSError as error:
        problems.append(f"the settings can't be read: {explained(error)}")
    except ValueError as error:  # bad TOML and bad UTF-8 both raise ValueError
        problems.append(f"{file}: not TOML: {error}")
    else:
        yield from _of_table(group, table, file, problems)


def _of_table(group: Group, table: dict[str, Any], file: Path, problems: list[str]) -> Iterator[_Given]:
    settings = {setting.name.rpartition(".")[2]: setting for setting in group.settings}
    groups = {inner.name.rpartition(".")[2]: inner for inner in group.groups}
    for key, raw in table.items():
        name = f"{group.name}.{key}" if group.name else key
        if key in settings:
            yield _Given(str(file), name, raw)
        elif key not in groups:
            names = [each.name for each in group.settings] + [each.name for each in group.groups]
            near = _nearest(name, names)
            problems.append(f"{file}: there is no setting {name}{near}")
        elif isinstance(raw, dict):
            yield from _of_table(groups[key], raw, file, problems)
        else:
            problems.append(f"{file}: {name} is a group of settings, and not {shown_value(raw)}")


def _of_environment(
    group: Group, environment: Mapping[str, str], prefix: str, problems: list[str]
) -> Iterator[_Given]:
    known = {variable(prefix, setting): setting for setting in group.all_settings()}
    for name, raw in environment.items():
        if name in known:
            yield _Given(name, known[name].name, raw)
        elif name.startswith(prefix):
            problems.append(f"the environment's {name} is no setting{_nearest(name, list(known))}")


def _of_flags(group: Group, flags: Sequence[str], problems: list[str]) -> Iterator[_Given]:
    known = [setting.name for setting in group.all_settings()]
    for flag in flags:
        name, separator, raw = flag.partition("=")
        name = name.strip()
        if not separator:
            problems.append(f"--set {flag}: write name=value, as in --set owner.hold_s=20")
        elif name in known:
            yield _Given("--set", name, raw)
        else:
            problems.append(f"--set {flag}: there is no setting {name}{_nearest(name, known)}")


def _nearest(name: str, known: list[str]) -> str:
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    if not found:  # the name exists in another group
        leaf = name.rpartition(".")[2]
        found = [each for each in known if each.rpartition(".")[2] == leaf][:1]
    return f"; the nearest is {found[0]}" if found else ""


def _built(cls: type, name: str, values: Mapping[str, Value], problems: list[str]) -> object | None:
    """Create a group, inner groups first; None if any of these groups is invalid."""
    arguments: dict[str, object] = {}
    hints = get_type_hints(cls)
    is_whole = True
    for field in fields(cls):
        full = f"{name}.{field.name}" if name else field.name
        if is_dataclass(hints[field.name]):
            inner = _built(hints[field.name], full, values, problems)
            is_whole = is_whole and inner is not None
            arguments[field.name] = inner
        elif full in values:
            arguments[field.name] = values[full]
    if not is_whole:
        return None
    try:
        made: object = cls(**arguments)
    except UsageError as error:
        problems.append(f"{name}: {error}" if name else str(error))
        return None
    return made


SETTINGS_OPTIONS = (
    option(
        "--settings",
        type=Path,
        metavar="FILE",
        help="read settings from this TOML file; environment and flags win over the file",
    ),
    option(
        "--set",
        action="append",
        default=[],
        dest="flags",
        metavar="NAME=VALUE",
        help="set a value, as in owner.hold_s=20 (may be repeated)",
    ),
    option(
        "--print-settings",
        action="store_true",
        help="print the effective settings with their descriptions, as a file, and exit",
    ),
)
"""Options for settings (for ``sources_of``) and ``print_settings``."""


def sources_of(options: argparse.Namespace, also: Sequence[tuple[str, str, str | list[str]]] = ()) -> Sources:
    """Return the settings from the command line, from options in *also*, and the environment."""
    return Sources(options.settings, os.environ, tuple(options.flags), tuple(also))
