"""Drives are added to an enclosure in use: which ones, what is left alone, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.admin.service import AdminService, Answer

from ostraca_admin.model import VERSION, EnclosurePhase, Operation, OperationState, RegistrationStatus
from ostraca_admin.workflows.preflight import DRIVES_MAX, StepDone, StepFailed, choose_additions, with_drive
from ostraca_fabric.model.fabric_map import EARLIER_PLACEMENTS_MAX, EnclosureRecord
from ostraca_fabric.model.ids import EnclosureId
from ostraca_fabric.wire.flash_work import Content, DiscoveredDrive, Probe

SHELF = EnclosureId("shelf-1")
FOREIGN = b"\0" * 512 + b"EFI PART"
ONE, TWO, THREE, FOUR = (f"{number:032x}" for number in (1, 2, 3, 4))


def asks(service: AdminService, **form: object) -> Answer:
    return service.ask("POST", f"/v1/enclosures/{SHELF}:expand", form, role="operator")


def expanded(service: AdminService, **form: object) -> Operation:
    answer = asks(service, **form)
    assert answer.status == 202, answer
    return service.ended(answer.body["id"])


def drives(service: AdminService) -> list[tuple[str, str, bool]]:
    """Return names, NGUIDs, and whether each is in the map."""
    found: list[dict[str, Any]] = service.ask("GET", f"/v1/enclosures/{SHELF}").body["status"]["drives"]
    return [(each["name"], each["nguid"], each["is_in_map"]) for each in found]


def record(service: AdminService) -> EnclosureRecord:
    return service.membership.map.enclosures[SHELF]


def uses(service: AdminService) -> set[str]:
    """Drives that are some enclosure's, as records say."""
    return {each.key.rpartition("/")[2] for each in service.do(service.records.below("nguids/"))}


def busy(service: AdminService) -> None:
    """Have as many placement epochs asked as may be."""
    while len(service.membership.map.earlier_placements) < EARLIER_PLACEMENTS_MAX:
        there = record(service)
        for each in (there.drained(), there):
            service.do(service.membership.put_enclosures([each], force=True))


# ------------------------------------------------------------------------------------- which ones, by values


def seen(nguid: str) -> DiscoveredDrive:
    return DiscoveredDrive(nguid, 64 << 20, 4096, "model", nguid[-1], Content.BLANK)


def used_status(*nguids: str) -> RegistrationStatus:
    status = RegistrationStatus(VERSION, EnclosurePhase.READY, "1")
    for nguid in nguids:
        status = with_drive(status, seen(nguid), "a" * 32)
    there = tuple(msgspec.structs.replace(each, is_coming=False) for each in status.drives)
    return msgspec.structs.replace(status, drives=there)


def told(status: RegistrationStatus, *shown: str, wanted: tuple[str, ...] = ()) -> tuple[object, list[str]]:
    """Return the verdict, and the names of drives that come, with the last digits of their NGUIDs."""
    verdict, after = choose_additions(
        {nguid: seen(nguid) for nguid in shown}, status, wanted, lambda: "b" * 32
    )
    assert [each for each in after.drives if not each.is_coming] == [
        each for each in status.drives if not each.is_coming
    ], "those that it uses stay"
    return verdict, [f"{each.name} {each.nguid[-1]}" for each in after.drives if each.is_coming]


def test_all_that_are_not_used_are_added_unless_some_are_named() -> None:
    verdict, coming = told(used_status(ONE), TWO, ONE, THREE)
    assert isinstance(verdict, StepDone)
    assert verdict.detail == {"drives": {TWO: "drive-1", THREE: "drive-2"}}
    assert coming == ["drive-1 2", "drive-2 3"]
    assert told(used_status(ONE), ONE, TWO, THREE, wanted=(THREE, ONE))[1] == ["drive-1 3"]


def test_a_drive_of_an_earlier_try_keeps_its_name_or_is_chosen_no_more() -> None:
    tried = with_drive(with_drive(used_status(ONE), seen(TWO), "c" * 32), seen(THREE), "d" * 32)
    assert told(tried, ONE, TWO, THREE)[1] == ["drive-1 2", "drive-2 3"]
    assert told(tried, ONE, TWO, THREE, FOUR, wanted=(THREE, FOUR))[1] == ["drive-2 3", "drive-3 4"]
    _, after = choose_additions(
        {each: seen(each) for each in (ONE, THREE)}, tried, (THREE,), lambda: "e" * 32
    )
    assert after.drives[-1].format_id == "d" * 32


def test_where_nothing_is_new_it_says_what_to_do() -> None:
    verdict, coming = told(used_status(ONE), ONE)
    assert isinstance(verdict, StepFailed)
    assert "insert a drive" in verdict.message
    verdict, coming = told(used_status(ONE), ONE, TWO, wanted=(ONE,))
    assert verdict == StepDone(f"already in use: {ONE}: no change")
    verdict, coming = told(used_status(ONE), ONE, wanted=(TWO,))
    assert isinstance(verdict, StepFailed)
    assert f"drives not visible: {TWO}" in verdict.message
    assert coming == []


def test_an_enclosure_has_so_many_drives_at_most() -> None:
    nguids = [f"{number:032x}" for number in range(DRIVES_MAX + 1)]
    verdict, _ = told(used_status(*nguids[1:-1]), *nguids[:-1])
    assert isinstance(verdict, StepDone)
    verdict, coming = told(used_status(*nguids[1:]), *nguids)
    assert isinstance(verdict, StepFailed)
    assert (f"limit of {DRIVES_MAX}" in verdict.message, coming) == (True, [])


# ---------------------------------------------------------------------------------------------- as a service


def test_drives_come_in_at_once_beside_those_that_are_there(service: AdminService) -> None:
    shelf = service.onboarded(SHELF, drives=2)
    before, placement = record(service), service.membership.map.placement_epoch
    new = {shelf.plug_in(), shelf.plug_in()}
    done = expanded(service)
    assert (done.state, done.message) == (
        OperationState.DONE,
        "4 drives in the map, 2 new",
    ), done
    assert [step.name for step in done.steps] == [
        *("identified", "preflight", "formatted", "probed", "in the map"),
    ]
    after = record(service)
    assert (after.drives[:2], after.shards[:2]) == (before.drives, before.shards)
    assert {each.nguid for each in after.drives[2:]} == new
    assert service.membership.map.placement_epoch == placement + 1
    assert [name for name, _, is_in_map in drives(service) if is_in_map] == [
        f"drive-{number}" for number in range(4)
    ]
    assert uses(service) == {*shelf.drives}


def test_only_those_that_are_named_come_in_and_the_same_again_adds_nothing(service: AdminService) -> None:
    shelf = service.onboarded(SHELF)
    named, other = shelf.plug_in(), shelf.plug_in()
    assert expanded(service, drives=[named]).state is OperationState.DONE
    revision = service.membership.map.revision
    again = expanded(service, drives=[named])
    assert (again.state, again.message) == (OperationState.DONE, "2 drives in the map, 0 new")
    assert again.steps[0].message == f"already in use: {named}: no change"
    assert service.membership.map.revision == revision
    assert other not in uses(service)
    assert expanded(service).state is OperationState.DONE
    assert [name for name, _, _ in drives(service)] == ["drive-0", "drive-1", "drive-2"]
    nothing = expanded(service)
    assert (nothing.state, "insert a drive" in nothing.message) == (OperationState.FAILED, True)


def test_what_a_drive_holds_is_left_alone_unless_this_very_request_names_it(service: AdminService) -> None:
    shelf = service.shelf(SHELF)
    (first,) = shelf.drives
    full = shelf.plug_in(FOREIGN)
    form = shelf.form(drives=[first], wipe=[full])  # named when it was registered, and not used then
    registered = service.ask("PUT", f"/v1/enclosures/{SHELF}", form)
    assert service.ended(registered.body["status"]["operation"]["id"]).state is OperationState.DONE
    blank, before = shelf.plug_in(), shelf.drives[full].read_bytes()
    failed = expanded(service)
    assert (failed.state, failed.message.startswith(f"preflight: {full}")) == (OperationState.FAILED, True)
    assert "a partition table" in failed.message
    assert shelf.drives[full].read_bytes() == before
    assert [nguid for _, nguid, is_in_map in drives(service) if is_in_map] == [first]
    assert expanded(service, drives=[blank]).state is OperationState.DONE
    assert expanded(service, drives=[full], wipe=[full]).state is OperationState.DONE
    assert shelf.drives[full].read_bytes() != before
    names = {nguid: name for name, nguid, _ in drives(service)}
    assert names[blank] in ("drive-1", "drive-2")
    assert names[full] == "drive-3", "it was chosen no more meanwhile, and its name does not come again"


@pytest.mark.parametrize("is_named", [True, False])
def test_a_drive_of_another_enclosure_is_not_taken(service: AdminService, *, is_named: bool) -> None:
    shelf, other = service.onboarded(SHELF), service.onboarded("shelf-2")
    (foreign,) = other.drives
    path = shelf.directory / "seen-twice.img"
    path.symlink_to(other.drives[foreign])
    shelf.drives[foreign] = path
    shelf.export()
    if is_named:
        refused = asks(service, drives=[foreign])
        assert (
            refused.status,
            f"drive {foreign} belongs to enclosure shelf-2" in refused.body["detail"],
        ) == (
            409,
            True,
        )
    else:
        failed = expanded(service)
        assert (failed.state, "belongs to enclosure shelf-2" in failed.message) == (
            OperationState.FAILED,
            True,
        )
    assert len(drives(service)) == 1


def test_it_is_refused_as_things_are(service: AdminService) -> None:
    assert asks(service).status == 404
    shelf = service.onboarded(SHELF)
    etag = service.ask("GET", f"/v1/enclosures/{SHELF}").headers["etag"]
    path = f"/v1/enclosures/{SHELF}:expand"
    assert service.ask("POST", path, {}, role="viewer").status == 403
    assert service.ask("POST", path, {}, headers={"If-Match": '"99"'}).status == 412
    assert asks(service, drives=[ONE, ONE]).status == 422
    spare = asks(service, drives=[ONE], wipe=[TWO])
    assert (spare.status, TWO in spare.body["detail"]) == (422, True)
    more = service.ask("PUT", f"/v1/enclosures/{SHELF}", shelf.form(drives=[shelf.plug_in()]))
    assert (more.status, "`:expand`" in more.body["detail"]) == (409, True)
    taken = service.ask("POST", path, {}, headers={"If-Match": etag})
    assert service.ended(taken.body["id"]).state is OperationState.DONE
    service.ask("POST", f"/v1/enclosures/{SHELF}:drain", {"force": True})
    assert asks(service).status == 409


def test_of_two_that_add_drives_at_once_the_second_waits_or_is_shown_the_first(
    service: AdminService,
) -> None:
    shelf = service.onboarded(SHELF)
    busy(service)
    one, two = shelf.plug_in(), shelf.plug_in()
    first = asks(service, drives=[one])
    assert asks(service, drives=[one]).body["id"] == first.body["id"]
    refused = asks(service, drives=[two])
    assert (refused.status, first.body["id"] in refused.body["detail"]) == (409, True)
    assert asks(service, drives=[one], wipe=[one]).status == 409, "it would not be wiped by what runs"
    forced = asks(service, drives=[one], force=True)
    assert (forced.status, forced.body["id"]) == (202, first.body["id"])
    assert service.ended(first.body["id"]).state is OperationState.DONE
    assert {nguid for _, nguid, is_in_map in drives(service) if is_in_map} == {*shelf.drives} - {two}
    entries = service.ask("GET", "/v1/audit").body["items"]
    assert entries[-1]["detail"] == f"expand {first.body['id']}, forced"


def test_it_waits_for_room_for_one_more_placement_epoch(service: AdminService) -> None:
    shelf = service.onboarded(SHELF)
    busy(service)
    shelf.plug_in()
    number = asks(service).body["id"]
    while not (steps := service.ask("GET", f"/v1/operations/{number}").body["steps"])[-1]["message"]:
        assert steps[-1]["state"] in ("waiting", "running")
    assert steps[-1]["state"] == "running"
    assert len(record(service).drives) == 1
    for earlier in service.membership.map.earlier_placements:
        service.do(service.membership.retire_placement(earlier.epoch))
    assert service.ended(number).state is OperationState.DONE
    assert len(record(service).drives) == 2


def test_a_drive_that_failed_when_it_was_measured_does_not_come_in_by_another_door(
    service: AdminService, monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = service.onboarded(SHELF)
    bad = shelf.plug_in()
    with monkeypatch.context() as patch:
        patch.setattr(type(service.hands), "ask", _failing(service))
        failed = expanded(service)
    assert (failed.state, failed.steps[3].name) == (OperationState.FAILED, "probed")
    assert failed.steps[2].state is OperationState.DONE, "it was formatted"
    other = service.directory / "other-way"
    other.symlink_to(shelf.directory)
    form = shelf.form(controllers=[shelf.controller, f"files://{other}"])
    changed = service.ask("PUT", f"/v1/enclosures/{SHELF}", form)
    assert service.ended(changed.body["status"]["operation"]["id"]).state is OperationState.DONE
    assert bad not in {each.nguid for each in record(service).drives}
    assert bad not in uses(service)


def _failing(service: AdminService) -> Any:
    ask = type(service.hands).ask

    async def asked(hands: Any, agent: Any, asked_: Any, deadline_s: float) -> Any:
        answer = await ask(hands, agent, asked_, deadline_s)
        return msgspec.structs.replace(answer, trouble="it is slow") if isinstance(asked_, Probe) else answer

    return asked
