"""Volumes at the admin service and by ``ostraca volume``: which there are, and their switches."""

from __future__ import annotations

import pytest
from tests.admin.cli.commands import Commands
from tests.admin.service import AdminService

from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import Switch, VolumeOverride, decode
from ostraca_fabric.model.volume import Layout, VolumeRecord

PATH = "/v1/volumes/acme/llama"


@pytest.fixture(autouse=True)
def volumes(service: AdminService) -> None:
    for tenant, name in (("acme", "llama"), ("acme", "qwen"), ("zeta", "llama")):
        record = VolumeRecord(
            TenantId(tenant), name, Layout(model=f"{name}-70b", dtype="bf16", page_tokens=16), 1 << 20
        )
        service.do(service.membership.create_volume(record))


def kept(service: AdminService) -> tuple[Switch | None, int]:
    """Return the volume's switches sent to agents, and the revision of all overrides."""
    found = service.do(service.records.get(record_keys.switch(TenantId("acme"), "llama")))
    ruled = service.do(service.records.get(record_keys.overrides_marker()))
    switch = None if found is None else decode(found.value, VolumeOverride).switch
    return switch, 0 if ruled is None else ruled.revision


def audited(service: AdminService) -> list[tuple[str, str, str]]:
    entries = service.ask("GET", "/v1/audit").body["items"]
    return [(entry["actor"], entry["action"], entry["subject"]) for entry in entries]


def test_a_switch_is_written_with_its_audit_entry_and_the_same_again_changes_nothing(
    service: AdminService,
) -> None:
    assert service.ask("GET", PATH, role="viewer").body["switch"] == "on"
    first = service.ask("PUT", f"{PATH}/switch", {"switch": "off"}, role="operator")
    assert (first.status, first.body["switch"]) == (200, "off")
    switch, revision = kept(service)
    assert (switch, revision > 0) == (Switch.OFF, True)
    again = service.ask("PUT", f"{PATH}/switch", {"switch": "off"}, role="operator")
    assert (again.status, again.headers["ETag"]) == (200, first.headers["ETag"])
    assert kept(service) == (switch, revision)
    assert audited(service) == [("oscar", f"PUT {PATH}/switch", "acme/llama")]
    assert service.ask("GET", PATH).body["switch"] == "off"
    listed = service.ask("GET", "/v1/volumes").body["items"]
    assert [(each["tenant"], each["name"], each["switch"]) for each in listed] == [
        ("acme", "llama", "off"),
        ("acme", "qwen", "on"),
        ("zeta", "llama", "on"),
    ]


def test_switches_are_listed_page_by_page(service: AdminService) -> None:
    service.ask("PUT", "/v1/volumes/zeta/llama/switch", {"switch": "shadow"})
    service.ask("PUT", "/v1/volumes/acme/qwen/switch", {"switch": "off"})
    after, seen = "", []
    while True:
        page = service.ask("GET", f"/v1/volumes?limit=1&after={after}").body
        seen += [each["switch"] for each in page["items"]]
        if not (after := page["next"]):
            break
    assert seen == ["on", "off", "shadow"]


def test_who_read_an_older_switch_changes_nothing(service: AdminService) -> None:
    etag = service.ask("GET", PATH).headers["ETag"]
    first = service.ask("PUT", f"{PATH}/switch", {"switch": "off"}, headers={"If-Match": etag})
    assert first.status == 200
    late = service.ask("PUT", f"{PATH}/switch", {"switch": "on"}, headers={"If-Match": etag})
    assert (late.status, kept(service)[0]) == (412, Switch.OFF)
    newest = service.ask("GET", PATH).headers["ETag"]
    assert newest == first.headers["ETag"]
    assert service.ask("PUT", f"{PATH}/switch", {"switch": "on"}, headers={"If-Match": newest}).status == 200
    assert kept(service)[0] is Switch.ON


REFUSED: tuple[tuple[str, str, object, str, int], ...] = (
    ("PUT", f"{PATH}/switch", {"switch": "off"}, "viewer", 403),
    ("PUT", f"{PATH}/switch", {"switch": "off"}, "", 401),
    ("GET", PATH, None, "", 401),
    ("PUT", "/v1/volumes/acme/nothing/switch", {"switch": "off"}, "operator", 404),
    ("PUT", "/v1/volumes/zeta/qwen/switch", {"switch": "off"}, "operator", 404),
    ("GET", "/v1/volumes/acme/nothing", None, "viewer", 404),
    ("PUT", f"{PATH}/switch", {"switch": "maybe"}, "operator", 422),
    ("PUT", f"{PATH}/switch", {}, "operator", 422),
)


def test_what_is_refused_changes_nothing(service: AdminService) -> None:
    for method, path, body, role, status in REFUSED:
        answer = service.ask(method, path, body, role=role)
        assert answer.status == status, answer
    assert kept(service) == (None, 0)
    assert audited(service) == []


def test_a_volume_is_switched_by_command(service: AdminService, ostraca: Commands) -> None:
    ostraca.become("operator")
    ran = ostraca("volume", "switch", "acme/llama", "shadow")
    assert (ran.code, ran.out, ran.err) == (0, "volume acme/llama: shadow\n", "")
    assert kept(service)[0] is Switch.SHADOW
    shown = ostraca("volume", "show", "acme/llama").out.splitlines()
    assert [line.split() for line in shown[:2]] == [["volume", "acme/llama"], ["switch", "shadow"]]
    etag = shown[-1].split()[-1]
    assert ostraca("volume", "switch", "acme/llama", "on", "--if-match", etag).code == 0
    late = ostraca("volume", "switch", "acme/llama", "off", "--if-match", etag)
    assert (late.code, "then decide" in late.err) == (3, True)
    assert [line.split()[:3] for line in ostraca("volume", "list").out.splitlines()[1:]] == [
        ["acme", "llama", "on"],
        ["acme", "qwen", "on"],
        ["zeta", "llama", "on"],
    ]
    assert ostraca("volume", "list", "--json").json == service.ask("GET", "/v1/volumes").body
    assert ostraca("volume", "show", "acme/llama", "--json").json == service.ask("GET", PATH).body
    ran = ostraca("volume", "switch", "zeta/llama", "off", "--json")
    assert ran.json == service.ask("GET", "/v1/volumes/zeta/llama").body


MEANINGLESS = (
    (("switch", "acme/nothing", "off"), 1, "has no volume nothing"),
    (("switch", "llama", "off"), 2, "write TENANT/NAME"),
    (("switch", "acme/llama/x", "off"), 2, "write TENANT/NAME"),
    (("switch", "acme/llama", "maybe"), 2, "invalid choice"),
    (("show", "acme/nothing"), 1, "has no volume nothing"),
    (("show", "acme/No Thing"), 2, "name"),
)


def test_a_command_that_can_not_be_meant_says_so(ostraca: Commands) -> None:
    for argv, code, says in MEANINGLESS:
        ran = ostraca("volume", *argv)
        assert (ran.code, ran.out) == (code, "")
        assert says in ran.err
