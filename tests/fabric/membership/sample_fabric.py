"""A small fabric, as it lies in etcd: what the reference page shows."""

from __future__ import annotations

from ostraca_admin import model
from ostraca_admin.model import (
    AuditEntry,
    ChosenDrive,
    DriveUse,
    EnclosurePhase,
    EnclosureSpec,
    Operation,
    OperationState,
    RegistrationStatus,
    RetiredEnclosure,
    Step,
)
from ostraca_fabric.membership.etcd.schema import records
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.rules import ShardGrants
from ostraca_fabric.model import overrides, record_keys
from ostraca_fabric.model.fabric_map import (
    AgentRecord,
    Claim,
    DriveRecord,
    EnclosureRecord,
    Grant,
    PlacementRecord,
    ShardRecord,
)
from ostraca_fabric.model.ids import (
    AgentId,
    EnclosureId,
    FabricId,
    OwnerEpoch,
    PlacementEpoch,
    StartId,
    TenantId,
    drive_id,
    shard_id,
)
from ostraca_fabric.model.inventory import DriveReport, DriveWear, EnclosureReport
from ostraca_fabric.model.target import Controller, Target, TargetTransport
from ostraca_fabric.model.volume import KvGroup, Layout, VolumeRecord
from ostraca_fabric.tables.digests import fabric_key_check

FABRIC = FabricId(bytes(range(16)))
NOW, BEFORE = StartId(b"\x11" * 16), StartId(b"\x22" * 16)
HOST, OTHER = AgentId("host-1"), AgentId("host-2")
SHELF = EnclosureId("shelf-1")
DRIVE = drive_id(SHELF, "nvme0")
SHARD = shard_id(DRIVE, 0)

AGENT = AgentRecord(HOST, NOW, ("tls://host-1:7420",))
NGUID = "36344630528001050025384100000001"
NQN = "nqn.2025-01.io.ostraca:shelf-1"
CONTROLLERS = (
    Controller(TargetTransport.RDMA, "10.0.8.1", 4420),
    Controller(TargetTransport.TCP, "10.0.9.1", 4420),
)
ENCLOSURE = EnclosureRecord(
    SHELF,
    (DriveRecord(DRIVE, nguid=NGUID),),
    (ShardRecord(SHARD, DRIVE, offset=0, size_bytes=1 << 40, weight=1 << 40, usable_bytes=1 << 40),),
    target=Target(NQN, CONTROLLERS, secret="shelf-1"),
)
REPORT = EnclosureReport(
    SHELF,
    BEFORE,
    NQN,
    CONTROLLERS,
    (
        DriveReport(
            "nvme0n1",
            NGUID,
            size_bytes=1 << 40,
            lba_bytes=4096,
            model="Example 1T",
            serial="S1",
            firmware="1.0",
            is_exported=True,
            wear=DriveWear(3, 100, 10, 0, 41, 12 << 40, 30 << 40, 9000),
        ),
    ),
    hosts=("nqn.2025-01.io.ostraca:host-1",),
    sentence="1 of 1 drives exported to 1 host at rdma://10.0.8.1:4420, tcp://10.0.9.1:4420",
    unix_s=1767225600.0,
)
EPOCH = PlacementEpoch(8)
EARLIER = PlacementRecord(PlacementEpoch(7), {SHELF: {SHARD: 1 << 39}})
CLAIM = Claim(HOST, NOW, OwnerEpoch(4))
GRANTS = ShardGrants(
    OwnerEpoch(4),
    (
        Grant(OwnerEpoch(3), OTHER, BEFORE, (12, 13), is_closed=True),
        Grant(OwnerEpoch(4), HOST, NOW, (14, 15, 16)),
    ),
)
VOLUME = VolumeRecord(
    TenantId("acme"), "llama-70b", Layout("llama-70b@a1b2c3", "bf16", 16, (KvGroup(80, 8, 128),)), 5 << 20
)

SPEC = EnclosureSpec(model.VERSION, SHELF, NQN, tuple(map(str, CONTROLLERS)), "shelf-1", "row-7")
OPERATION = Operation(
    model.VERSION,
    "019b76da1000-0a1b2c3d",
    model.OperationKind.ONBOARD,
    SHELF,
    "alice",
    1767225600.0,
    (
        Step(
            "reachable", OperationState.DONE, "2 of 2 agents reach the enclosure", 1767225600.0, 1767225601.0
        ),
    ),
    OperationState.DONE,
    "1 drive in the map",
    1.0,
    ended_unix_s=1767225609.0,
)
CHOSEN = ChosenDrive("nvme0", NGUID, "44" * 16, 1 << 40, "Example 1T", "S1", 1 << 40, 1 << 40, 16 << 20)
STATUS = RegistrationStatus(model.VERSION, EnclosurePhase.READY, OPERATION.id, (CHOSEN,), 1)
AUDIT = AuditEntry(
    model.VERSION,
    "019b76da1000-5e6f7a8b",
    1767225600.0,
    "alice",
    "admin",
    "PUT /v1/enclosures/shelf-1",
    SHELF,
    f"onboard {OPERATION.id}",
)
TENANT = overrides.TenantOverride(overrides.VERSION, VOLUME.tenant, 8 << 40, 20 << 30)
SWITCH = overrides.VolumeOverride(overrides.VERSION, VOLUME.tenant, VOLUME.name, overrides.Switch.SHADOW)
RETIRED = RetiredEnclosure(model.VERSION, "shelf-0", "019b76da0000-0a1b2c3d")
DRIVE_USE = DriveUse(model.VERSION, SHELF, "nvme0")


def lines(keys: EtcdKeys) -> list[tuple[bytes, bytes]]:
    """Return every kind of key with its value, in the order that etcd lists them in."""
    made = {
        keys.meta(): records.encode_meta(FABRIC, fabric_key_check(bytes(32), FABRIC)),
        keys.agent(HOST): records.encode_agent(AGENT),
        keys.enclosure(SHELF): records.encode_enclosure(ENCLOSURE),
        keys.placement(): records.encode_placement(EPOCH),
        keys.earlier_placement(EARLIER.epoch): records.encode_earlier_placement(EARLIER),
        keys.claim(SHARD): records.encode_claim(SHARD, CLAIM),
        keys.grants(SHARD): records.encode_grants(GRANTS),
        keys.volume(VOLUME.tenant, VOLUME.name): records.encode_volume(VOLUME),
        keys.report(SHELF): records.encode_report(REPORT),
        keys.record(record_keys.spec(SHELF)): model.encode(SPEC),
        keys.record(record_keys.status(SHELF)): model.encode(STATUS),
        keys.record(record_keys.operation(OPERATION.id)): model.encode(OPERATION),
        keys.record(record_keys.work(OPERATION.id)): b'{"version":1,"admin":"admin-0"}',
        keys.record(record_keys.nguid(NGUID)): model.encode(DRIVE_USE),
        keys.record(record_keys.retired(EnclosureId(RETIRED.enclosure))): model.encode(RETIRED),
        keys.record(record_keys.audit(AUDIT.id)): model.encode(AUDIT),
        keys.record(record_keys.tenant(VOLUME.tenant)): overrides.encode(TENANT),
        keys.record(record_keys.switch(VOLUME.tenant, VOLUME.name)): overrides.encode(SWITCH),
        keys.record(record_keys.live()): overrides.encode(overrides.LiveSettings()),
        keys.overrides_marker(): overrides.OVERRIDES_MARKER,
    }
    return sorted(made.items())


def shown(keys: EtcdKeys | None = None) -> list[str]:
    """Return what ``etcdctl get --prefix`` prints."""
    return [text.decode() for line in lines(keys or EtcdKeys()) for text in line]
