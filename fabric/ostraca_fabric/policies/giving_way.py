"""Which parts of a full cache give way: those of nobody who is here first, then the largest.

Every member's part is measured together with what the member has beside it and can't give. The largest is
brought down to the size of the next largest, both to the next, and so on (max-min fairness): whoever has
less than an equal part loses nothing to one who has more, however much that one brings.

Pure. In time proportional to the number of parts, times the digits of their size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_Member = TypeVar("_Member")


def giving_way(
    parts: Mapping[_Member, int],
    beside: Mapping[_Member, int],
    members: Collection[_Member],
    *,
    asker: _Member | None,
    wanted_bytes: int,
    equal_bytes: float,
) -> list[tuple[_Member, int]]:
    """Say which parts give way, in order, and how much of each; less than is wanted when nobody should.

    *parts* are the bytes that each has and can give; *beside* what it has and can't, and of the *asker* also
    what room is wanted for. While a member stays above *equal_bytes*, no other gives what it has below that,
    except the asker: what it asks for is its own. An asker that is no member gets nothing from members.
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

    # The highest level to which bringing everybody down yields enough.
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
