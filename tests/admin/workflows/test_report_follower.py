"""Enclosures that are registered by their own reports."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.admin.cli.commands import Commands
from tests.admin.service import AdminService
from tests.admin.shelf import DRIVE_BYTES, Shelf
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_admin.audit import Audit, Requester, Retention
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.model import (
    VERSION,
    EnclosurePhase,
    EnclosureSpec,
    OperationKind,
    OperationState,
    Registration,
)
from ostraca_admin.report_follower import ReportFollower
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import ID_BYTES, EnclosureId, StartId
from ostraca_fabric.model.inventory import DriveReport, EnclosureReport
from ostraca_fabric.model.target import parse_controller
from ostraca_fabric.ports.records import Record, RecordChange

SHELF = EnclosureId("shelf-1")
ALICE = Requester("alice", "admin", "test")


@dataclass
class Following:
    """A follower beside a service, with the reports that the test gives."""

    service: AdminService
    unix_s: float = 0.0
    reports: list[EnclosureReport] = field(default_factory=list)
    notified: int = 0

    def __post_init__(self) -> None:
        ids = iter(range(1 << 20))
        audit = Audit(lambda: self.unix_s, lambda: f"f{next(ids):08x}")
        self.enclosures = EnclosureService(self.service.records, audit)
        self.follower = ReportFollower(self._all, self.enclosures, audit, notify=self._notify)

    async def _all(self) -> list[EnclosureReport]:
        return self.reports

    def _notify(self) -> None:
        self.notified += 1

    def turn(self) -> Registration:
        """Follow once, and wait for the end of the onboarding."""
        self.service.do(self.follower.turn())
        known = self.known
        assert known is not None
        if known.operation.state is OperationState.RUNNING:
            self.service.ended(known.operation.id)
        done = self.known
        assert done is not None
        return done

    @property
    def known(self) -> Registration | None:
        return self.service.do(self.enclosures.find(SHELF))


@pytest.fixture
def following(service: AdminService) -> Following:
    return Following(service)


def report_of(shelf: Shelf, *, is_exported: bool = True) -> EnclosureReport:
    drives = tuple(
        DriveReport(path.name, nguid, DRIVE_BYTES, 4096, is_exported=is_exported)
        for nguid, path in shelf.drives.items()
    )
    controllers = (parse_controller(shelf.controller),)
    return EnclosureReport(EnclosureId(shelf.name), StartId(bytes(ID_BYTES)), shelf.nqn, controllers, drives)


def test_an_enclosure_that_reports_is_registered_and_onboarded_once(following: Following) -> None:
    shelf = following.service.shelf("shelf-1", drives=2)
    following.reports = [report_of(shelf)]
    done = following.turn()
    assert (done.status.phase, len(done.status.drives)) == (EnclosurePhase.READY, 2)
    assert following.turn() == done
    assert following.notified == 1


def test_an_enclosure_that_exports_nothing_yet_waits(following: Following) -> None:
    following.reports = [report_of(following.service.shelf("shelf-1", drives=1), is_exported=False)]
    following.service.do(following.follower.turn())
    assert following.known is None


def test_new_addresses_replace_those_of_the_registration(following: Following, tmp_path: Path) -> None:
    shelf = following.service.shelf("shelf-1", drives=1)
    following.reports = [report_of(shelf)]
    following.turn()
    moved = tmp_path / "moved"
    shelf.directory.rename(moved)
    moved_to = parse_controller(f"files://{moved}")
    shelf.directory = moved
    shelf.drives = {nguid: moved / path.name for nguid, path in shelf.drives.items()}
    shelf.export()
    following.reports = [replace(report_of(shelf), controllers=(moved_to,))]
    done = following.turn()
    assert done.spec.controllers == (str(moved_to),)
    assert (done.operation.state, done.status.phase) == (OperationState.DONE, EnclosurePhase.READY)


def test_a_failed_onboarding_begins_anew_after_a_pause(following: Following) -> None:
    shelf = following.service.shelf("shelf-1", drives=1)
    following.reports = [report_of(shelf)]
    shelf.leave()
    failed = following.turn()
    assert failed.operation.state is OperationState.FAILED
    following.unix_s = failed.operation.ended_unix_s + 5.0
    assert following.turn().operation.id == failed.operation.id
    shelf.export()
    following.unix_s = failed.operation.ended_unix_s + 30.0
    assert following.turn().status.phase is EnclosurePhase.READY


def test_a_registration_of_another_subsystem_stays_and_the_refusal_is_logged_once(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    shelf = following.service.shelf("shelf-1", drives=1)
    following.reports = [report_of(shelf)]
    registered = following.turn()
    moved = (parse_controller("files:///elsewhere"),)
    following.reports = [replace(report_of(shelf), nqn="nqn.2025-01.io.ostraca:other", controllers=moved)]
    with caplog.at_level("WARNING"):
        assert [following.turn() for _ in range(2)] == [registered] * 2
    (refusal,) = (each.getMessage() for each in caplog.records if "is not followed" in each.getMessage())
    assert refusal.endswith(f"names subsystem nqn.2025-01.io.ostraca:other, and the registration {shelf.nqn}")


def test_a_retired_enclosure_that_still_reports_stays_out_until_an_operator_adds_it(
    following: Following, caplog: pytest.LogCaptureFixture
) -> None:
    service = following.service
    shelf = service.shelf("shelf-1", drives=1)
    following.reports = [report_of(shelf)]
    following.turn()
    retire = service.ask("POST", "/v1/enclosures/shelf-1:retire", {"force": True})
    assert service.ended(retire.body["id"]).state is OperationState.DONE
    with caplog.at_level("WARNING"):
        for _ in range(3):
            service.do(following.follower.turn())
    assert following.known is None
    (refusal,) = (each.getMessage() for each in caplog.records if "is not followed" in each.getMessage())
    assert "is retired" in refusal
    assert "ostraca enclosure add shelf-1" in refusal
    form = {**shelf.form(), "wipe": [*shelf.drives]}
    added = service.ask("PUT", "/v1/enclosures/shelf-1", form)
    assert service.ended(added.body["status"]["operation"]["id"]).state is OperationState.DONE
    assert service.do(service.records.get(record_keys.retired(SHELF))) is None
    moved = replace(report_of(shelf), controllers=(parse_controller("files:///elsewhere"),))
    following.reports = [moved]
    assert following.turn().spec.controllers == ("files:///elsewhere",), "reports are followed again"


class Overtaken(MemoryRecords):
    """Records with a change before the next read of an operation."""

    overtake: Callable[[], Awaitable[None]] | None = None

    async def get(self, key: str) -> Record | None:
        overtake = self.overtake
        if overtake is not None and key.startswith(record_keys.OPERATIONS):
            self.overtake = None
            await overtake()
        return await super().get(key)


async def test_an_enclosure_is_found_while_its_operations_follow_each_other() -> None:
    records, ids = Overtaken(), iter(range(1 << 20))
    enclosures = EnclosureService(records, Audit(lambda: 0.0, lambda: f"f{next(ids):08x}"))
    spec = EnclosureSpec(VERSION, SHELF, "nqn.2025-01.io.ostraca:shelf-1", ("files:///nowhere",))
    await enclosures.register(spec, ALICE)

    async def overtake() -> None:
        await enclosures.start(OperationKind.RETIRE, SHELF, ALICE)
        await Retention(records, audit_max=100, operations_max=0).turn()

    records.overtake = overtake
    known = await enclosures.find(SHELF)
    assert known is not None
    assert (known.operation.kind, known.spec) == (OperationKind.RETIRE, spec)


async def test_a_page_is_full_though_an_enclosure_is_retired_while_it_is_read() -> None:
    records, ids = Overtaken(), iter(range(1 << 20))
    enclosures = EnclosureService(records, Audit(lambda: 0.0, lambda: f"f{next(ids):08x}"))
    for name in ("a", "b", "c"):
        spec = EnclosureSpec(VERSION, name, f"nqn.2025-01.io.ostraca:{name}", ("files:///nowhere",))
        await enclosures.register(spec, ALICE)

    async def retire() -> None:
        gone = record_keys.spec(EnclosureId("b")), record_keys.status(EnclosureId("b"))
        await records.write([RecordChange(key, None) for key in gone], unchanged={})

    records.overtake = retire
    assert [each.spec.name for each in await enclosures.page(limit=2)] == ["a", "c"]


def test_a_registration_that_can_not_be_read_keeps_no_other_report_from_being_followed(
    following: Following, service: AdminService, caplog: pytest.LogCaptureFixture
) -> None:
    newer = [
        RecordChange(f"{prefix}a", b'{"version":2}') for prefix in (record_keys.SPECS, record_keys.STATUSES)
    ]
    service.do(service.records.write(newer, unchanged={}))
    report = report_of(service.shelf("shelf-1"))
    following.reports = [replace(report, id=EnclosureId("a")), report]
    with caplog.at_level("WARNING"):
        assert following.turn().status.phase is EnclosurePhase.READY
        service.do(following.follower.turn())
    (refusal,) = (each.getMessage() for each in caplog.records if "is not followed" in each.getMessage())
    assert "record statuses/a of the admin service has version 2" in refusal


def test_wait_ends_once_the_enclosure_is_ready(following: Following, ostraca: Commands) -> None:
    none = ostraca("enclosure", "wait", "--within", "0.1")
    assert (none.code, "no enclosure is ready after 0.1 s: none is registered" in none.err) == (1, True)
    following.reports = [report_of(following.service.shelf("shelf-1", drives=1))]
    following.service.do(following.follower.turn())
    ready = ostraca("enclosure", "wait", "--within", "30")
    assert (ready.code, ready.out) == (0, "shelf-1 is ready\n")
