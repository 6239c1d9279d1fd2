"""``ostraca fabric`` where it asks the admin service, and ``ostraca audit``."""

from __future__ import annotations

from typing import Any

import pytest
from tests.admin.cli.commands import Commands
from tests.admin.service import AdminService

from ostraca_cli.commands.admin import client
from ostraca_fabric.model.ids import AgentId, StartId
from ostraca_fabric.model.inventory import DriveReport, DriveWear, EnclosureReport
from ostraca_fabric.telemetry.status import DriveStatus


def test_a_fabric_is_shown_by_its_map_agents_shards_and_capacity(
    service: AdminService, ostraca: Commands
) -> None:
    service.onboarded("shelf-1", drives=2)
    agent = service.agents[AgentId("agent-1")]
    agent.is_silent = True
    ostraca.become("viewer")
    shown = {
        name: ostraca("fabric", name) for name in ("map", "agents", "drives", "shards", "volumes", "capacity")
    }
    assert {name: (ran.code, ran.err) for name, ran in shown.items()} == dict.fromkeys(shown, (0, ""))
    fabric = service.membership.map.fabric.hex()
    assert f"fabric           {fabric}" in shown["map"].out
    assert "shards           2, 2 without an owner" in shown["map"].out
    assert "1 of 1" in shown["agents"].out
    assert "agent-1: can't reach an agent" in shown["agents"].out
    shards = [shard.id for shard in service.membership.map.shards()]
    assert [line.split()[0] for line in shown["shards"].out.splitlines()[1:]] == shards
    assert "none" in shown["shards"].out
    assert "119.5 MiB" in shown["capacity"].out
    assert "without silent agents (agent-1)" in shown["capacity"].out
    for name in shown:
        assert ostraca("fabric", name, "--json").json == service.ask("GET", f"/v1/{name}").body


def test_drives_are_listed_with_what_agents_and_their_enclosure_say_of_them(
    service: AdminService, ostraca: Commands
) -> None:
    shelf = service.onboarded("shelf-1", drives=2)
    (there,) = service.membership.map.enclosures.values()
    worn, suspect = there.drives
    troubled = DriveStatus(suspect.id, condition="suspect", why="answers late \x1b[31m", hits=4)
    service.agents[AgentId("agent-0")].drives = (DriveStatus(worn.id, hits=17), troubled)
    wear = DriveWear(12, 100, 10, 0, 41, 1 << 40)
    drive = DriveReport("nvme0n1", worn.nguid, 64 << 20, 4096, wear=wear)
    service.reports[shelf.name] = EnclosureReport(there.id, StartId(bytes(16)), shelf.nqn, (), (drive,))
    first, second, said = ostraca("fabric", "drives").out.splitlines()[1:]
    assert first.split()[:2] == [worn.id, worn.nguid]
    assert first.split()[-5:] == ["good", "17", "12", "%", "41"]
    assert second.split()[-4:] == ["suspect", "4", "–", "–"]
    assert said == f"{suspect.id}: agent-0: suspect: answers late \N{REPLACEMENT CHARACTER}[31m"
    shown = ostraca("enclosure", "show", "shelf-1").out
    assert [line.split()[-3:] for line in shown.splitlines() if worn.nguid in line] == [["12", "%", "41"]]


@pytest.mark.parametrize(
    ("said", "health"),
    [
        ([], "unknown"),
        ([{}], "good"),
        ([{}, {"reads_held_off": True}], "held off"),
        ([{"writes_held_off": True}, {}], "held off"),
        ([{"reads_held_off": True}, {"condition": "suspect"}], "suspect"),
        ([{"condition": "failed", "reads_held_off": True}, {"condition": "suspect"}], "failed"),
    ],
)
def test_a_drive_is_as_well_as_the_agent_says_for_which_it_is_worst(
    service: AdminService, said: list[dict[str, Any]], health: str
) -> None:
    service.onboarded("shelf-1")
    (there,) = service.membership.map.enclosures.values()
    for number, each in enumerate(said):
        drives = (DriveStatus(there.drives[0].id, **each),)
        service.agents[AgentId(f"agent-{number}")].drives = drives
    (drive,) = service.ask("GET", "/v1/drives").body["items"]
    assert drive["health"] == health


def test_the_audit_log_says_who_changed_what(
    service: AdminService, ostraca: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.onboarded("shelf-1")
    ostraca.become("operator")
    assert ostraca("enclosure", "drain", "shelf-1", "--force").code == 0
    assert ostraca("enclosure", "undrain", "shelf-1", "--watch").code == 0
    first, *_, last = ostraca("audit").out.splitlines()
    assert "  alice (admin)  PUT /v1/enclosures/shelf-1  onboard " in first
    assert "  oscar (operator)  POST /v1/enclosures/shelf-1:undrain  undrain " in last
    assert ostraca("audit", "--last", "1").out.splitlines() == [last]
    monkeypatch.setattr(client, "PAGE", 2)
    entries = service.ask("GET", "/v1/audit").body["items"]
    assert ostraca("audit", "--json").json == {"items": entries, "next": ""}
    assert ostraca("audit", "--last", "2", "--json").json == {"items": entries[-2:], "next": ""}
