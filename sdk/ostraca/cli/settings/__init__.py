"""Settings from a file, the environment and the command line, for every daemon.

Settings are frozen dataclasses, grouped, and each field has a default, a unit in its name and a docstring
(``fields``). They are named as they nest, ``owner.hold_s``. What is given later wins: first the defaults,
then a TOML file, then the environment (``OSTRACA_AGENT_OWNER_HOLD_S``), then ``--set owner.hold_s=20``.
Whatever is wrong in any of them is told at once (``load``), and the outcome can be written as a file that
can be read back (``text``).
"""

from ostraca.cli.settings.load import Loaded, SettingsError, Sources, load
from ostraca.cli.settings.options import add_settings_options, sources_of
from ostraca.cli.settings.text import as_toml

__all__ = ["Loaded", "SettingsError", "Sources", "add_settings_options", "as_toml", "load", "sources_of"]
