"""A shard's owner over bytes in memory, for tests: what the service does with a drive, step by step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from tests.support.agent.shard_invariants import check_core

from ostraca_dpu_agent.shards.core import Allocations, CommitResults, ShardCore, ShardSettings, SummaryWrite
from ostraca_fabric.flash.recovery import RecoveredAreas, recover
from ostraca_fabric.flash.superblock import Superblock
from ostraca_fabric.model.extent import MIB, PAGE_BYTES, Geometry
from ostraca_fabric.model.ids import DriveId, EnclosureId, FabricId, OwnerEpoch, ShardId
from ostraca_fabric.model.outcome import PutState, Reason

_LOOKED_AT_EVERY = 8
"""Of how many blocks that are put one after another one is followed by a look at everything."""


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def rows16(values: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(values), np.uint8).reshape(-1, 16)


def keys_of(numbers: list[int]) -> NDArray[np.uint8]:
    return rows16([key(number) for number in numbers])


def tag_of(number: int, version: int = 0) -> bytes:
    return number.to_bytes(8, "little") + version.to_bytes(8, "big")


def seeds_of(numbers: list[int]) -> NDArray[np.uint64]:
    """Return an owner that only keeps reports."""
    return np.array(numbers, np.uint64) * np.uint64(7)


@dataclass
class OwnedShard:
    """One shard: its flash, its owner, and the time."""

    segments: int = 4
    block_bytes: int = 64 << 10
    settings: ShardSettings = field(default_factory=ShardSettings)
    now_s: float = 1000.0
    epoch: int = 1
    shares: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        geometry = Geometry.planned(
            MIB * (1 + self.segments), segment_bytes=MIB, block_bytes=self.block_bytes
        )
        self.superblock = Superblock(
            FabricId(bytes(16)), bytes(16), EnclosureId("e"), DriveId("e/d"), ShardId("e/d/0"), 0, geometry
        )
        self.geometry = geometry
        self.flash = bytearray(geometry.shard_bytes)
        self.under_way: list[SummaryWrite] = []
        self.restart()

    def recovered(self, numbers: list[int] | None = None) -> RecoveredAreas:
        """Read these segments' summary areas, or all."""
        chosen = sorted(numbers) if numbers is not None else list(range(self.geometry.segments))
        begins = [self.geometry.summary_offset(segment) for segment in chosen]
        areas = [self.flash[begin : begin + self.geometry.summary_bytes] for begin in begins]
        shape = len(chosen), self.geometry.summary_bytes
        joined = np.frombuffer(b"".join(areas), np.uint8).reshape(shape)
        return recover(self.superblock, np.array(chosen, np.intp), joined)

    def restart(self, *, earlier_pins_end_s: float = 0.0, withheld: frozenset[int] | None = None) -> None:
        """Forget everything but the flash; the next owner epoch takes over.

        Alone, or where something is *withheld* as one among others: it is confirmed and granted nothing yet.
        """
        self.under_way.clear()
        self.epoch += 1
        self.core = ShardCore(self.superblock, settings=self.settings, earlier_pins_end_s=earlier_pins_end_s)
        self.core.share_out(self.shares)
        self.core.take_in(self.recovered())
        self.core.begin(self.now_s, epoch=OwnerEpoch(self.epoch), withheld=withheld or frozenset())
        if withheld is None:
            self.core.own_alone(self.now_s)
        check_core(self.core)

    def successor(self, withheld: frozenset[int]) -> OwnedShard:
        """Return the next owner of the same flash, while this one lives on."""
        made = OwnedShard(self.segments, self.block_bytes, self.settings, self.now_s, self.epoch, self.shares)
        made.flash = self.flash
        made.epoch = self.epoch
        made.restart(withheld=withheld)
        return made

    def share_out(self, shares: dict[int, float]) -> None:
        self.shares = shares
        self.core.share_out(shares)
        check_core(self.core)

    def grant(self) -> frozenset[int]:
        """Have what is wanted for the grant recorded; return the grant."""
        wanted = self.core.wanted_grant(self.now_s)
        if wanted is not None:
            self.core.apply_grant(self.now_s, wanted)
        check_core(self.core)
        return self.core.grants.segments

    def adopt(self) -> int:
        """Read everything again, and adopt it."""
        new = self.core.adopt(self.now_s, self.recovered())
        check_core(self.core)
        return new

    def write_pieces(self, write: SummaryWrite) -> None:
        for offset, pages in write.pieces:
            self.flash[offset : offset + len(pages)] = pages

    def settle(self, *, is_ok: bool = True) -> list[CommitResults]:
        """Do all summary writes that are due, and those that become due by it."""
        return list(self._settling(is_ok=is_ok))

    def _settling(self, *, is_ok: bool = True, is_checked: bool = True) -> Iterator[CommitResults]:
        while self.core.has_writes_due:
            for write in self.core.writes_due(self.now_s):
                if is_ok:
                    self.write_pieces(write)
                yield self.core.written(self.now_s, write, is_ok=is_ok)
                if is_checked:
                    check_core(self.core)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.expire(self.now_s)
        check_core(self.core)

    def reserve(
        self,
        numbers: list[int],
        length: int = 64 << 10,
        hold_s: float = 5.0,
        ttl_s: float = math.inf,
        pool: int = 0,
    ) -> Allocations:
        answer = self._reserve(numbers, length, hold_s, ttl_s, pool)
        check_core(self.core)
        return answer

    def _reserve(
        self, numbers: list[int], length: int, hold_s: float, ttl_s: float, pool: int
    ) -> Allocations:
        lengths = np.full(len(numbers), length, np.uint32)
        return self.core.reserve(self.now_s, keys_of(numbers), lengths, hold_s=hold_s, ttl_s=ttl_s, pool=pool)

    def commit(self, reservations: NDArray[np.uint64], numbers: list[int]) -> list[Reason]:
        """Commit, and return the reasons of what was not taken (NONE where it was)."""
        reasons = self._commit(reservations, numbers)
        check_core(self.core)
        return reasons

    def _commit(self, reservations: NDArray[np.uint64], numbers: list[int]) -> list[Reason]:
        tags = rows16([tag_of(number) for number in numbers])
        answer = self.core.commit(
            self.now_s, reservations, tags, seeds_of(numbers), epoch=OwnerEpoch(self.epoch)
        )
        taken = np.asarray(answer.reasons) == Reason.NONE
        assert ((answer.states == PutState.STAGED) == taken).all()
        return [Reason(reason) for reason in answer.reasons]

    def put(
        self, numbers: list[int], length: int = 64 << 10, ttl_s: float = math.inf, pool: int = 0
    ) -> list[PutState]:
        """Put blocks, one after another, up to their commit; what must hold is looked at now and then."""
        states = []
        for count, number in enumerate(numbers, start=1):
            list(self._settling(is_checked=False))
            answer = self._reserve([number], length, 5.0, ttl_s, pool)
            if answer.states[0] == PutState.STAGED:
                self._commit(answer.reservations, [number])
                done = list(self._settling(is_checked=False))
                states.append(PutState(next(end.states[0] for end in done if len(end.states))))
            else:
                states.append(PutState(answer.states[0]))
            if count % _LOOKED_AT_EVERY == 0 or count == len(numbers):
                check_core(self.core)
        return states

    def found(self, numbers: list[int]) -> list[int]:
        """Return which of these blocks can be got."""
        answer = self.core.resolve(self.now_s, keys_of(numbers), pin_s=0.0)
        for position in np.flatnonzero(answer.found).tolist():
            assert answer.tags[position].tobytes() == tag_of(numbers[position])
            assert answer.offsets[position] % PAGE_BYTES == 0
        return [number for number, is_found in zip(numbers, answer.found, strict=True) if is_found]
