"""The admin service of tests is one: over HTTP it onboards, drains and retires an enclosure on files."""

from __future__ import annotations

from pathlib import Path

from tests.admin.service import WITHIN_S, AdminService

from ostraca_admin.model import OperationState
from ostraca_fabric.model.ids import EnclosureId


def test_an_enclosure_comes_into_the_map_and_leaves_it(tmp_path: Path) -> None:
    with AdminService(tmp_path) as service:
        shelf = service.shelf("shelf-1", drives=2)
        answer = service.ask("PUT", "/v1/enclosures/shelf-1", shelf.form())
        assert answer.status == 201
        assert service.ended(answer.body["status"]["operation"]["id"]).state is OperationState.DONE
        (there,) = service.membership.map.enclosures.values()
        assert (there.id, {drive.nguid for drive in there.drives}) == (
            EnclosureId("shelf-1"),
            {*shelf.drives},
        )
        passed_over = service.pass_over("shelf-1")
        drain = service.ask("POST", "/v1/enclosures/shelf-1:drain", {"force": True}, role="operator")
        assert service.ended(drain.body["id"]).state is OperationState.DONE
        passed_over.result(WITHIN_S)
        retire = service.ask("POST", "/v1/enclosures/shelf-1:retire", {})
        assert service.ended(retire.body["id"]).state is OperationState.DONE
        assert not service.membership.map.enclosures
        assert service.ask("GET", "/v1/enclosures/shelf-1").status == 404


def test_who_shows_no_token_is_told_nothing(tmp_path: Path) -> None:
    with AdminService(tmp_path, agents=0) as service:
        assert service.ask("GET", "/v1/agents", role="").status == 401
        assert service.ask("GET", "/v1/agents", role="viewer").body["items"] == []


def test_a_body_of_another_type_is_told_to_be_json(tmp_path: Path) -> None:
    with AdminService(tmp_path, agents=0) as service:
        form = {"Content-Type": "application/x-www-form-urlencoded"}
        told = service.ask("PUT", "/v1/tenants/acme", {"is_erasable": True}, headers=form)
        assert (told.status, told.body["detail"]) == (
            422,
            "the body is not declared as JSON: send Content-Type: application/json",
        )
        typed = {"Content-Type": "application/json; charset=utf-8"}
        wrong = service.ask("PUT", "/v1/tenants/acme", {"quota": 1}, headers=typed)
        assert (wrong.status, "body.quota" in wrong.body["detail"]) == (422, True)
        assert service.ask("PUT", "/v1/tenants/acme", {}, headers=typed).status == 201
