"""``ostraca events``: what is told as it is done, and what becomes of who follows it."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable

import pytest
from tests.admin.cli.commands import Commands, started
from tests.admin.service import WITHIN_S, AdminService

from ostraca_cli.commands.admin import events
from ostraca_cli.commands.admin.client import AdminClient
from ostraca_cli.commands.admin.errors import AdminUnavailableError
from ostraca_fabric.sockets.default_paths import ADMIN_TOKEN_VARIABLE


def test_changes_and_long_work_are_told_as_they_are_made_until_ctrl_c(service: AdminService) -> None:
    with started(service, "events") as process:
        assert process.stdout is not None
        begun = _onboard_when_heard(service, process.stdout.readline)
        said = [begun]
        while "done: 1 drive in the map" not in said[-1]:
            said.append(process.stdout.readline())
            assert said[-1], "it goes on"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WITHIN_S)
    assert (process.returncode, out, err) == (130, "", "")
    operation = said[-1].split()[2]
    texts = [line.split(maxsplit=2)[2].rstrip() for line in said]
    assert f"alice (admin)  PUT /v1/enclosures/shelf-1  onboard {operation}" in texts
    assert f"{operation}  onboard of shelf-1 (operation {operation})" in texts
    assert f"{operation}  reachable: 2 of 2 agents reach the enclosure" in texts
    assert len(texts) == len(set(texts)), "nothing is told twice"


def test_as_json_each_event_is_a_line_and_work_that_fails_is_told_as_well(service: AdminService) -> None:
    with started(service, "events", "--json") as process, started(service, "events") as other:
        assert process.stdout is not None
        assert other.stdout is not None
        streams = process.stdout, other.stdout
        _onboard_when_heard(service, lambda: "".join(each.readline() for each in streams))
        service.ask("PUT", "/v1/enclosures/shelf-2", service.shelf("nobody", drives=0).form())
        while (event := json.loads(process.stdout.readline()))["data"].get("state") != "failed":
            assert event["event"] in ("operation", "audit")
        assert event["data"]["enclosure"] == "shelf-2"
        while "  failed: " not in (line := other.stdout.readline()):
            assert line
        assert event["data"]["message"] in line


def test_a_stream_that_is_cut_is_asked_for_again_and_given_up_in_the_end(
    service: AdminService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The service ends while it is followed, and nobody comes in its place."""
    monkeypatch.setattr(events, "OUTAGE_MAX_S", 0.3)
    monkeypatch.setattr(events, "RETRY_S", 0.05)
    client = AdminClient(service.url, token=service.token, ca=None, timeout_s=WITHIN_S)
    told = events.stream_events(client)

    def hear() -> str:
        return next(told)[0]

    _onboard_when_heard(service, hear)
    service.stop()
    with pytest.raises(AdminUnavailableError, match="no admin service answers at"):
        list(told)
    assert capsys.readouterr().err.count(f"ostraca: {service.url} has ended its stream") == 1


def test_who_may_not_hear_and_what_is_no_admin_service_end_it_at_once(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, "nobody-nobody-nobody")
    ran = ostraca("events")
    assert (ran.code, "rejects this token" in ran.err) == (1, True)
    assert "has ended its stream" not in ran.err
    ran = ostraca("events", "--admin", "http://127.0.0.1:1")
    assert (ran.code, "no admin service answers" in ran.err) == (1, True)
    assert "has ended its stream" not in ran.err
    monkeypatch.setattr(events, "_PATH", "/v1/openapi.json")
    ostraca.become("viewer")
    ran = ostraca("events")
    assert (ran.code, "is no admin service, by its response" in ran.err) == (1, True)


def _onboard_when_heard(service: AdminService, heard: Callable[[], str]) -> str:
    """Have an enclosure onboarded once the stream has begun, which is seen by a change that it tells."""
    made, stop = threading.Event(), threading.Event()

    def change() -> None:
        number = 0
        while not stop.wait(0.05):
            service.ask("PUT", f"/v1/tenants/t{number}", {})
            number += 1
        service.ask("PUT", "/v1/enclosures/shelf-1", service.shelf("shelf-1").form())
        made.set()

    changing = threading.Thread(target=change)
    changing.start()
    try:
        return heard()
    finally:
        stop.set()
        changing.join()
        assert made.is_set()
