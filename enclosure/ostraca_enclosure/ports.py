"""What an enclosure's steward needs of its machine: drives to find, and something that exports them.

An adapter says what is there and does one step at a time; it decides nothing. Every method may block for
seconds, so none is called on an event loop. What was exported outlives the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ostraca_enclosure.drives import FoundDrive
from ostraca_enclosure.plan import Have, HostSecrets, Step
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.inventory import EnclosureReport


class InventoryError(OstracaError):
    """The drives can't be looked for; the message says why and what to do."""


class ExportError(OstracaError):
    """A step was not done, or what is exported can't be told; the message says why and what to do."""


class Inventory(Protocol):
    """The drives of one machine."""

    def look(self) -> tuple[FoundDrive, ...]:
        """Return every drive there is, also those that can't be exported. Raises InventoryError."""


class Exporter(Protocol):
    """What hosts connect to."""

    def observe(self, hosts: Mapping[str, HostSecrets]) -> Have:
        """Return what is exported under this enclosure's NQN. Of *hosts*, by NQN, it is told whether they
        are let in with these secrets. Raises ExportError.
        """

    def apply(self, step: Step) -> None:
        """Do one step; one that was done already is no error. Raises ExportError, and may then have been done
        in part: ``observe`` shows that, and ``plan`` mends it.
        """


class Reports(Protocol):
    """Where an enclosure's report is put for others to read."""

    async def put(self, report: EnclosureReport) -> None:
        """Put the report in place of the one before. Raises MembershipError."""
