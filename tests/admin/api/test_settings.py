"""Settings of all agents at the admin service and by ``ostraca settings``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from tests.admin.cli.commands import Commands
from tests.admin.service import AdminService

from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import (
    OVERRIDES_MARKER,
    VERSION,
    LiveSettings,
    LogLevel,
    TenantOverride,
    decode,
    encode,
)
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.ports.records import RecordChange

PATH = "/v1/settings"
UNSET = {
    "key_ttl_s": 900.0,
    "log_level": None,
    "requests_max": None,
    "deadline_max_s": None,
    "placement_ttl_s": None,
    "scrub": None,
    "direct_reads_tenant": None,
}
DIRECT = {"direct_reads_tenant": "acme"}


def kept(service: AdminService) -> LiveSettings | None:
    """Return the settings sent to agents."""
    found = service.do(service.records.get(record_keys.live()))
    return None if found is None else decode(found.value, LiveSettings)


def test_settings_are_set_all_at_once_with_an_audit_entry(service: AdminService) -> None:
    first = service.ask("GET", PATH, role="viewer")
    assert (first.body, first.headers["ETag"]) == (UNSET, '"0"')
    form = {"log_level": "debug", "requests_max": 64, "scrub": False, "deadline_max_s": 30}
    put = service.ask("PUT", PATH, form, headers={"If-Match": '"0"'})
    assert (put.status, put.body) == (200, {**UNSET, **form})
    set_now = LiveSettings(log_level=LogLevel.DEBUG, requests_max=64, deadline_max_s=30.0, scrub=False)
    assert kept(service) == set_now
    ruled = service.do(service.records.get(record_keys.overrides_marker()))
    assert ruled is not None
    again = service.ask("PUT", PATH, form)
    assert (again.status, again.headers["ETag"]) == (200, put.headers["ETag"])
    assert service.do(service.records.get(record_keys.overrides_marker())) == ruled, "nothing was written"
    late = service.ask("PUT", PATH, {}, headers={"If-Match": '"0"'})
    assert (late.status, kept(service)) == (412, set_now)
    (entry,) = service.ask("GET", "/v1/audit").body["items"]
    assert (entry["actor"], entry["action"], entry["subject"]) == ("alice", f"PUT {PATH}", "settings")
    assert '"requests_max":64' in entry["detail"]
    assert service.ask("PUT", PATH, {}).body == UNSET
    assert kept(service) == LiveSettings()


def test_only_admins_set_them_and_only_what_can_be_meant(service: AdminService) -> None:
    for role, status in (("", 401), ("viewer", 403), ("operator", 403)):
        assert service.ask("PUT", PATH, {}, role=role).status == status
    for form in (
        {"colour": "blue"},
        {"log_level": "loud"},
        {"requests_max": 0},
        {"requests_max": True},
        {"deadline_max_s": 0},
        {"deadline_max_s": 1e10},
        {"placement_ttl_s": "long"},
        {"scrub": 1},
        {"direct_reads_tenant": ""},
        {"direct_reads_tenant": "Acme!"},
    ):
        assert service.ask("PUT", PATH, form).status == 422, form
    assert service.ask("PUT", PATH, b'{"deadline_max_s": NaN}').status == 422
    assert kept(service) is None


def test_settings_are_set_and_taken_back_by_command(service: AdminService, ostraca: Commands) -> None:
    ran = ostraca("settings", "set", "log_level=debug", "scrub=off", "deadline_max_s=2.5")
    assert (ran.code, ran.err) == (0, "")
    assert kept(service) == LiveSettings(log_level=LogLevel.DEBUG, deadline_max_s=2.5, scrub=False)
    assert ostraca("settings", "set", "requests_max=9").code == 0, "what was set before stays"
    shown = [line.split(maxsplit=1) for line in ostraca("settings", "show").out.splitlines()]
    etag = shown[-1][1].strip()
    assert [each[1].strip() for each in shown[:-1]] == [
        *("900.0", "debug", "9", "2.5", "unset", "off", "unset"),
    ]
    unset = ostraca("settings", "unset", "log_level", "requests_max", "--json", "--if-match", etag)
    assert unset.json == {**UNSET, "scrub": False, "deadline_max_s": 2.5}
    late = ostraca("settings", "unset", "scrub", "--if-match", etag)
    assert (late.code, "then decide" in late.err) == (3, True)
    unknown = ostraca("settings", "set", "colour=blue")
    assert (unknown.code, "'colour' is no live setting: take any of key_ttl_s, log_level" in unknown.err) == (
        2,
        True,
    )
    assert ostraca("settings", "set", "log_level").code == 2
    ostraca.become("operator")
    assert ostraca("settings", "unset", "scrub").code == 1
    assert kept(service) == LiveSettings(deadline_max_s=2.5, scrub=False)


def test_the_longest_time_that_keys_ever_lived_is_kept_for_erasures(service: AdminService) -> None:
    """An agent that is cut off may go by what was ruled before."""
    for seconds, longest in ((1800, 1800), (60, 1800), (None, 1800), (2000, 2000)):
        assert service.ask("PUT", "/v1/settings", {"key_ttl_s": seconds}).status == 200
        kept = service.do(service.records.get(record_keys.live()))
        assert kept is not None
        live = decode(kept.value, LiveSettings)
        assert (live.key_ttl_s, live.key_ttl_longest_s) == (seconds or 900, longest)


def has_volume(service: AdminService, tenant: str, name: str = "v") -> None:
    """Let an agent have made a volume of a tenant."""
    record = VolumeRecord(TenantId(tenant), name, Layout("m", "bf16", 16), 4096)
    service.do(service.membership.create_volume(record))


def changes_meanwhile(service: AdminService, monkeypatch: pytest.MonkeyPatch, key: str, value: bytes) -> None:
    """Let another admin service write an override just before the next write."""
    write = service.records.write

    async def late(changes: Sequence[RecordChange], *, unchanged: Mapping[str, int]) -> int | None:
        monkeypatch.undo()
        marker = RecordChange(record_keys.overrides_marker(), OVERRIDES_MARKER)
        assert await write([RecordChange(key, value), marker], unchanged={}) is not None
        return await write(changes, unchanged=unchanged)

    monkeypatch.setattr(service.records, "write", late)


def test_direct_reads_are_for_the_only_tenant_of_a_fabric(service: AdminService) -> None:
    assert service.ask("PUT", "/v1/tenants/acme", {}).status == 201
    has_volume(service, "acme")
    put = service.ask("PUT", PATH, DIRECT)
    assert (put.status, put.body) == (200, {**UNSET, **DIRECT})
    assert kept(service) == LiveSettings(direct_reads_tenant="acme")
    assert service.ask("PUT", "/v1/tenants/acme", {"agent_bytes_per_s": 1}).status == 200
    refused = service.ask("PUT", "/v1/tenants/other", {})
    assert refused.status == 409
    assert "first `ostraca settings unset direct_reads_tenant`" in refused.body["detail"]
    assert service.ask("GET", "/v1/tenants/other").status == 404
    assert service.ask("PUT", PATH, {}).status == 200
    assert service.ask("PUT", "/v1/tenants/other", {}).status == 201


def test_direct_reads_are_refused_beside_a_volume_or_the_limits_of_another_tenant(
    service: AdminService,
) -> None:
    for tenant in ("acme", "other"):
        assert service.ask("PUT", f"/v1/tenants/{tenant}", {}).status == 201
    refused = service.ask("PUT", PATH, DIRECT)
    assert (refused.status, "has tenant other" in refused.body["detail"]) == (409, True)
    assert service.ask("DELETE", "/v1/tenants/other").status == 200
    has_volume(service, "other")
    refused = service.ask("PUT", PATH, DIRECT)
    assert (refused.status, "has volume v of tenant other" in refused.body["detail"]) == (409, True)
    assert kept(service) is None


def test_direct_reads_and_a_second_tenant_at_once_conflict(
    service: AdminService, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = encode(TenantOverride(VERSION, "other"))
    changes_meanwhile(service, monkeypatch, record_keys.tenant(TenantId("other")), other)
    assert service.ask("PUT", PATH, DIRECT).status == 409
    assert kept(service) is None
    assert service.ask("DELETE", "/v1/tenants/other").status == 200
    direct = encode(LiveSettings(direct_reads_tenant="acme"))
    changes_meanwhile(service, monkeypatch, record_keys.live(), direct)
    assert service.ask("PUT", "/v1/tenants/other", {}).status == 409
    assert service.ask("GET", "/v1/tenants/other").status == 404


def test_other_settings_change_while_direct_reads_are_on(service: AdminService, ostraca: Commands) -> None:
    assert ostraca("settings", "set", "direct_reads_tenant=acme").code == 0
    has_volume(service, "other")  # made by an agent of an earlier release
    assert ostraca("settings", "set", "log_level=debug").code == 0
    assert ostraca("settings", "unset", "direct_reads_tenant").code == 0
    refused = ostraca("settings", "set", "direct_reads_tenant=acme")
    assert (refused.code, "leave direct_reads_tenant unset" in refused.err) == (3, True)
    assert kept(service) == LiveSettings(log_level=LogLevel.DEBUG)
