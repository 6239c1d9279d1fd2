"""Which tenant's workers may read drives themselves: the named one, alone in its fabric."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.direct_reads import (
    DirectReadPermission,
    foreign_trace,
    may_read_directly,
    second_tenant_refusal,
)
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import VERSION, LiveSettings, Overrides, TenantOverride, decode, encode
from ostraca_fabric.model.volume import Layout, VolumeRecord

ACME, OTHER = TenantId("acme"), TenantId("other")


def volume(tenant: TenantId, name: str = "v") -> VolumeRecord:
    return VolumeRecord(tenant, name, Layout("m", "bf16", 16), 4096)


def ruled(direct: str, *tenants: TenantId) -> Overrides:
    """Return overrides with direct reads of a tenant, and these tenants."""
    created = {tenant: TenantOverride(VERSION, tenant) for tenant in tenants}
    return Overrides(created, live=LiveSettings(direct_reads_tenant=direct))


@pytest.mark.parametrize(
    ("overrides", "volumes", "tenant", "may"),
    [
        (ruled("acme"), (), ACME, True),
        (ruled("acme", ACME), (volume(ACME), volume(ACME, "w")), ACME, True),
        (ruled(""), (volume(ACME),), ACME, False),
        (ruled("acme"), (volume(ACME),), OTHER, False),
        (ruled("acme"), (volume(ACME), volume(OTHER)), ACME, False),
        (ruled("acme", ACME, OTHER), (volume(ACME),), ACME, False),
        (ruled("acme"), (volume(OTHER),), OTHER, False),
        (ruled(""), (), TenantId(""), False),
    ],
)
def test_only_the_named_tenant_may_and_only_alone(
    overrides: Overrides, volumes: tuple[VolumeRecord, ...], tenant: TenantId, may: bool
) -> None:
    assert DirectReadPermission().allows(overrides, volumes, tenant) is may
    assert may_read_directly(overrides, volumes, tenant) is may


def test_a_permission_follows_changes_of_overrides_and_of_volumes() -> None:
    permission, on, alone = DirectReadPermission(), ruled("acme"), (volume(ACME),)
    assert permission.allows(on, alone, ACME)
    assert not permission.allows(on, (*alone, volume(OTHER)), ACME)
    assert permission.allows(on, alone, ACME)
    assert not permission.allows(ruled(""), alone, ACME)
    assert not permission.allows(ruled("other"), alone, OTHER)


class CountedTuple(tuple[VolumeRecord, ...]):  # noqa: SLOT001 (has a counter)
    """Volumes that count how often they are looked through."""

    looks = 0

    def __iter__(self) -> Iterator[VolumeRecord]:
        self.looks += 1
        return super().__iter__()


def test_a_permission_is_decided_once_for_the_same_state() -> None:
    permission, on, volumes = DirectReadPermission(), ruled("acme"), CountedTuple([volume(ACME)])
    assert all(permission.allows(on, volumes, ACME) for _ in range(3))
    assert not permission.allows(on, volumes, OTHER)
    assert volumes.looks == 1


def test_the_first_trace_of_another_tenant_is_named() -> None:
    assert foreign_trace("acme", ["acme"], [volume(ACME)]) == ""
    assert foreign_trace("acme", ["acme", "other"], [volume(OTHER)]) == "tenant other"
    assert foreign_trace("acme", [], [volume(ACME), volume(OTHER, "w")]) == "volume w of tenant other"


def test_a_second_tenant_is_refused_with_advice_and_the_first_is_not() -> None:
    assert second_tenant_refusal("", "other") == second_tenant_refusal("acme", "acme") == ""
    refusal = second_tenant_refusal("acme", "other")
    assert "`ostraca settings unset direct_reads_tenant`" in refusal
    assert refusal.startswith("tenant other can't be added")


def test_the_setting_is_a_name_kept_in_the_record_and_off_in_earlier_records() -> None:
    with pytest.raises(UsageError, match="tenant 'Acme!' is not a usable name"):
        LiveSettings(direct_reads_tenant="Acme!")
    on = LiveSettings(direct_reads_tenant="acme")
    assert decode(encode(on), LiveSettings) == on
    assert on.in_force() == {"direct_reads_tenant": "acme"}
    assert decode(b'{"version":1,"key_ttl_s":900.0}', LiveSettings).direct_reads_tenant == ""
