"""Options, settings and exit shared by the daemons of ``ostraca serve``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

from ostraca_cli.command import AddOption, action, option
from ostraca_cli.composition.etcd_options import ETCD_OPTIONS, etcd_options
from ostraca_cli.settings import SETTINGS_OPTIONS, as_toml, load, sources_of
from ostraca_cli.terminal.logs import add_log_options, flush_log

_Settings = TypeVar("_Settings")


@dataclass(frozen=True, slots=True)
class DaemonOption:
    """Command-line option for a setting of a daemon."""

    flag: str
    name: str
    """Name of the setting."""

    metavar: str
    """Name of the value in help texts; empty for a switch without a value."""

    help: str
    is_list: bool = False

    @property
    def option(self) -> AddOption:
        """Return the option for a parser."""
        settings: dict[str, Any] = {"metavar": self.metavar}
        if not self.metavar:
            settings = {"action": "store_const", "const": "true", "default": ""}
        elif self.is_list:
            settings |= {"action": "append", "default": []}
        return option(self.flag, dest=self.name, help=self.help, **settings)


def daemon_action(
    name: str,
    run: Callable[[argparse.Namespace], int],
    options: Sequence[DaemonOption],
    **texts: str,
) -> AddOption:
    """Describe a daemon of ``ostraca serve``, with the options common to all daemons."""
    own = (each.option for each in options)
    return action(name, run, *own, *ETCD_OPTIONS, *SETTINGS_OPTIONS, add_log_options, **texts)


def load_settings(
    options: argparse.Namespace,
    known: Sequence[DaemonOption],
    kind: type[_Settings],
    *,
    prefix: str,
    ignored: Collection[str] = (),
) -> _Settings | None:
    """Return the settings of a daemon, or None after printing them for ``--print-settings``.

    *ignored* are environment variables under *prefix* that are no settings. Raises SettingsError.
    """
    also = [(each.flag, each.name, value) for each in known if (value := getattr(options, each.name))]
    also += [(flag, f"etcd.{name}", value) for flag, name, value in etcd_options(options)]
    environment = {name: value for name, value in os.environ.items() if name not in ignored}
    loaded = load(kind, replace(sources_of(options, also), environment=environment), prefix=prefix)
    if not options.print_settings:
        return loaded.settings
    print(as_toml(loaded.settings, loaded.origins), end="")
    return None


def exit_process(code: int) -> NoReturn:
    """End the process without the interpreter's shutdown.

    The shutdown would close the loop and unmap memory in use by threads of grpc and NIXL. All state that
    others depend on must be closed.
    """
    flush_log()
    sys.stdout.flush()
    os._exit(code)
