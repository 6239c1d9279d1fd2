"""The enclosure's steward: observe, plan, apply, in turns, with one sentence for each.

A turn looks for drives, decides which are exported, and does what has to be done for that, one step at a
time. A step that failed is told, and tried again in the next turn, which observes again. A turn that can't
see its drives takes none back: what is exported stays.

Which drives were exported once is remembered (``taken``), so that a drive that has aged meanwhile, or one
with data on it that look like somebody's, comes back after a reboot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ostraca_enclosure.choice import Asked, Choice, choose, missing
from ostraca_enclosure.plan import (
    GUARDS,
    NOTHING,
    Export,
    Have,
    HostSecrets,
    Step,
    Want,
    plan,
)
from ostraca_enclosure.ports import Exporter, ExportError, Inventory, InventoryError
from ostraca_enclosure.taken import Taken
from ostraca_fabric.ids import EnclosureId, StartId
from ostraca_fabric.inventory import DriveReport, EnclosureReport
from ostraca_fabric.target import Controller

log = logging.getLogger(__name__)

_TOLD_MAX = 3
"""So many of a kind are named in a sentence; the report names all."""


@dataclass(frozen=True, slots=True)
class Place:
    """Which enclosure this is, and where it is reached."""

    id: EnclosureId
    start: StartId
    nqn: str
    controllers: tuple[Controller, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one turn."""

    report: EnclosureReport
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """What did not work, in clauses: steps, or the look itself."""

    not_found: tuple[str, ...] = ()
    """Drives that were named, and are not there."""

    is_known: bool = False
    """Whether it is known what is exported."""

    is_as_wanted: bool = False
    """Whether all is exported that is wanted, to whom it is meant for."""


class Steward:
    """Keeps one enclosure's exports as they should be. Not for several threads at once."""

    def __init__(
        self,
        place: Place,
        asked: Asked,
        inventory: Inventory,
        exporter: Exporter,
        taken: Taken,
        wall: Callable[[], float],
    ) -> None:
        """*wall* is the time of day, in seconds, for people."""
        self._place = place
        self._asked = asked
        self._inventory = inventory
        self._exporter = exporter
        self._taken = taken
        self._wall = wall
        self._hosts: Mapping[str, HostSecrets] = {}
        self._found: tuple[Choice, ...] = ()

    def use_hosts(self, hosts: Mapping[str, HostSecrets]) -> None:
        """Let in these hosts from the next turn on; none: every host. May be called in any thread."""
        self._hosts = dict(hosts)

    def turn(self) -> Turn:
        """Take one turn. Blocks; never raises for what a machine may do wrong."""
        hosts = self._hosts
        failed: list[str] = []
        try:
            found = self._inventory.look()
        except InventoryError as error:
            failed.append(f"its drives can't be looked for: {error}")
            found = None
        try:
            have = self._exporter.observe(hosts)
        except ExportError as error:
            failed.append(f"what is exported can't be told: {error}")
            return self._ended(hosts, None, (), failed, found or ())
        if found is not None:
            self._found = choose(
                found,
                self._asked,
                self._taken.nguids | _whole(have),
                {each.nguid: each.device for each in have.offered if each.is_whole},
            )
        want = self._want(hosts, have, is_seen=found is not None)
        try:
            self._remember(want, is_seen=found is not None)
        except OSError as error:  # what is exported must come back after a reboot, so nothing new is
            failed.append(f"which drives were exported can't be remembered: {error}")
            want = replace(want, drives=frozenset(_exports_of(have)) & want.drives)
        done = self._apply(plan(want, have), failed)
        try:
            after = self._exporter.observe(hosts)
        except ExportError as error:
            failed.append(f"what is exported can't be told: {error}")
            return self._ended(hosts, None, done, failed, found or ())
        return self._ended(hosts, after, done, failed, found or (), is_as_wanted=not plan(want, after))

    def withdraw(self) -> tuple[str, ...]:
        """Export nothing any more; return what did not work. Blocks."""
        failed: list[str] = []
        try:
            self._apply(plan(NOTHING, self._exporter.observe({})), failed)
        except ExportError as error:
            failed.append(f"what is exported can't be told: {error}")
        return tuple(failed)

    def _want(self, hosts: Mapping[str, HostSecrets], have: Have, *, is_seen: bool) -> Want:
        drives = (
            (Export(each.drive.nguid, each.drive.device) for each in self._found if each.is_wanted)
            if is_seen
            else _exports_of(have)
        )
        return Want(self._place.controllers, frozenset(drives), hosts)

    def _remember(self, want: Want, *, is_seen: bool) -> None:
        """Remember those that are wanted before they are offered, and forget those that are no more."""
        if is_seen:
            wanted = {each.nguid for each in want.drives}
            others = {each.drive.nguid for each in self._found if not each.is_wanted}
            self._taken.keep((self._taken.nguids | wanted) - (others - wanted))

    def _apply(self, steps: list[Step], failed: list[str]) -> tuple[str, ...]:
        done = []
        for number, step in enumerate(steps):
            try:
                self._exporter.apply(step)
            except ExportError as error:
                failed.append(f"could not {step}: {error}")
                if isinstance(step, GUARDS):
                    rest = len(steps) - number - 1
                    if rest:
                        failed.append(f"{rest} further steps wait for that")
                    break
            else:
                done.append(str(step))
        return tuple(done)

    def _ended(
        self,
        hosts: Mapping[str, HostSecrets],
        have: Have | None,
        done: tuple[str, ...],
        failed: list[str],
        found: tuple[object, ...],
        *,
        is_as_wanted: bool = False,
    ) -> Turn:
        exported = _whole(have) if have is not None else frozenset()
        drives = tuple(_drive_report(each, exported) for each in self._found)
        not_found = (
            missing([each.drive for each in self._found], self._asked) if found else self._asked.drives
        )
        sentence = _sentence(self._place, drives, done, failed, not_found, len(hosts))
        report = EnclosureReport(
            self._place.id,
            self._place.start,
            self._place.nqn,
            self._place.controllers,
            drives,
            tuple(sorted(hosts)),
            sentence,
            self._wall(),
        )
        return Turn(
            report,
            done,
            tuple(failed),
            not_found,
            is_known=have is not None,
            is_as_wanted=is_as_wanted and not failed,
        )


def _whole(have: Have) -> frozenset[str]:
    return frozenset(each.nguid for each in have.offered if each.is_whole)


def _exports_of(have: Have) -> tuple[Export, ...]:
    return tuple(Export(each.nguid, each.device) for each in have.offered if each.is_whole)


def _drive_report(choice: Choice, exported: frozenset[str]) -> DriveReport:
    drive = choice.drive
    is_exported = drive.nguid in exported
    why_not = choice.why_not
    if not is_exported and not why_not:
        why_not = "it could not be offered: the last turn's sentence says why"
    return DriveReport(
        name=drive.name,
        nguid=drive.nguid,
        size_bytes=drive.size_bytes,
        lba_bytes=drive.lba_bytes,
        model=drive.model,
        serial=drive.serial,
        firmware=drive.firmware,
        is_exported=is_exported,
        why_not="" if is_exported else why_not,
        doubts=choice.doubts,
        wear=drive.wear,
    )


def _sentence(
    place: Place,
    drives: tuple[DriveReport, ...],
    done: tuple[str, ...],
    failed: list[str],
    not_found: tuple[str, ...],
    hosts: int,
) -> str:
    exported = sum(each.is_exported for each in drives)
    to = f"{hosts} host{'s' * (hosts != 1)}" if hosts else "every host"
    where = ", ".join(map(str, place.controllers))
    said = [f"{exported} of {len(drives)} drives exported to {to} at {where}"]
    said += _some("not exported", [f"{each.name}: {each.why_not}" for each in drives if each.why_not])
    said += _some("not found, though named", list(not_found))
    said += _some("did", list(done))
    said += _some("failed", failed)
    return "; ".join(said)


def _some(what: str, told: list[str]) -> list[str]:
    if not told:
        return []
    more = f", and {len(told) - _TOLD_MAX} more" if len(told) > _TOLD_MAX else ""
    return [f"{what}: {'; '.join(told[:_TOLD_MAX])}{more}"]
