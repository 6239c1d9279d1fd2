"""Who may take of what several share: half of it is guaranteed, the other half first come, first served.

The guaranteed half belongs to all members in equal parts. A member that asks for no more than its part gets
it; beyond that it may take what is free, as long as the rest still covers what the others have not claimed of
their parts. So one member alone uses everything, two may use three quarters each, and a newcomer finds its
part free unless it came after the others had taken it: then it is what comes back first.

Pure, and in time proportional to the number of members; a single member costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_Member = TypeVar("_Member")

GUARANTEED_SHARE = 0.5


def is_guaranteed(
    total: float,
    held: Mapping[_Member, float],
    members: Collection[_Member],
    who: _Member,
    wanted: float,
) -> bool:
    """Tell whether *who* would have no more than its guaranteed part after taking what is *wanted*.

    A member that is alone has no part of its own: there is nobody to keep it from.
    """
    count = _count(members, who)
    return count > 1 and held.get(who, 0) + wanted <= _part(total, count)


def may_take(
    total: float,
    held: Mapping[_Member, float],
    members: Collection[_Member],
    who: _Member,
    wanted: float,
) -> bool:
    """Tell whether *who* may take what is *wanted* of *total*, beside what everybody has *held* so far.

    *who* counts as a member; others may hold something without being one, and have no part then. Whether so
    much is free is not looked at where there is one member, nor within a guarantee. Who holds nothing may
    take more than could ever be free beside the guarantees of all, so that nobody waits for ever.
    """
    count = _count(members, who)
    if count == 1:
        return True
    part, own = _part(total, count), held.get(who, 0)
    if own + wanted <= part or (not own and wanted > total - (count - 1) * part):
        return True
    unclaimed = sum(max(0.0, part - held.get(each, 0)) for each in members if each != who)
    return total - sum(held.values()) - wanted >= unclaimed


def _count(members: Collection[_Member], who: _Member) -> int:
    return len(members) + (who not in members)


def _part(total: float, count: int) -> float:
    return GUARANTEED_SHARE * total / count
