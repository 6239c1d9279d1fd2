"""Interfaces of the controller to the machine: inventory, exporter and reports.

An adapter observes and applies single steps, without decisions of its own. Every method of ``Inventory`` and
``Exporter`` may block for seconds: never call such a method on an event loop. Exports outlive the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ostraca_enclosure.drives import FoundDrive
from ostraca_enclosure.plan import HostSecrets, PresentExports, Step
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.inventory import EnclosureReport


class InventoryError(OstracaError):
    """The drives can't be observed; the message has the reason and advice."""


class ExportError(OstracaError):
    """A step failed, or exports can't be observed; the message has reason and advice."""


class Inventory(Protocol):
    """Drives of a machine."""

    def look(self) -> tuple[FoundDrive, ...]:
        """Return all drives, exportable or not. Raises InventoryError."""


class Exporter(Protocol):
    """Target for the connections of hosts."""

    def observe(self, hosts: Mapping[str, HostSecrets]) -> PresentExports:
        """Return the exports under this enclosure's NQN.

        *hosts*, by NQN, are compared with the admitted hosts and secrets. Raises ExportError.
        """

    def apply(self, step: Step) -> None:
        """Apply a step; a completed step is no error.

        Raises ExportError, possibly after a part of the step: ``observe`` shows the state, and ``plan``
        repairs it.
        """


class Reports(Protocol):
    """Store of an enclosure's reports."""

    async def put(self, report: EnclosureReport) -> None:
        """Replace the previous report. Raises MembershipError."""
