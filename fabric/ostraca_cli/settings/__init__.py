"""Settings of daemons from a file, the environment and the command line.

Settings are grouped, frozen dataclasses; each field has a default, a docstring and a unit in its name
(``fields``). A name shows the groups, as in ``owner.hold_s``. Later sources win: defaults, then a TOML file,
then the environment (``OSTRACA_AGENT_OWNER_HOLD_S``), then ``--set owner.hold_s=20``. ``load`` reports all
errors of all sources together; ``as_toml`` writes settings as a file for ``load``.
"""

from ostraca_cli.settings.load import SETTINGS_OPTIONS, Loaded, SettingsError, Sources, load, sources_of
from ostraca_cli.settings.values import as_toml

__all__ = ["SETTINGS_OPTIONS", "Loaded", "SettingsError", "Sources", "as_toml", "load", "sources_of"]
