"""S4: balance of stripe units over enclosures, and share of units moved by a new enclosure.

There are 36 enclosures of 32 equal drives, with one shard on each drive. Every round places other units under
another secret. The ideal has equal shares, and a new enclosure takes only its own share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from benchmarks.support.figure import Figure, Target

from ostraca_cli.tools.bench.series import Measurement, Series
from ostraca_fabric.model.chain import Span
from ostraca_fabric.model.fabric_map import EnclosureRecord, ShardRecord
from ostraca_fabric.model.ids import EnclosureId, PlacementEpoch, drive_id, enclosure_of, shard_id
from ostraca_fabric.policies.placement import Placement

if TYPE_CHECKING:
    from benchmarks.support.conditions import Conditions
    from numpy.typing import NDArray

_ENCLOSURES = 36
_DRIVES = 32
_SHARD_BYTES = 4 * 10**12
_UNITS = 1_000_000
_ROUNDS = 5
_HASH_BYTES = 16
_AT_ONCE = 100_000


def run(conditions: Conditions) -> list[Figure]:
    """Place units before and after the addition of an enclosure."""
    units, rounds = (20_000, 2) if conditions.is_short else (_UNITS, _ROUNDS)
    enclosures = [_enclosure(number) for number in range(_ENCLOSURES + 1)]
    before = Placement.among(PlacementEpoch(1), enclosures[:-1])
    after = Placement.among(PlacementEpoch(2), enclosures)
    loads, moves = [], []
    for number in range(rounds):
        dice = np.random.default_rng(number)
        secret = dice.bytes(32)
        hashes = [dice.bytes(_HASH_BYTES * min(_AT_ONCE, units)) for _ in range(0, units, _AT_ONCE)]
        was, now = _place(before, secret, hashes), _place(after, secret, hashes)
        loads.append(float(np.bincount(was // _DRIVES, minlength=_ENCLOSURES).max() * _ENCLOSURES / len(was)))
        moves.append(float(np.count_nonzero(was != now) * (_ENCLOSURES + 1) / len(was)))
    ideal = Series((1.0,) * rounds)
    fabric = f"{_ENCLOSURES} enclosures × {_DRIVES} drives"
    return [
        Figure(
            "S4",
            f"most stripe units on one of {fabric}, over the mean",
            "x",
            Measurement("most", Series(tuple(loads)), "equal shares", ideal),
            Target(value_at_most=1.05),
        ),
        Figure(
            "S4",
            f"stripe units that move when one joins {fabric}, over its share",
            "x",
            Measurement("moved", Series(tuple(moves)), "the least possible", ideal),
            Target(value_at_most=1.02),
        ),
    ]


def _enclosure(number: int) -> EnclosureRecord:
    name = EnclosureId(f"enclosure-{number:02}")
    drives = [drive_id(name, f"drive-{each:02}") for each in range(_DRIVES)]
    shards = tuple(ShardRecord(shard_id(each, 0), each, 0, _SHARD_BYTES, _SHARD_BYTES) for each in drives)
    return EnclosureRecord(name, (), shards)


def _place(placement: Placement, secret: bytes, hashes: list[bytes]) -> NDArray[np.intp]:
    """Return the shard of each unit, as numbers in the common order of both placements."""
    assert [enclosure_of(shard) for shard in placement.shard_ids[::_DRIVES]] == sorted(
        {enclosure_of(shard) for shard in placement.shard_ids}
    ), "an enclosure's shards have numbers side by side"
    found = []
    for some in hashes:
        ones = (1,) * (len(some) // _HASH_BYTES)
        found.append(placement.shards(secret, [Span(some, _HASH_BYTES, some, ones, 0, 0)]))
    return np.concatenate(found)
