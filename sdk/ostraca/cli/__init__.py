"""The ``ostraca`` command, and the one place that may put all components together."""

from ostraca.cli.program import main

__all__ = ["main"]
