"""Why an owner has no space to hand out."""

from __future__ import annotations

import pytest
from tests.dpu_agent.shards.core.test_grants import PER_SEGMENT, among_others
from tests.support.agent.owned_shard import OwnedShard

from ostraca_dpu_agent.shards.core import space_shortage
from ostraca_fabric.model.outcome import Reason


def lack(shard: OwnedShard, retires_in_s: float | None = None) -> tuple[str, float | None] | None:
    """Return the diagnosis, and whether a put agrees."""
    found = space_shortage(shard.core.ring, shard.core.grants, shard.now_s, retires_in_s=retires_in_s)
    return None if found is None else (found.why, found.ends_in_s)


def test_an_owner_alone_always_has_space() -> None:
    shard = OwnedShard(segments=4)
    shard.settle()
    for first in range(0, 10 * PER_SEGMENT, 5):
        assert lack(shard) is None
        shard.put(list(range(first, first + 5)))


@pytest.mark.parametrize("withheld", [8, 7])
def test_an_owner_whose_segments_are_all_withheld_says_for_how_long(withheld: int) -> None:
    shard = among_others(withheld=frozenset(range(withheld)))
    shard.core.apply_grant(shard.now_s, range(withheld, 8))
    shard.settle()
    shard.put(list(range(PER_SEGMENT + 1)))  # what little there is
    assert shard.reserve([100]).reasons[0] == Reason.NO_SPACE
    if withheld == 8:
        why = "writes of an earlier owner may still land in 8 of its 8 segments"
        assert lack(shard, 134.0) == (why, 134.0)
    else:
        assert lack(shard, 134.0) is not None
    shard.core.retire(shard.now_s, range(withheld))
    shard.grant()
    shard.settle()
    assert lack(shard) is None
    assert shard.reserve([100]).reasons[0] == Reason.NONE


def test_an_owner_that_waits_for_its_grant_says_so() -> None:
    shard = among_others()
    why = "the membership store has not recorded its grant of more segments yet"
    assert lack(shard) == (why, None)
    shard.core.apply_grant(shard.now_s, [1])
    assert lack(shard) is None, "its first segment is being opened"


def test_segments_that_may_still_be_written_are_waited_for() -> None:
    shard = OwnedShard(segments=2)
    shard.settle()
    late_write_s = shard.core.settings.late_write_s
    made = shard.reserve(list(range(PER_SEGMENT)))
    shard.core.release(shard.now_s, [], made.reservations, may_land=True)
    shard.put(list(range(100, 100 + 2 * PER_SEGMENT)))
    found = lack(shard)
    assert found is not None
    assert found[1] is None or 0 < found[1] <= late_write_s
    assert shard.reserve([200]).reasons[0] == Reason.NO_SPACE


def test_who_may_not_write_lacks_something_else_than_space() -> None:
    shard = among_others(withheld=frozenset(range(8)), until_s=1005.0)
    assert lack(shard) is not None
    shard.now_s = 1005.0
    assert lack(shard) is None
