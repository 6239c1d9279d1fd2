"""Controller of an enclosure: observe, plan and apply, in turns.

A turn looks for drives, selects the drives to export, and applies the necessary steps one at a time. A failed
step is reported, and tried again in the next turn, after a new observation. If the drives can't be observed,
a turn withdraws no drive: exports stay. Each turn reports a sentence.

Drives once exported are recorded (``export_history``). After a reboot, such a drive is exported again, even
if aged meanwhile, or with data of unclear origin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ostraca_enclosure.drives import DriveChoice, SelectionSettings, choose_drives, missing_names
from ostraca_enclosure.plan import (
    GUARDS,
    NOTHING,
    Export,
    HostSecrets,
    PresentExports,
    Step,
    WantedExports,
    plan,
)
from ostraca_enclosure.ports import Exporter, ExportError, Inventory, InventoryError
from ostraca_enclosure.state_files import ExportHistory
from ostraca_fabric.model.ids import EnclosureId, StartId
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.model.target import Controller
from ostraca_fabric.runtime.os_errors import explained

_LISTED_MAX = 3
"""Most entries of each kind in a sentence; the report has all."""


@dataclass(frozen=True, slots=True)
class EnclosureIdentity:
    """Identity and addresses of the enclosure."""

    id: EnclosureId
    start: StartId
    nqn: str
    controllers: tuple[Controller, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of a turn."""

    report: EnclosureReport
    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    """Failures as clauses: steps, or the observation itself."""

    not_found: tuple[str, ...] = ()
    """Named drives not present."""

    is_known: bool = False
    """Whether the present exports are known."""

    is_as_wanted: bool = False
    """Whether exports and admitted hosts are as wanted."""


class ExportController:
    """Controller of an enclosure's exports. Not thread-safe, except for ``use_hosts``."""

    def __init__(
        self,
        identity: EnclosureIdentity,
        selection: SelectionSettings,
        inventory: Inventory,
        exporter: Exporter,
        history: ExportHistory,
        wall: Callable[[], float],
    ) -> None:
        """Store the dependencies; *wall* is the time of day in seconds, for people."""
        self._identity = identity
        self._selection = selection
        self._inventory = inventory
        self._exporter = exporter
        self._history = history
        self._wall = wall
        self._hosts: Mapping[str, HostSecrets] = {}
        self._choices: tuple[DriveChoice, ...] = ()

    def use_hosts(self, hosts: Mapping[str, HostSecrets]) -> None:
        """Admit these hosts from the next turn on; empty means every host.

        May be called in any thread.
        """
        self._hosts = dict(hosts)

    def turn(self) -> Turn:
        """Run a turn. Blocks; never raises for faults of the machine."""
        hosts = self._hosts
        failed: list[str] = []
        try:
            found = self._inventory.look()
        except InventoryError as error:
            failed.append(f"drives can't be observed: {error}")
            found = None
        present = self._observe(hosts, failed)
        if present is None:
            return self._result(hosts, None, (), failed, found or ())
        if found is not None:
            self._choices = choose_drives(
                found,
                self._selection,
                self._history.nguids | {each.nguid for each in present.exports},
                {each.nguid: each.device for each in present.exports},
            )
        wanted = self._wanted_exports(hosts, present, is_seen=found is not None)
        try:
            self._update_history(wanted, is_seen=found is not None)
        except OSError as error:  # no new exports: an unrecorded drive might not return after a reboot
            failed.append(f"the export history can't be written: {explained(error)}")
            wanted = replace(wanted, drives=present.exports & wanted.drives)
        done = self._apply(plan(wanted, present), failed)
        after = self._observe(hosts, failed)
        is_as_wanted = after is not None and not plan(wanted, after)
        return self._result(hosts, after, done, failed, found or (), is_as_wanted=is_as_wanted)

    def withdraw(self) -> tuple[str, ...]:
        """Withdraw all exports; return the failures. Blocks."""
        failed: list[str] = []
        present = self._observe({}, failed)
        if present is not None:
            self._apply(plan(NOTHING, present), failed)
        return tuple(failed)

    def _observe(self, hosts: Mapping[str, HostSecrets], failed: list[str]) -> PresentExports | None:
        try:
            return self._exporter.observe(hosts)
        except ExportError as error:
            failed.append(f"exports can't be observed: {error}")
            return None

    def _wanted_exports(
        self, hosts: Mapping[str, HostSecrets], present: PresentExports, *, is_seen: bool
    ) -> WantedExports:
        drives = (
            frozenset(Export(each.drive.nguid, each.drive.device) for each in self._choices if each.is_wanted)
            if is_seen
            else present.exports
        )
        return WantedExports(self._identity.controllers, drives, hosts)

    def _update_history(self, wanted: WantedExports, *, is_seen: bool) -> None:
        """Record wanted drives before the export, and forget drives no longer wanted."""
        if is_seen:
            nguids = {each.nguid for each in wanted.drives}
            others = {each.drive.nguid for each in self._choices if not each.is_wanted}
            self._history.keep((self._history.nguids | nguids) - (others - nguids))

    def _apply(self, steps: list[Step], failed: list[str]) -> tuple[str, ...]:
        done = []
        for number, step in enumerate(steps):
            try:
                self._exporter.apply(step)
            except ExportError as error:
                failed.append(f"can't {step}: {error}")
                if isinstance(step, GUARDS):
                    rest = len(steps) - number - 1
                    if rest:
                        failed.append(f"{rest} further steps skipped")
                    break
            else:
                done.append(str(step))
        return tuple(done)

    def _result(
        self,
        hosts: Mapping[str, HostSecrets],
        present: PresentExports | None,
        done: tuple[str, ...],
        failed: list[str],
        found: tuple[object, ...],
        *,
        is_as_wanted: bool = False,
    ) -> Turn:
        exported = frozenset(each.nguid for each in present.exports) if present else frozenset[str]()
        drives = tuple(_drive_report(each, exported) for each in self._choices)
        not_found = self._selection.drives
        if found:
            not_found = missing_names([each.drive for each in self._choices], self._selection)
        sentence = _sentence(self._identity, drives, done, failed, not_found, len(hosts))
        report = EnclosureReport(
            self._identity.id,
            self._identity.start,
            self._identity.nqn,
            self._identity.controllers,
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
            is_known=present is not None,
            is_as_wanted=is_as_wanted and not failed,
        )


def _drive_report(choice: DriveChoice, exported: frozenset[str]) -> DriveReport:
    drive = choice.drive
    is_exported = drive.nguid in exported
    why_not = choice.why_not or "the export failed: see the sentence of the last turn"
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
    identity: EnclosureIdentity,
    drives: tuple[DriveReport, ...],
    done: tuple[str, ...],
    failed: list[str],
    not_found: tuple[str, ...],
    hosts: int,
) -> str:
    exported = sum(each.is_exported for each in drives)
    to = f"{hosts} host{'s' * (hosts != 1)}" if hosts else "every host"
    where = ", ".join(map(str, identity.controllers))
    parts = [f"{exported} of {len(drives)} drives exported to {to} at {where}"]
    parts += _clause("not exported", [f"{each.name}: {each.why_not}" for each in drives if each.why_not])
    parts += _clause("named, not found", list(not_found))
    parts += _clause("done", list(done))
    parts += _clause("failed", failed)
    return "; ".join(parts)


def _clause(label: str, entries: list[str]) -> list[str]:
    if not entries:
        return []
    more = f", and {len(entries) - _LISTED_MAX} more" if len(entries) > _LISTED_MAX else ""
    return [f"{label}: {'; '.join(entries[:_LISTED_MAX])}{more}"]
