"""``ostraca enclosure`` and ``ostraca operation``, against an admin service and enclosures on files."""

from __future__ import annotations

import json
import signal
import threading

import pytest
from tests.admin.cli.commands import Commands, Ran, started
from tests.admin.service import WITHIN_S, AdminService
from tests.admin.shelf import Shelf

from ostraca_admin.model import OperationState
from ostraca_cli.commands.admin import client, watching
from ostraca_cli.program import main
from ostraca_cli.terminal import tables
from ostraca_fabric.model.fabric_map import EnclosureState
from ostraca_fabric.model.ids import EnclosureId

SHELF = EnclosureId("shelf-1")


def added(ostraca: Commands, shelf: Shelf, *more: str) -> Ran:
    return ostraca("enclosure", "add", shelf.name, "--controller", shelf.controller, *more)


def test_onboarding_that_is_watched_writes_a_line_for_each_step(
    service: AdminService, ostraca: Commands
) -> None:
    shelf = service.shelf("shelf-1", drives=2)
    ran = added(ostraca, shelf, "--watch")
    assert (ran.code, ran.err) == (0, "")
    first, *steps, last = ran.out.splitlines()
    assert first.startswith("onboard of shelf-1 (operation ")
    names = ["reachable", "authenticated", "identified", "preflight", "formatted", "probed", "in the map"]
    assert [step.strip().partition(": ")[0] for step in steps] == names
    assert last == "done: 2 drives in the map"
    (there,) = service.membership.map.enclosures.values()
    assert {drive.nguid for drive in there.drives} == {*shelf.drives}


def test_onboarding_goes_on_unwatched_and_can_be_watched_later(
    service: AdminService, ostraca: Commands
) -> None:
    ran = added(ostraca, service.shelf("shelf-1"))
    assert ran.code == 0
    said, _, command = ran.out.strip().rstrip("`").partition("`ostraca ")
    assert said.startswith("onboard of shelf-1 has started as operation ")
    watched = ostraca(*command.split())
    assert (watched.code, watched.out.splitlines()[-1]) == (0, "done: 1 drive in the map")
    shown = ostraca(*command.split()[:-1])
    assert shown.code == 0
    assert "✓ in the map" in shown.out


def test_the_same_again_changes_nothing(service: AdminService, ostraca: Commands) -> None:
    shelf = service.onboarded("shelf-1")
    revision = service.membership.map.revision
    ran = added(ostraca, shelf, "--watch")
    assert (ran.code, ran.out) == (0, "enclosure shelf-1 is ready, with this registration: no change\n")
    assert added(ostraca, shelf, "--json").json["status"]["phase"] == "ready"
    assert service.membership.map.revision == revision


def test_onboarding_that_fails_is_code_1_and_says_which_drive_holds_what(
    service: AdminService, ostraca: Commands
) -> None:
    shelf = service.shelf("shelf-1")
    nguid = shelf.plug_in(b"somebody's photographs")
    ran = added(ostraca, shelf, "--watch")
    assert ran.code == 1
    assert ran.err.startswith("ostraca: onboard of shelf-1 failed: preflight: ")
    assert nguid in ran.err
    assert ran.err.count("\n") == 1
    assert not service.membership.map.enclosures
    assert added(ostraca, shelf, "--watch", "--wipe", nguid).code == 0
    assert len(service.membership.map.enclosures[SHELF].drives) == 2


def test_every_option_is_registered_and_json_is_what_the_service_answered(
    service: AdminService, ostraca: Commands
) -> None:
    first, second = "a1" * 16, "b2" * 16
    ran = ostraca(
        *("enclosure", "add", "shelf-1", "--nqn", "nqn.2025-01.io.ostraca:other"),
        *("--controller", "rdma://10.0.8.1:4420", "--controller", "tcp://10.0.9.1:4420"),
        *("--secret", "pod", "--failure-domain", "rack-1", "--segment", "2MiB", "--json"),
        *("--drive", first, "--drive", second, "--wipe", second),
    )
    assert ran.code == 0, ran.err
    assert ran.json["spec"] == {
        "nqn": "nqn.2025-01.io.ostraca:other",
        "controllers": ["rdma://10.0.8.1:4420", "tcp://10.0.9.1:4420"],
        "secret": "pod",
        "failure_domain": "rack-1",
        "drives": [first, second],
        "wipe": [second],
        "segment_bytes": 2 << 20,
    }


def test_what_makes_no_sense_to_the_service_is_bad_usage(service: AdminService, ostraca: Commands) -> None:
    assert ostraca("enclosure", "add", "Shelf 1", "--controller", "files:///x").code == 2
    ran = ostraca("enclosure", "add", "shelf-1", "--controller", "pigeon://x")
    assert ran.code == 2
    assert "pigeon" in ran.err
    nothing = ostraca("enclosure", "replace", "shelf-1", "drive-0", "--wipe")
    assert (nothing.code, "name the replacement" in nothing.err) == (2, True)
    assert ostraca("enclosure", "list", "--json").json["items"] == []


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("add", "Shelf_X!", "--controller", "files:///x"), "enclosure 'Shelf_X!' is not a usable name"),
        (("show", "shelf/1"), "enclosure 'shelf/1' is not a usable name"),
        (("add", "s", "--controller", "files:///x", "--secret", "A"), "secret 'A' is not a usable name"),
        (("add", "s", "--controller", "files:///x", "--failure-domain", "A"), "failure domain 'A' is not"),
        (
            ("add", "s", "--controller", "files:///x", "--segment", "300MiB"),
            "write whole MiB, from 1MiB to 256",
        ),
        (("add", "s", "--controller", "files:///x", "--segment", "1.5MiB"), "write whole MiB"),
        (("add", "s", "--controller", "files:///x", "--drive", "abc"), "'abc' is no NGUID"),
        (("expand", "s", "--wipe", "abc"), "'abc' is no NGUID"),
        (("replace", "s", "drive-0", "--with", "abc"), "'abc' is no NGUID: write its 32 hexadecimal digits"),
        (("replace", "s", "s/drive-0"), "drive 's/drive-0' is not a usable name"),
    ],
)
def test_arguments_are_checked_without_a_service(
    argv: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["enclosure", *argv, "--admin", "http://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "body." not in said


def test_an_enclosure_without_an_nqn_has_one_of_its_name(service: AdminService, ostraca: Commands) -> None:
    shelf = service.shelf("shelf-1")
    added = ostraca("enclosure", "add", "shelf-1", "--controller", shelf.controller, "--json")
    assert (added.code, added.json["spec"]["nqn"]) == (0, "nqn.2025-01.io.ostraca:shelf-1")


def test_lists_are_followed_to_their_last_page(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"shelf-{number}" for number in range(5)]
    for name in names:
        service.ask("PUT", f"/v1/enclosures/{name}", service.shelf(name).form())
    whole = ostraca("enclosure", "list", "--json")
    monkeypatch.setattr(client, "PAGE", 2)
    paged = ostraca("enclosure", "list", "--json")
    assert [item["name"] for item in paged.json["items"]] == names
    assert (paged.json["next"], [item["spec"] for item in paged.json["items"]]) == (
        "",
        [item["spec"] for item in whole.json["items"]],
    )
    assert [line.split()[0] for line in ostraca("enclosure", "list").out.splitlines()[1:]] == names
    assert len(ostraca("operation", "list", "--json").json["items"]) == 5


def test_show_says_all_of_an_enclosure_in_whole_words_where_no_terminal_cuts_them(
    service: AdminService, ostraca: Commands
) -> None:
    shelf = service.onboarded("shelf-1", drives=2)
    shown = ostraca("enclosure", "show", "shelf-1").out
    assert all(nguid in shown for nguid in shelf.drives)
    assert shelf.nqn in shown
    assert shelf.controller in shown
    etag = ostraca("enclosure", "show", "shelf-1", "--etag").out.strip()
    assert f"ETag            {etag}" in shown
    answer = service.ask("GET", "/v1/enclosures/shelf-1")
    assert (answer.headers["ETag"], answer.body) == (
        f'"{etag}"',
        ostraca("enclosure", "show", "shelf-1", "--json").json,
    )
    missing = ostraca("enclosure", "show", "shelf-2")
    advice = "list all by `ostraca enclosure list`, or at /v1/enclosures"
    assert (missing.code, missing.err) == (1, f"ostraca: enclosure shelf-2 is not registered: {advice}\n")


def test_lines_of_a_piped_view_end_with_their_text(service: AdminService, ostraca: Commands) -> None:
    service.onboarded("shelf-1", drives=2)
    assert max(map(len, ostraca("enclosure", "show", "shelf-1").out.splitlines())) < 200


def test_a_narrow_terminal_cuts_no_identifier(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.onboarded("shelf-1", drives=2)
    monkeypatch.setattr(tables, "_PIPE_COLUMNS", 80)
    assert "\N{HORIZONTAL ELLIPSIS}" not in ostraca("enclosure", "show", "shelf-1").out
    assert "\N{HORIZONTAL ELLIPSIS}" not in ostraca("operation", "list").out


def test_an_enclosure_is_drained_taken_back_drained_again_and_retired(
    service: AdminService, ostraca: Commands
) -> None:
    service.onboarded("shelf-1")
    ostraca.become("operator")
    begun = ostraca("enclosure", "drain", "shelf-1", "--force", "--json").json
    assert (begun["kind"], begun["state"]) == ("drain", "running")
    assert ostraca("enclosure", "undrain", "shelf-1", "--watch").code == 0
    assert service.membership.map.enclosures[SHELF].state is not EnclosureState.DRAINING
    passed_over = service.pass_over("shelf-1")
    drained = ostraca("enclosure", "drain", "shelf-1", "--force", "--watch", "--json")
    passed_over.result(WITHIN_S)
    assert (drained.code, drained.err) == (0, "")
    assert drained.lines[-1]["state"] == "done"
    assert {line["id"] for line in drained.lines} == {drained.lines[0]["id"]}
    refused = ostraca("enclosure", "retire", "shelf-1")
    assert (refused.code, refused.err) == (1, "ostraca: oscar has the role operator, and this needs admin\n")
    ostraca.become("admin")
    assert ostraca("enclosure", "retire", "shelf-1", "--watch").code == 0
    assert not service.membership.map.enclosures


def test_what_can_not_be_done_as_things_are_is_code_3_with_the_services_words(
    service: AdminService, ostraca: Commands
) -> None:
    service.onboarded("shelf-1")
    ran = ostraca("enclosure", "retire", "shelf-1", "--watch")
    answer = service.ask("POST", "/v1/enclosures/shelf-1:retire", {})
    assert answer.status == 409
    assert (ran.code, ran.out, ran.err) == (3, "", f"ostraca: {answer.body['detail']}\n")
    assert ostraca("enclosure", "retire", "shelf-1", "--watch", "--force").code == 0


@pytest.mark.parametrize("action", ["drain", "undrain", "retire"])
def test_a_change_is_not_made_where_the_etag_is_an_old_one(
    service: AdminService, ostraca: Commands, action: str
) -> None:
    service.onboarded("shelf-1")
    etag = ostraca("enclosure", "show", "shelf-1", "--etag").out.strip()
    operations = ostraca("operation", "list", "--json").json
    ran = ostraca("enclosure", action, "shelf-1", "--if-match", str(int(etag) + 1))
    assert ran.code == 3
    assert "changed since" in ran.err
    assert ostraca("operation", "list", "--json").json == operations
    forced = ["--force"] if action == "retire" else []
    if action != "undrain":
        assert ostraca("enclosure", action, "shelf-1", "--if-match", etag, *forced).code == 0


def test_a_drive_is_replaced_by_the_one_that_is_named(service: AdminService, ostraca: Commands) -> None:
    shelf = service.onboarded("shelf-1", drives=2)
    drives = ostraca("enclosure", "show", "shelf-1", "--json").json["status"]["drives"]
    stays = next(drive["nguid"] for drive in drives if drive["name"] == "drive-1")
    comes, other = shelf.plug_in(b"used before"), shelf.plug_in()
    which = ostraca("enclosure", "replace", "shelf-1", "drive-0", "--watch")
    assert which.code == 1
    assert comes in which.err
    assert other in which.err
    full = ostraca("enclosure", "replace", "shelf-1", "drive-0", "--with", comes, "--watch")
    assert full.code == 1
    assert comes not in {drive.nguid for drive in service.membership.map.enclosures[SHELF].drives}
    ran = ostraca("enclosure", "replace", "shelf-1", "drive-0", "--with", comes, "--wipe", "--watch")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("replace of drive-0 of shelf-1 (operation ")
    names = {drive.nguid for drive in service.membership.map.enclosures[SHELF].drives}
    assert names == {stays, comes}
    assert ostraca("enclosure", "replace", "shelf-1", "drive-9").code == 1


def test_drives_are_added_those_that_are_named_or_all(service: AdminService, ostraca: Commands) -> None:
    shelf = service.onboarded("shelf-1")
    full, other = shelf.plug_in(b"used before"), shelf.plug_in()
    assert ostraca("enclosure", "expand", "shelf-1", "--drive", full, "--watch").code == 1
    ran = ostraca("enclosure", "expand", "shelf-1", "--drive", full, "--wipe", full, "--watch")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("expand of shelf-1 (operation ")
    assert ran.out.endswith("done: 2 drives in the map, 1 new\n")
    assert ostraca("enclosure", "expand", "shelf-1", "--watch").code == 0
    names = [drive.nguid for drive in service.membership.map.enclosures[SHELF].drives]
    assert names[1:] == [full, other]
    nothing = ostraca("enclosure", "expand", "shelf-1", "--watch")
    assert (nothing.code, "insert a drive" in nothing.err) == (1, True)


def test_who_watches_a_drain_that_is_taken_back_is_told_so(service: AdminService, ostraca: Commands) -> None:
    service.onboarded("shelf-1")
    begun = ostraca("enclosure", "drain", "shelf-1", "--force", "--json").json
    assert ostraca("enclosure", "undrain", "shelf-1", "--watch").code == 0
    ran = ostraca("operation", "show", begun["id"], "--watch")
    assert ran.code == 1
    assert ran.err.startswith("ostraca: drain of shelf-1 cancelled: superseded by undrain (operation ")
    assert ostraca("operation", "show", begun["id"]).code == 0
    missing = ostraca("operation", "show", "nothing", "--watch")
    advice = "list all by `ostraca operation list`, or at /v1/operations"
    assert (missing.code, missing.err) == (1, f"ostraca: operation nothing does not exist: {advice}\n")


def test_ctrl_c_leaves_long_work_to_itself_and_says_how_to_watch_it(service: AdminService) -> None:
    service.onboarded("shelf-1")
    with started(service, "enclosure", "drain", "shelf-1", "--force", "--watch") as process:
        assert process.stdout is not None
        number = process.stdout.readline().rpartition(" ")[2].strip(")\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 130
    assert err == (
        f"\nostraca: operation {number} continues; watch by `ostraca operation show {number} --watch`\n"
    )
    service.pass_over("shelf-1").result(WITHIN_S)
    assert service.ended(number).state is OperationState.DONE
    assert "Traceback" not in out


def test_a_service_that_goes_away_for_good_is_not_watched_for_ever(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.onboarded("shelf-1")
    number = ostraca("enclosure", "drain", "shelf-1", "--force", "--json").json["id"]
    monkeypatch.setattr(watching, "OUTAGE_MAX_S", 0.2)
    monkeypatch.setattr(watching, "POLL_S", 0.05)
    ran: list[Ran] = []
    watcher = threading.Thread(
        target=lambda: ran.append(ostraca("operation", "show", number, "--watch")), daemon=True
    )
    watcher.start()
    service.stop()
    watcher.join(WITHIN_S)
    assert [each.code for each in ran] == [1]
    assert "no admin service answers at" in ran[0].err
    assert f"`ostraca operation show {number} --watch`" in ran[0].err


def test_json_of_one_page_is_the_bytes_of_the_answer(service: AdminService, ostraca: Commands) -> None:
    service.onboarded("shelf-1")
    shown = ostraca("enclosure", "list", "--json").out
    assert json.loads(shown) == service.ask("GET", "/v1/enclosures").body
    assert shown.count("\n") == 1
