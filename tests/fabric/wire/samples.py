"""One message of every type."""

from __future__ import annotations

from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.volume import KvGroup, Layout
from ostraca_fabric.wire import messages as m

LAYOUT = Layout("model@1", "bf16", 16, (KvGroup(2, 2, 64),))
SPANS = (Chain.of([bytes([n]) * 32 for n in range(40)], hash_bytes=32)[8:40].span(),)

SAMPLES: tuple[m.AnyMessage, ...] = (
    m.Hello(
        1, 1, "worker", "tenant", "", "test", ("a",), (m.ArenaOffer("inline", 1 << 20, 1 << 20),), bytes(16)
    ),
    m.Welcome(1, "agent", bytes(16), ("a",), m.ConnectionLimits(1 << 20, 512, 4), "inline"),
    m.Refused("limit", "too many"),
    m.Failure(1, "usage", "no"),
    m.OpenVolume(1, "volume", LAYOUT, 1 << 16, create=True, break_even_tokens=128),
    m.VolumeOpened(1, 2, 3),
    m.Lookup(1, 2, 0.5, SPANS, 1.0),
    m.LookupDone(1, bytes(32), bytes(32)),
    m.Get(1, 2, 0.5, SPANS, bytes(128), bytes(256), 1 << 16),
    m.GetProgress(1, bytes(4), bytes(16)),
    m.GetDone(1, bytes(32), bytes(32)),
    m.Put(1, 2, 0.5, 1, SPANS, bytes(128), bytes(512), bytes(256), 1 << 16, 60.0, bytes(256)),
    m.PutDone(1, bytes(32), bytes(32), bytes(4)),
    m.Prefetch(1, 2, 0.5, SPANS, "agent-1"),
    m.PrefetchDone(1, bytes(32), bytes(32)),
    m.Cancel(1),
    m.Settled(1),
    m.Ping(1),
    m.Pong(1),
    m.StatusRequest(1),
    m.StatusDone(1, b"body"),
    m.Fetch(1, bytes(8), bytes(4)),
    m.SettlePast(1),
    m.PastSettled(1),
    m.Explain(1, 0.5, "volume", SPANS),
    m.Explained(1, b"body"),
    m.EndSession(2, SPANS),
    m.DirectDrives((m.AnnouncedDrive(bytes(16), "e/d"), m.AnnouncedDrive(bytes(16), "")), reads_memory=True),
    m.GetExtents(1, bytes(8), bytes(8), bytes(16), bytes(32)),
    m.ExtentsRead(1, bytes(4), bytes(4)),
    m.Leaving(),
    m.Resolve(1, 0.5, 1.0, (m.ShardKeys("e/d/0", bytes(16)),)),
    m.Resolved(1, (m.ShardExtents("e/d/0", is_owner=True, owner_epoch=1),)),
    m.Reserve(1, 0.5, 1.0, (m.ShardWants("e/d/0", bytes(16), bytes(4), bytes(4)),), ttl_s=60.0),
    m.Reserved(1, (m.ShardReservations("e/d/0", is_owner=True, owner_epoch=1),)),
    m.Commit(1, 0.5, (m.ShardCommit("e/d/0", 1, bytes(8), bytes(16), bytes(8)),)),
    m.Committed(1, (m.ShardCommitted("e/d/0", b"\x02", b"\x00"),)),
    m.Release((m.ShardRelease("e/d/0", (1, 2), bytes(8)),)),
    m.Damage("e/d/0", bytes(16), 4096, 4096, 1 << 32, bytes(16), seed=7),
    m.Inspect(1, 0.5, "e/d/0", bytes(16)),
    m.Inspected(1, b"body"),
    m.RingProgressQuery(1, 0.5),
    m.RingProgressAnswer(1, (m.ShardRingProgress("e/d/0", 3),)),
    m.NamesQuery(1, 0.5, "tenant/volume", 7),
    m.NamesAnswer(1, 9, SPANS),
    m.FlashWork(1, 30.0, b"body"),
    m.FlashWorkResult(1, b"body"),
    m.PlacementQuery(1, "tenant", "volume", SPANS),
    m.PlacementAnswer(1, b"body"),
    m.SessionEnded((m.ShardKeys("e/d/0", bytes(16)),)),
    m.PrefetchFor(1, 0.5, "tenant", "volume", 1, SPANS, "01020304/7"),
)
