"""What is asked for again, otherwise, or of an enclosure that is in use."""

from __future__ import annotations

from typing import Any

import pytest
from tests.admin.service import AdminService

from ostraca_admin.model import Operation, OperationState
from ostraca_fabric.model.ids import EnclosureId

FOREIGN = b"\0" * 512 + b"EFI PART"


def put(service: AdminService, name: str, form: dict[str, object]) -> Operation:
    answer = service.ask("PUT", f"/v1/enclosures/{name}", form)
    assert answer.status in (200, 201), answer
    return service.ended(answer.body["status"]["operation"]["id"])


def asked(service: AdminService, path: str, **body: object) -> Operation:
    answer = service.ask("POST", f"/v1/enclosures/{path}", body)
    assert answer.status == 202, answer
    return service.ended(answer.body["id"])


def drives(service: AdminService, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = service.ask("GET", f"/v1/enclosures/{name}").body["status"]["drives"]
    return found


def nguids(service: AdminService) -> set[str]:
    """Drives that are some enclosure's, as records say."""
    return {record.key.rpartition("/")[2] for record in service.do(service.records.below("nguids/"))}


def test_a_drive_that_failed_preflight_may_be_left_out(service: AdminService) -> None:
    shelf = service.shelf("shelf-1", drives=1)
    (good,) = shelf.drives
    bad = shelf.plug_in(FOREIGN)
    failed = put(service, "shelf-1", shelf.form())
    assert (failed.state, bad in failed.message) == (OperationState.FAILED, True)
    assert put(service, "shelf-1", shelf.form(drives=[good])).state is OperationState.DONE
    assert [each["nguid"] for each in drives(service, "shelf-1")] == [good]
    assert nguids(service) == {good}


def test_drives_that_were_named_and_are_not_any_more_are_free(service: AdminService) -> None:
    shelf = service.shelf("shelf-1", drives=1)
    (good,) = shelf.drives
    bad = shelf.plug_in(FOREIGN)
    assert put(service, "shelf-1", shelf.form(drives=[good, bad])).state is OperationState.FAILED
    assert put(service, "shelf-1", shelf.form(drives=[good])).state is OperationState.DONE
    assert nguids(service) == {good}


def test_a_replacement_that_failed_may_be_another_drive(service: AdminService) -> None:
    shelf = service.onboarded("shelf-1", drives=1)
    bad = shelf.plug_in(FOREIGN)
    assert asked(service, "shelf-1/drives/drive-0:replace", replacement=bad).state is OperationState.FAILED
    good = shelf.plug_in()
    done = asked(service, "shelf-1/drives/drive-0:replace", replacement=good)
    assert done.state is OperationState.DONE, done
    assert [each["nguid"] for each in drives(service, "shelf-1")] == [good]
    assert nguids(service) == {good}


def test_a_replacement_that_failed_may_be_wiped_and_come_all_the_same(service: AdminService) -> None:
    shelf = service.onboarded("shelf-1", drives=1)
    bad = shelf.plug_in(FOREIGN)
    assert asked(service, "shelf-1/drives/drive-0:replace").state is OperationState.FAILED
    done = asked(service, "shelf-1/drives/drive-0:replace", replacement=bad, wipe=True)
    assert done.state is OperationState.DONE, done
    assert [each["nguid"] for each in drives(service, "shelf-1")] == [bad]


def test_the_same_registration_again_does_not_onboard_what_is_in_use(service: AdminService) -> None:
    shelf = service.onboarded("shelf-1", drives=1)
    failed = asked(service, "shelf-1/drives/drive-0:replace")
    assert failed.state is OperationState.FAILED
    again = service.ask("PUT", "/v1/enclosures/shelf-1", shelf.form())
    assert (again.status, again.body["status"]["operation"]["id"]) == (200, failed.id)
    assert again.body["status"]["phase"] == "ready"


def test_who_is_reached_otherwise_keeps_its_drives_and_gets_no_more(service: AdminService) -> None:
    shelf = service.onboarded("shelf-1", drives=2)
    before = drives(service, "shelf-1")
    shelf.plug_in(FOREIGN)
    other = service.directory / "other-way"
    other.symlink_to(shelf.directory)
    done = put(service, "shelf-1", shelf.form(controllers=[shelf.controller, f"files://{other}"]))
    assert done.state is OperationState.DONE, done
    assert drives(service, "shelf-1") == before
    target = service.membership.map.enclosures[EnclosureId("shelf-1")].target
    assert target is not None
    assert len(target.controllers) == 2


@pytest.mark.parametrize("force", [False, True])
def test_the_last_enclosure_is_drained_only_by_force(service: AdminService, *, force: bool) -> None:
    service.onboarded("shelf-1", drives=1)
    answer = service.ask("POST", "/v1/enclosures/shelf-1:drain", {"force": force})
    if force:
        passing = service.pass_over("shelf-1")
        assert service.ended(answer.body["id"]).state is OperationState.DONE
        passing.result()
    else:
        failed = service.ended(answer.body["id"])
        assert (failed.state, "no other enclosure" in failed.message) == (OperationState.FAILED, True)
        assert service.ask("GET", "/v1/enclosures/shelf-1").body["status"]["phase"] == "ready"


def test_a_drive_that_another_enclosure_uses_is_not_taken_though_it_was_not_named(
    service: AdminService,
) -> None:
    first = service.onboarded("shelf-1", drives=1)
    second = service.shelf("shelf-2", drives=1)
    second.drives.update(first.drives)
    for path in first.drives.values():  # the same namespace, behind another subsystem
        (second.directory / path.name).unlink(missing_ok=True)
        (second.directory / path.name).symlink_to(path)
    second.export()
    failed = put(service, "shelf-2", second.form())
    assert failed.state is OperationState.FAILED
    assert "belongs to enclosure shelf-1: retire that enclosure first" in failed.message
