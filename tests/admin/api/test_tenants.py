"""Tenants over REST and from the command line: what they may use, and how what they have put is erased."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.admin.cli.commands import Commands
from tests.admin.service import WITHIN_S, AdminService

from ostraca_admin.model import STEPS, Operation, OperationKind, OperationState, Step, encode
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import AgentId, TenantId
from ostraca_fabric.model.overrides import VERSION, LiveSettings, Overrides, TenantOverride
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.ports.records import RecordChange
from ostraca_fabric.telemetry.status import ShardStatus

ACME = {"flash_bytes": 8 << 40, "agent_bytes_per_s": 2 << 30, "is_erasable": True}


def has_volume(service: AdminService, name: str, *, is_erasable: bool) -> VolumeRecord:
    """Let an agent have made a volume of tenant acme."""
    record = VolumeRecord(TenantId("acme"), name, Layout("m", "bf16", 16), 4096, is_erasable=is_erasable)
    return service.do(service.membership.create_volume(record))


def until(shows: Callable[[], bool]) -> None:
    """Ask again and again until something is so."""
    by_s = time.monotonic() + WITHIN_S
    while not shows():
        assert time.monotonic() < by_s, "it never was"
        time.sleep(0.02)


def keys_live(service: AdminService, seconds: float) -> None:
    """Let an agent that is cut off serve erasable volumes for so long."""
    service.rule(Overrides(live=LiveSettings(key_ttl_s=seconds, key_ttl_longest_s=seconds)))


def test_a_tenant_is_made_changed_and_forgotten_and_all_of_it_is_in_the_audit_log(
    service: AdminService,
) -> None:
    made = service.ask("PUT", "/v1/tenants/acme", ACME)
    assert (made.status, made.body) == (
        201,
        {"name": "acme", **ACME, "volumes": [], "flash_used_bytes": 0},
    )
    again = service.ask("PUT", "/v1/tenants/acme", ACME)
    assert (again.status, again.headers["ETag"]) == (200, made.headers["ETag"])
    changed = service.ask("PUT", "/v1/tenants/acme", {}, headers={"If-Match": made.headers["ETag"]})
    assert (changed.status, changed.body["flash_bytes"], changed.body["is_erasable"]) == (200, 0, False)
    late = service.ask("PUT", "/v1/tenants/acme", ACME, headers={"If-Match": made.headers["ETag"]})
    assert late.status == 412
    assert service.ask("GET", "/v1/tenants/acme").headers["ETag"] == changed.headers["ETag"]
    assert [each["name"] for each in service.ask("GET", "/v1/tenants").body["items"]] == ["acme"]
    assert service.ask("DELETE", "/v1/tenants/acme").status == 200
    assert service.ask("DELETE", "/v1/tenants/acme").status == 404
    assert service.ask("GET", "/v1/tenants/acme").status == 404
    told = [(each["action"], each["subject"]) for each in service.ask("GET", "/v1/audit").body["items"]]
    assert told == [("PUT /v1/tenants/acme", "acme")] * 2 + [("DELETE /v1/tenants/acme", "acme")]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/v1/tenants/acme", ACME),
        ("DELETE", "/v1/tenants/acme", None),
        ("POST", "/v1/tenants/acme:erase", {}),
    ],
)
def test_only_an_admin_changes_tenants(service: AdminService, method: str, path: str, body: Any) -> None:
    for role in ("operator", "viewer"):
        assert service.ask(method, path, body, role=role).status == 403
    assert service.ask("GET", "/v1/tenants", role="viewer").body["items"] == []


@pytest.mark.parametrize(
    "form", [{"flash_bytes": -1}, {"agent_bytes_per_s": 1 << 61}, {"is_erasable": "yes"}, {"quota": 1}]
)
def test_what_can_not_be_meant_is_refused(service: AdminService, form: dict[str, Any]) -> None:
    assert service.ask("PUT", "/v1/tenants/acme", form).status == 422


def test_a_tenant_is_erasable_before_its_first_volume_or_never(service: AdminService) -> None:
    has_volume(service, "v", is_erasable=False)
    refused = service.ask("PUT", "/v1/tenants/acme", ACME)
    assert refused.status == 409
    assert "as v, fixed at their creation" in refused.body["detail"]
    assert service.ask("PUT", "/v1/tenants/acme", {**ACME, "is_erasable": False}).status == 201
    erased = service.ask("POST", "/v1/tenants/acme:erase", {})
    assert erased.status == 409
    assert "before its first volume" in erased.body["detail"]
    assert service.membership.store.volumes[TenantId("acme"), "v"].incarnation == 1


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_tenant_of_erasable_volumes_alone_becomes_erasable_again(
    service: AdminService, *, is_deleted: bool
) -> None:
    assert service.ask("PUT", "/v1/tenants/acme", ACME).status == 201
    has_volume(service, "v", is_erasable=True)
    assert service.ask("PUT", "/v1/tenants/acme", {"agent_bytes_per_s": 1 << 30}).status == 200
    if is_deleted:
        assert service.ask("DELETE", "/v1/tenants/acme").status == 200
    again = service.ask("PUT", "/v1/tenants/acme", ACME)
    assert (again.status, again.body["is_erasable"]) == (201 if is_deleted else 200, True)


def test_the_refusal_names_a_volume_without_erasure(service: AdminService) -> None:
    has_volume(service, "a", is_erasable=True)
    has_volume(service, "b", is_erasable=False)
    refused = service.ask("PUT", "/v1/tenants/acme", ACME)
    assert refused.status == 409
    assert "without erasure, as b, fixed" in refused.body["detail"]


def test_an_erasable_tenant_changes_its_rate_beside_a_volume_of_an_agent_that_knew_less(
    service: AdminService,
) -> None:
    assert service.ask("PUT", "/v1/tenants/acme", ACME).status == 201
    has_volume(service, "v", is_erasable=False)
    assert service.ask("PUT", "/v1/tenants/acme", {**ACME, "agent_bytes_per_s": 1 << 30}).status == 200


@pytest.mark.parametrize("etag", ["x", "-1", "1" * 5000], ids=["word", "sign", "digits"])
def test_an_etag_of_no_service_matches_nothing(service: AdminService, etag: str) -> None:
    answer = service.ask("PUT", "/v1/tenants/acme", ACME, headers={"If-Match": f'"{etag}"'})
    assert answer.status == 412
    assert answer.body["detail"].startswith("If-Match has no ETag of this service: ")


def test_who_has_nothing_to_erase_is_told_so(service: AdminService) -> None:
    has_volume(service, "v", is_erasable=True)
    for tenant, volume in (("nobody", ""), ("acme", "w")):
        answer = service.ask("POST", f"/v1/tenants/{tenant}:erase", {"volume": volume})
        assert answer.status == 404


def test_an_erasure_waits_for_every_agent_and_for_who_may_be_cut_off(service: AdminService) -> None:
    keys_live(service, 0.5)
    has_volume(service, "v", is_erasable=True)
    has_volume(service, "w", is_erasable=True)
    slow = service.agents[AgentId("agent-1")]
    heard, slow.incarnations = slow.incarnations, None
    begun = service.ask("POST", "/v1/tenants/acme:erase", {"volume": "v"})
    assert begun.status == 202
    path = f"/v1/operations/{begun.body['id']}"
    until(lambda: "waiting for agent-1" in service.ask("GET", path).body["steps"][1]["message"])
    slow.incarnations = heard
    ended = service.ended(begun.body["id"])
    assert (ended.state, ended.message) == (
        OperationState.DONE,
        "no agent can serve the erased blocks",
    )
    found = {name: each.incarnation for (_, name), each in service.membership.store.volumes.items()}
    assert found == {"v": 2, "w": 1}
    assert ended.ended_unix_s - ended.steps[0].ended_unix_s >= 0.5


def test_what_was_put_after_an_unfinished_erasure_is_erased_by_the_next(service: AdminService) -> None:
    keys_live(service, 0.5)
    has_volume(service, "v", is_erasable=True)
    first = service.ask("POST", "/v1/tenants/acme:erase", {}).body["id"]
    volumes = service.membership.store
    until(lambda: volumes.volumes[TenantId("acme"), "v"].incarnation == 2)  # and blocks are put there
    second = service.ask("POST", "/v1/tenants/acme:erase", {}).body["id"]
    assert [service.ended(each).state for each in (first, second)] == [OperationState.DONE] * 2
    assert volumes.volumes[TenantId("acme"), "v"].incarnation == 3


def test_an_erasure_that_no_admin_has_begun_yet_is_the_next_one_too(service: AdminService) -> None:
    has_volume(service, "v", is_erasable=True)
    steps = tuple(Step(name) for name in STEPS[OperationKind.ERASE])
    waiting = Operation(1, "1", OperationKind.ERASE, "", "alice", 0.0, steps, tenant="acme")
    assert service.do(service.records.hold(record_keys.work("1"), b"another admin"))
    written = RecordChange(record_keys.operation("1"), encode(waiting))
    service.do(service.records.write([written], unchanged={}))
    assert service.ask("POST", "/v1/tenants/acme:erase", {}).body["id"] == "1"


def test_an_operation_that_can_not_be_read_keeps_no_tenant_from_being_erased(service: AdminService) -> None:
    has_volume(service, "v", is_erasable=True)
    newer = RecordChange(record_keys.operation("0"), b'{"version":2}')
    service.do(service.records.write([newer], unchanged={}))
    assert service.ask("POST", "/v1/tenants/acme:erase", {}).status == 202


def test_a_volume_that_can_not_be_read_is_not_told_to_be_erased(service: AdminService) -> None:
    has_volume(service, "v", is_erasable=True)
    newer = RecordChange(f"{record_keys.volumes(TenantId('acme'))}w", b'{"version":2}')
    service.do(service.records.write([newer], unchanged={}))
    ended = service.ended(service.ask("POST", "/v1/tenants/acme:erase", {}).body["id"])
    assert ended.state is OperationState.FAILED
    assert "volume w of tenant acme can't be read: upgrade" in ended.message
    assert service.membership.store.volumes[TenantId("acme"), "v"].incarnation == 1


def test_an_agent_that_does_not_answer_is_outlived(service: AdminService) -> None:
    keys_live(service, 0.3)
    has_volume(service, "v", is_erasable=True)
    service.agents[AgentId("agent-1")].is_silent = True
    begun = service.ask("POST", "/v1/tenants/acme:erase", {})
    ended = service.ended(begun.body["id"])
    assert ended.state is OperationState.DONE
    assert ended.steps[1].message.startswith("no answer from agent-1")


def test_what_a_tenant_uses_is_what_owners_of_its_pool_say(service: AdminService) -> None:
    assert service.ask("PUT", "/v1/tenants/acme", ACME).body["flash_used_bytes"] == 0
    pool = TenantOverride(VERSION, "acme", 1).pool
    shard = ShardStatus("s", 1, 0, 0, 0, 0, is_failing=False)
    for agent, used in zip(service.agents.values(), (100, 20), strict=True):
        agent.shards = (replace(shard, pools=((0, 7), (pool, used))),)
    assert service.ask("GET", "/v1/tenants/acme").body["flash_used_bytes"] == 120
    assert service.ask("PUT", "/v1/tenants/acme", {}).body["flash_used_bytes"] is None


def test_names_of_tenants_are_checked_by_the_command(service: AdminService, ostraca: Commands) -> None:
    for argv in (("add", "Acme"), ("show", "Acme"), ("erase", "acme", "--volume", "V")):
        ran = ostraca("tenant", *argv)
        assert (ran.code, "is not a usable name: take 1 to 63 of a-z" in ran.err) == (2, True)
    missing = ostraca("tenant", "show", "nobody")
    assert (missing.code, missing.err) == (
        1,
        "ostraca: no tenant nobody exists: create tenants by `ostraca tenant add`, or PUT /v1/tenants/NAME\n",
    )


def test_tenants_from_the_command_line(service: AdminService, ostraca: Commands) -> None:
    keys_live(service, 0.1)
    ran = ostraca("tenant", "add", "acme", "--flash", "8TiB", "--rate", "2GiB", "--erasable")
    assert (ran.code, ran.err) == (0, "")
    assert "flash     8.0 TiB, 0 bytes in use" in ran.out
    assert "rate      2.0 GiB/s at each agent" in ran.out
    has_volume(service, "v", is_erasable=True)
    assert ostraca("tenant", "list").out.splitlines()[1].split()[-2:] == ["yes", "1"]
    assert ostraca("tenant", "show", "acme", "--json").json["volumes"] == ["v"]
    etag = ostraca("tenant", "show", "acme", "--etag").out.strip()
    assert ostraca("tenant", "add", "acme", "--erasable", "--if-match", etag).code == 0
    assert ostraca("tenant", "remove", "acme", "--if-match", etag).code == 3
    erased = ostraca("tenant", "erase", "acme", "--watch")
    assert (erased.code, erased.err) == (0, "")
    first, *steps, last = erased.out.splitlines()
    assert first.startswith("erase of acme (operation ")
    names = [step.strip().partition(": ")[0] for step in steps]
    assert list(dict.fromkeys(names)) == ["next incarnation", "purged", "expired"]
    assert last == "done: no agent can serve the erased blocks"
    assert " erase  acme  " in ostraca("operation", "list").out
    assert ostraca("tenant", "remove", "acme").out == "tenant acme: limits removed\n"
    assert ostraca("tenant", "show", "acme").code == 1
