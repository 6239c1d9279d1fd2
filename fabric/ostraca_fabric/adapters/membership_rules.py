"""What a membership store decides, apart from where it keeps things: who may claim with which epoch, what may
be granted, and which placements are still asked. Pure; every store of the port goes by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ostraca_fabric.errors import ChangedError, PlacementBusyError
from ostraca_fabric.fabric_map import EARLIER_PLACEMENTS_MAX, Claim, Grant, PlacementRecord, weights_of
from ostraca_fabric.ids import OwnerEpoch, PlacementEpoch

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from ostraca_fabric.fabric_map import EnclosureRecord
    from ostraca_fabric.ids import AgentId, EnclosureId, StartId
    from ostraca_fabric.ports.records import Hold


@dataclass(frozen=True, slots=True)
class ShardGrants:
    """What is kept of a shard while nobody owns it, too."""

    epoch: OwnerEpoch = OwnerEpoch(0)  # noqa: RUF009 (a NewType of int)
    """The highest that was ever given."""

    unretired: tuple[Grant, ...] = ()
    """By epoch."""

    def of(self, epoch: OwnerEpoch) -> Grant | None:
        """Return the grant of an owner epoch, which may be gone."""
        return next((grant for grant in self.unretired if grant.epoch == epoch), None)

    def claimed(self, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch) -> ShardGrants:
        """Return what is kept when a process claims the shard, which nobody owns: its own grant is the last.

        The process that had it last goes on where it was.
        """
        last = self.of(self.epoch)
        if (
            last is not None
            and (last.agent, last.start) == (agent, start)
            and not last.is_closed
            and last.epoch >= epoch_at_least
        ):
            return self
        epoch = OwnerEpoch(max(self.epoch + 1, epoch_at_least))
        earlier = tuple(grant for grant in self.unretired if grant.segments)
        return ShardGrants(epoch, (*earlier, Grant(epoch, agent, start)))

    def granted(
        self, claim: Claim, segments: Sequence[int], *, retired: frozenset[OwnerEpoch]
    ) -> ShardGrants | None:
        """Return what is kept when a claim, which stands, is granted *segments* and the *retired* are
        forgotten. None where another epoch may still write one of them.
        """
        own = self.of(claim.epoch)
        others = tuple(
            grant for grant in self.unretired if grant.epoch != claim.epoch and grant.epoch not in retired
        )
        if own is None or any(not set(segments).isdisjoint(grant.segments) for grant in others):
            return None
        return replace(self, unretired=(*others, replace(own, segments=tuple(sorted(segments)))))

    def closed(self, claim: Claim, in_doubt: Sequence[int]) -> ShardGrants:
        """Return what is kept when a claim's holder has nothing under way any more: of its grant, the
        segments *in doubt*.
        """
        own = self.of(claim.epoch)
        if own is None or (own.agent, own.start) != (claim.agent, claim.start):
            return self
        kept = replace(own, is_closed=True, segments=tuple(sorted({*in_doubt} & {*own.segments})))
        grants = (kept if each is own else each for each in self.unretired)
        return replace(self, unretired=tuple(grants))


@dataclass(frozen=True, slots=True)
class Placements:
    """The current placement epoch, and those before that are still asked, the newest first."""

    epoch: PlacementEpoch
    earlier: tuple[PlacementRecord, ...] = ()

    def after(
        self, before: Iterable[EnclosureRecord], now: Iterable[EnclosureRecord], *, force: bool
    ) -> Placements:
        """Return what they are when all enclosures were *before*, and are *now*.

        Raises PlacementBusyError when one more would have to be asked than may be; with *force* the oldest is
        asked no longer.
        """
        weights = weights_of(before)
        if weights == weights_of(now):
            return self
        earlier = (PlacementRecord(self.epoch, weights), *self.earlier) if weights else self.earlier
        if len(earlier) > EARLIER_PLACEMENTS_MAX and not force:
            raise PlacementBusyError(
                f"blocks of {len(earlier)} placement epochs are still looked up, which is the most: wait "
                f"until epoch {earlier[-1].epoch} is passed over, or force it, and its blocks are lost"
            )
        return Placements(PlacementEpoch(self.epoch + 1), earlier[:EARLIER_PLACEMENTS_MAX])


def check_stands(hold: Hold, *, stands: bool) -> None:
    """Raise ChangedError for a change under a hold that somebody else has by now, or nobody."""
    if not stands:
        raise ChangedError(f"{hold.key} is not ours any more: somebody else does this")


def enclosures_after(
    before: Mapping[EnclosureId, EnclosureRecord],
    enclosures: Iterable[EnclosureRecord],
    *,
    removed: Collection[EnclosureId],
    seen: Mapping[EnclosureId, EnclosureRecord | None] | None,
) -> dict[EnclosureId, EnclosureRecord]:
    """Return what enclosures there are once these are put and those *removed* are gone.

    Raises ChangedError when one of those *seen* is not as it was; but not where all is as it is to be: an
    earlier try may have done it, whose answer was lost.
    """
    put = {**before, **{enclosure.id: enclosure for enclosure in enclosures}}
    after = {enclosure: record for enclosure, record in put.items() if enclosure not in removed}
    if after != before:
        for enclosure, record in (seen or {}).items():
            if before.get(enclosure) != record:
                raise ChangedError(f"enclosure {enclosure} was changed meanwhile: look at it again")
    return after
