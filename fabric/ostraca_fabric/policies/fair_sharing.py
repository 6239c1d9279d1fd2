"""Fair sharing: half of a resource is guaranteed, the other half first come, first served.

The guaranteed half is divided equally among all members. A member always gets demands within its part. Beyond
the part, a member may take free capacity, if the rest still covers the unclaimed parts of the others. So a
single member uses the whole resource, and two members may use three quarters each. A newcomer finds its part
free, unless the others took the capacity earlier; then the newcomer gets the first capacity returned.

Pure. Time: proportional to the number of members; a single member costs nothing.

``plan_evictions`` chooses evictions from a full cache: first bytes of absent members, then the largest parts.
A member's part is measured together with the bytes that the member can't give. The largest part shrinks to
the size of the next largest, then both shrink to the next, and so on (max-min fairness). A member with less
than an equal part loses nothing to a larger member, at any demand. Time:
proportional to the number of parts, times the digits of their size.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

_Member = TypeVar("_Member")

GUARANTEED_SHARE = 0.5


def is_guaranteed(
    total: float,
    held: Mapping[_Member, float],
    members: Collection[_Member],
    member: _Member,
    wanted: float,
) -> bool:
    """Tell whether *member* stays within the guaranteed part after taking *wanted*.

    A single member has no part: there are no competitors.
    """
    count = _count(members, member)
    return count > 1 and held.get(member, 0) + wanted <= _part(total, count)


def may_take(
    total: float,
    held: Mapping[_Member, float],
    members: Collection[_Member],
    member: _Member,
    wanted: float,
) -> bool:
    """Tell whether *member* may take *wanted* of *total*, given the amounts *held* by all.

    The *member* counts even if absent from *members*. Other holders may be no members, and then have no part.
    For a single member, and within a guarantee, free capacity is not checked. A member without holdings may
    take more than could ever be free beside all guarantees, so that no member waits for ever.
    """
    count = _count(members, member)
    if count == 1:
        return True
    part, own = _part(total, count), held.get(member, 0)
    if own + wanted <= part or (not own and wanted > total - (count - 1) * part):
        return True
    unclaimed = sum(max(0.0, part - held.get(each, 0)) for each in members if each != member)
    return total - sum(held.values()) - wanted >= unclaimed


def _count(members: Collection[_Member], member: _Member) -> int:
    return len(members) + (member not in members)


def _part(total: float, count: int) -> float:
    return GUARANTEED_SHARE * total / count


def plan_evictions(
    parts: Mapping[_Member, int],
    beside: Mapping[_Member, int],
    members: Collection[_Member],
    *,
    asker: _Member | None,
    wanted_bytes: int,
    equal_bytes: float,
) -> list[tuple[_Member, int]]:
    """Return the parts to shrink, in order, with the bytes of each.

    The sum may be less than *wanted_bytes*. *parts*: bytes to give, by member; *beside*: other bytes, by
    member, for the *asker* including the wanted room. While a member stays above *equal_bytes*, no other
    member gives bytes below this size, except the asker, who only replaces own bytes. An asker outside
    *members* gets no bytes from members.
    """
    gone = sorted((each for each in parts if each not in members), key=lambda each: -parts[each])
    asks = []
    for each in gone:
        asks.append((each, min(parts[each], wanted_bytes)))
        wanted_bytes -= asks[-1][1]
    if asker is None or asker in members:
        asks += _of_members(parts, beside, members, asker, wanted_bytes, equal_bytes)
    return [(each, ask) for each, ask in asks if ask > 0]


def _of_members(
    parts: Mapping[_Member, int],
    beside: Mapping[_Member, int],
    members: Collection[_Member],
    asker: _Member | None,
    wanted_bytes: int,
    equal_bytes: float,
) -> list[tuple[_Member, int]]:
    stays_above = any(beside.get(each, 0) > equal_bytes for each in members)
    sizes = {each: size + beside.get(each, 0) for each, size in parts.items() if each in members}

    def given(each: _Member, level: int) -> int:
        if stays_above and each != asker:
            level = max(level, int(equal_bytes))
        return min(parts[each], max(0, sizes[each] - level))

    # Search the highest common level that yields enough.
    low, high = 0, max(sizes.values(), default=0)
    while low < high:
        level = (low + high + 1) // 2
        if sum(given(each, level) for each in sizes) >= wanted_bytes:
            low = level
        else:
            high = level - 1
    asks = []
    for each in sorted(sizes, key=lambda each: -sizes[each]):
        ask = min(wanted_bytes, given(each, low))
        asks.append((each, ask))
        wanted_bytes -= ask
    return asks
