"""What workers, peers and operators might say to an agent that they mean no good, or that they are broken."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from tests.fabric.wire.samples import SAMPLES
from tests.scenarios.fuzz.dice import NUMBERS, WHOLE_NUMBERS

from ostraca_fabric.model.chain import Chain, Span
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import COUNT_MAX, Layout, VolumeIdentity
from ostraca_fabric.tables.digests import tag_seeds, tags_of
from ostraca_fabric.wire import messages as m

BLOCK_BYTES = 4096
ARENA_BYTES = 1 << 20
LAYOUT = Layout("fuzzed@1", "bf16", 16)
OFFER = m.ArenaOffer("inline", ARENA_BYTES, ARENA_BYTES // 4)
SHARDS = ("enclosure-0/drive-0/0", "enclosure-0/drive-1/0", "e/d/0", "", "\n")
HASHES = tuple(bytes([number]) * 32 for number in range(64))
_STRAY = tuple(
    sample for sample in SAMPLES if not isinstance(sample, (m.OpenVolume, m.Refused, m.Welcome, m.Hello))
)


def hello(dice: random.Random, role: str) -> m.Hello:
    """Return a Hello that should be accepted."""
    if role != "worker":
        return m.Hello(1, 1, role, "", "", "fuzz")
    tenant = dice.choice(("fuzz", "fuzz-2"))
    arenas = () if dice.random() < 0.2 else (OFFER,) * dice.choice((1, 1, 3))
    return m.Hello(
        dice.choice((0, 1)), dice.choice((1, 9)), role, tenant, "", "fuzz\nWARNING", ("x",), arenas
    )


def odd_hello(dice: random.Random) -> m.Hello:
    """Return a Hello with one field that is of the right type and makes no sense."""
    offer = m.ArenaOffer(
        dice.choice(("inline", "nixl", "", "x" * 5000)),
        dice.choice(WHOLE_NUMBERS),
        dice.choice(WHOLE_NUMBERS),
        dice.choice(WHOLE_NUMBERS),
        dice.randbytes(dice.choice((0, 40))),
    )
    changes: dict[str, Any] = {
        "version_oldest": dice.choice(WHOLE_NUMBERS),
        "version_newest": dice.choice(WHOLE_NUMBERS),
        "role": dice.choice(("", "root", "worker\nfabric CRITICAL forged", "agent", "r" * 100_000)),
        "tenant": dice.choice(("", "a/b", "\n", "t" * 64, "\0" * 70_000)),
        "token": dice.choice(("wrong", "t" * 70_000)),
        "name": dice.choice(("", "\nforged", "n" * 200_000)),
        "features": ("f" * 1000,) * dice.choice((0, 1, 100)),
        "arenas": (offer,) * dice.choice((1, 2, 2000)),
    }
    field = dice.choice(list(changes))
    return msgspec.structs.replace(hello(dice, "worker"), **{field: changes[field]})


class WorkerScript:
    """One connection's messages after its Welcome, in any order."""

    def __init__(self, dice: random.Random, said: m.Hello) -> None:
        self._dice = dice
        self._role = said.role
        self._tenant = TenantId(said.tenant)
        self._requests = 0

    def next(self) -> m.Message:
        """Return a message that this role may say, with values of the right types."""
        if self._role == "agent":
            return self._from_agent()
        if self._role == "operator":
            return self._dice.choice((m.Ping(self._request()), m.StatusRequest(self._request()), m.Cancel(1)))
        return self._from_worker()

    def misplaced(self) -> m.Message:
        """Return a message that belongs to somebody else, or to an earlier time."""
        return self._dice.choice((*_STRAY, hello(self._dice, self._role)))

    def opening(self) -> m.Message:
        """Return what makes handle 0 a volume."""
        return m.OpenVolume(self._request(), "v", LAYOUT, BLOCK_BYTES, create=True)

    def _request(self) -> int:
        """Return a number for a request: new, far out, or maybe still under way."""
        chance = self._dice.random()
        if chance < 0.01:
            return self._dice.choice(WHOLE_NUMBERS)
        if chance < 0.013:
            return max(1, self._requests - self._dice.randrange(3))
        self._requests += 1
        return self._requests

    def _from_worker(self) -> m.Message:  # noqa: PLR0911 (a kind of message each)
        dice, request = self._dice, self._request()
        match dice.randrange(13):
            case 0:
                return self._opening(request)
            case 1 | 2 | 3:
                return m.Lookup(request, self._handle(), self._time(), self._spans(), self._time())
            case 4 | 5:
                spans = self._spans()
                return m.Get(
                    request, self._handle(), self._time(), spans, *self._columns(spans), self._time()
                )
            case 6 | 7:
                spans = self._spans()
                lengths, slots, slot_bytes = self._columns(spans)
                tags = self._tags(spans, lengths)
                ack = dice.choice((1, 2, 2, 0, -1, 1 << 40))
                return m.Put(
                    request,
                    self._handle(),
                    self._time(),
                    ack,
                    spans,
                    lengths,
                    tags,
                    slots,
                    slot_bytes,
                    self._time(),
                )
            case 8:
                at = dice.choice(("", "", "agent-0", "agent-1", "\n", "n" * 1000))
                return m.Prefetch(request, self._handle(), self._time(), self._spans(), at)
            case 9:
                return m.Cancel(dice.choice((request, self._requests - 1, *WHOLE_NUMBERS)))
            case 10:
                name = dice.choice(("v", "v", "", "n" * 1000))
                explain = m.Explain(request, self._time(), name, self._spans())
                return dice.choice((m.StatusRequest(request), explain))
            case 11:
                return m.EndSession(self._handle(), self._spans())
            case _:
                return m.Ping(dice.choice((request, *WHOLE_NUMBERS)))

    def _opening(self, request: int) -> m.OpenVolume:
        dice = self._dice
        name = dice.choice(("v", "v", "w", "", "A", "../x", "\n", "n" * 1000))
        layout, block_bytes = LAYOUT, dice.choice((BLOCK_BYTES, BLOCK_BYTES, *WHOLE_NUMBERS))
        if name not in ("v", "w"):
            layout = Layout(
                "x" * dice.choice((1, 1000)), "b", min(COUNT_MAX, max(1, dice.choice(WHOLE_NUMBERS)))
            )
        return m.OpenVolume(request, name, layout, block_bytes, create=dice.random() < 0.8)

    def _handle(self) -> int:
        return self._dice.choice((0, 0, 0, 0, 0, 0, 1, self._dice.choice(WHOLE_NUMBERS)))

    def _time(self) -> float:
        return self._dice.choice((0.01, 0.01, 0.05, 0.05, *NUMBERS[:-2]))

    def _spans(self) -> tuple[Span, ...]:
        dice = self._dice
        hashes = [dice.choice(HASHES) for _ in range(dice.choice((0, 1, 1, 2, 5, 40)))]
        width = dice.choice((32, 32, 32, 32, 16))
        rank, group = (dice.choice((0, 1, (1 << 32) - 1)) for _ in range(2))
        chain = Chain.of(
            [each[:width] for each in hashes],
            hash_bytes=width,
            rank=rank,
            group=group,
            is_chained=dice.random() < 0.5,
        )
        chain = replace(chain, before=dice.choice((0, 0, 32, (1 << 32) - 64)))
        return (chain.span(),) * dice.choice((1, 1, 1, 2, 0))

    def _columns(self, spans: tuple[Span, ...]) -> tuple[bytes, bytes, int]:
        """Return lengths, slots and the size of a slot, which mostly fit the blocks."""
        dice, count = self._dice, sum(map(len, spans)) + self._dice.choice((0, 0, 0, 0, 1, -1))
        count = max(0, count)
        length = dice.choice((1, 100, BLOCK_BYTES, BLOCK_BYTES, 0, BLOCK_BYTES + 1, (1 << 32) - 1))
        lengths = np.full(count, length, np.uint32)
        slots = (np.arange(count, dtype=np.uint64) * np.uint64(4096)) % np.uint64(ARENA_BYTES)
        if count and dice.random() < 0.2:
            slots[dice.randrange(count)] = dice.choice((1, ARENA_BYTES - 1, ARENA_BYTES, (1 << 64) - 4096))
        return lengths.tobytes(), slots.tobytes(), dice.choice((4096, 4096, 4096, *WHOLE_NUMBERS))

    def _tags(self, spans: tuple[Span, ...], lengths: bytes) -> bytes:
        """Return the tags of blocks of zeros, as a put needs them to succeed, or others."""
        count = sum(map(len, spans))
        if self._dice.random() < 0.5 or len(lengths) != 4 * count:
            return bytes(16 * count + self._dice.choice((0, 0, 0, 16)))
        sizes = np.frombuffer(lengths, np.uint32)
        if sizes.max(initial=0) > BLOCK_BYTES:
            return bytes(16 * count)
        seeds = tag_seeds(VolumeIdentity(self._tenant, "v", LAYOUT.digest()), spans, sizes)
        memory = np.zeros(BLOCK_BYTES, np.uint8)
        return tags_of(memory, np.zeros(count, np.int64), sizes, seeds).tobytes()

    def _from_agent(self) -> m.Message:  # noqa: PLR0911 (a kind of message each)
        """Say what another agent might, about shards that are here and that are not.

        Agents trust each other with their shards, so what would undo another's work is said of shards that
        are not here: that a peer can harm by lying is known.
        """
        dice, request, shard = self._dice, self._request(), self._dice.choice(SHARDS)
        keys, count = dice.randbytes(16 * dice.choice((0, 1, 5))), dice.choice((0, 1, 5))
        match dice.randrange(8):
            case 0 | 1:
                keys += dice.choice((b"", b"", b"x"))
                shards = (m.ShardKeys(shard, keys),) * count
                is_brief = dice.choice((False, True))
                return m.Resolve(request, self._time(), self._time(), shards, is_brief=is_brief)
            case 2:
                lengths = np.full(count, dice.choice((0, 1, (1 << 32) - 1)), np.uint32).tobytes()
                depths = dice.choice((b"", lengths, bytes(len(lengths)), lengths[:-1]))
                wants = (m.ShardWants(shard, keys, lengths, depths),)
                return m.Reserve(request, self._time(), 0.01, wants, ttl_s=self._time())
            case 3:
                numbers = np.full(count, dice.choice((0, 1 << 63)), np.uint64).tobytes()
                tags, seeds = bytes(16 * count), bytes(8 * dice.choice((count, count, 1)))
                return m.Commit(request, self._time(), (m.ShardCommit(shard, 1, numbers, tags, seeds),))
            case 4:
                pins = (dice.choice(WHOLE_NUMBERS[-6:]),) * count
                return m.Release((m.ShardRelease(SHARDS[2], pins, bytes(8 * count)),))
            case 5:
                keys += dice.choice((b"", b"", b"x"))
                return m.SessionEnded((m.ShardKeys(shard, keys),) * count)
            case 6:
                tenant, name = dice.choice((self._tenant, "other", "")), dice.choice(("v", "v", "w", "\n"))
                incarnation = dice.choice((1, 1, *WHOLE_NUMBERS))
                return m.PrefetchFor(request, self._time(), tenant, name, incarnation, self._spans())
            case _:
                offset, length, generation, seed = (dice.choice(WHOLE_NUMBERS) for _ in range(4))
                key, tag = keys[: dice.choice((0, 15, 16))], dice.randbytes(dice.choice((0, 16)))
                return m.Damage(shard, key, offset, length, generation, tag, seed)
