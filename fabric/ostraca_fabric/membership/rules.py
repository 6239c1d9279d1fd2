"""Decisions of a membership store: claims, grants and placement epochs. Pure.

Every store of the port applies these rules, whatever the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ostraca_fabric.errors import ChangedError, PlacementBusyError
from ostraca_fabric.model.fabric_map import (
    EARLIER_PLACEMENTS_MAX,
    Claim,
    EnclosureRecord,
    Grant,
    PlacementRecord,
    weights_of,
)
from ostraca_fabric.model.ids import ID_BYTES, AgentId, EnclosureId, OwnerEpoch, PlacementEpoch, StartId
from ostraca_fabric.ports.records import RecordLock


@dataclass(frozen=True, slots=True)
class ShardGrants:
    """Grants of a shard, kept also while the shard has no owner."""

    epoch: OwnerEpoch = OwnerEpoch(0)  # noqa: RUF009 (a NewType of int)
    """Highest epoch ever given."""

    unretired: tuple[Grant, ...] = ()
    """Unretired grants, by epoch."""

    def of(self, epoch: OwnerEpoch) -> Grant | None:
        """Return the grant of an owner epoch, or None if gone."""
        return next((grant for grant in self.unretired if grant.epoch == epoch), None)

    def claimed(self, agent: AgentId, start: StartId, *, epoch_at_least: OwnerEpoch) -> ShardGrants:
        """Return the grants after a claim of the unowned shard.

        The claimer's grant is the last. The previous owner's process continues with its epoch and grant,
        unless the grant is closed or the epoch is too low.
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
        earlier = tuple(grant for grant in self.unretired if not grant.is_empty)
        return ShardGrants(epoch, (*earlier, Grant(epoch, agent, start)))

    def granted(
        self, claim: Claim, segments: Sequence[int], *, retired: frozenset[OwnerEpoch]
    ) -> ShardGrants | None:
        """Return the grants after *segments* for a standing claim, without *retired* epochs.

        Return None if another epoch may still write one of the segments.
        """
        own = self.of(claim.epoch)
        others = tuple(
            grant for grant in self.unretired if grant.epoch != claim.epoch and grant.epoch not in retired
        )
        if own is None or any(grant.holds_any(segments) for grant in others):
            return None
        return replace(self, unretired=(*others, replace(own, segments=tuple(sorted(segments)))))

    def closed(self, claim: Claim, in_doubt: Sequence[int]) -> ShardGrants:
        """Return the grants after the holder of a claim has ended all transfers.

        The holder's own grant keeps only the segments *in doubt*.
        """
        own = self.of(claim.epoch)
        if own is None or (own.agent, own.start) != (claim.agent, claim.start):
            return self
        kept = replace(own, is_closed=True, segments=tuple(sorted({*in_doubt} & {*own.segments})))
        grants = (kept if each is own else each for each in self.unretired)
        return replace(self, unretired=tuple(grants))


GRANTS_LOST = ShardGrants(
    unretired=(Grant(OwnerEpoch(0), AgentId(""), StartId(bytes(ID_BYTES)), is_whole=True),)
)
"""Grants of a shard whose record was lost: an unknown writer may still write anywhere. The next owner reads,
and writes nothing until no earlier write can land. Epoch 0 never had an owner, so the epochs found on
flash count."""


@dataclass(frozen=True, slots=True)
class Placements:
    """Current placement epoch, and earlier epochs still looked up, newest first."""

    epoch: PlacementEpoch
    earlier: tuple[PlacementRecord, ...] = ()

    def after(
        self, before: Iterable[EnclosureRecord], now: Iterable[EnclosureRecord], *, force: bool
    ) -> Placements:
        """Return the placements after a change of enclosures from *before* to *now*.

        Raises PlacementBusyError above the maximum number of epochs; with *force*, drops the oldest.
        """
        weights = weights_of(before)
        if weights == weights_of(now):
            return self
        earlier = (PlacementRecord(self.epoch, weights), *self.earlier) if weights else self.earlier
        if len(earlier) > EARLIER_PLACEMENTS_MAX and not force:
            raise PlacementBusyError(
                f"blocks of {len(earlier)} placement epochs are still looked up, the maximum: wait until "
                f"epoch {earlier[-1].epoch} is retired, or force the change and lose the blocks of that epoch"
            )
        return Placements(PlacementEpoch(self.epoch + 1), earlier[:EARLIER_PLACEMENTS_MAX])


def check_lock(hold: RecordLock, *, stands: bool) -> None:
    """Raise ChangedError unless the hold of a change still stands."""
    if not stands:
        raise ChangedError(f"{hold.key} was taken over by another process")


def enclosures_after(
    before: Mapping[EnclosureId, EnclosureRecord],
    enclosures: Iterable[EnclosureRecord],
    *,
    removed: Collection[EnclosureId],
    seen: Mapping[EnclosureId, EnclosureRecord | None] | None,
) -> dict[EnclosureId, EnclosureRecord]:
    """Return the enclosures after putting *enclosures* and deleting *removed*.

    Raises ChangedError if an enclosure differs from *seen*, unless the wanted state is already reached. An
    earlier attempt may have succeeded without its answer arriving.
    """
    put = {**before, **{enclosure.id: enclosure for enclosure in enclosures}}
    after = {enclosure: record for enclosure, record in put.items() if enclosure not in removed}
    if after != before:
        for enclosure, record in (seen or {}).items():
            if before.get(enclosure) != record:
                raise ChangedError(f"enclosure {enclosure} was changed meanwhile: read the record again")
    return after
