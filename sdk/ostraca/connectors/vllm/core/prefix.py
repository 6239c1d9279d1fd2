"""Placement of chunks: from vLLM's keys to chains.

A key is an engine hash followed by four bytes for the KV group. Writer and reader must place a block alike,
or the reader never finds it. A key's stripe unit is therefore used only if all earlier chunks of that unit
are known. A key without such a placement is neither looked up nor stored: another engine would look
elsewhere.

vLLM from 0.31 on gives the end of each key in its request. Earlier versions give no information common to all
engines: the engine never looks up chunks in GPU or host memory, so the sequence of lookups starts anywhere.
With such a version, each block is placed by its own hash.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from ostraca.connectors.kv_identity.chains import Run, chain_at, unit_start, unordered_chain

GROUP_BYTES = 4

_Placed = tuple[int, int, bool, bytes]
"""Sort key of a chunk: group, number of earlier chunks of the group, whether partly filled (as the last of a
prefix may be), and key.
"""


def engine_hash(key: bytes) -> bytes:
    """Return the engine hash of a key, vLLM's block hash."""
    return key[:-GROUP_BYTES]


def group_of(key: bytes) -> int:
    """Return the KV group's number."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class Prefix:
    """Known chains of one request."""

    def __init__(self, tokens_per_chunk: Mapping[int, int], positions: Mapping[bytes, int] | None) -> None:
        """Begin with the engine's record of positions.

        *tokens_per_chunk* is by KV group. *positions* maps each key to its end token, and may grow meanwhile;
        None without such a record.
        """
        self._tokens_per_chunk = tokens_per_chunk
        self._positions = positions
        self._seen = 0
        self._by_place: dict[tuple[int, int], bytes] = {}

    def whole(self) -> list[Run]:
        """Return the runs of all keys known so far; none without positions."""
        return self.runs(list(self._positions))[0] if self._positions else []

    def runs(self, keys: Iterable[bytes]) -> tuple[list[Run], list[bytes]]:
        """Cut *keys* into runs in order of position; return runs and unplaced keys."""
        if self._positions is None:
            return list(_each_by_itself(keys)), []
        self._learn(self._positions)
        placed: list[_Placed] = []
        strays: list[bytes] = []
        for key in keys:
            group = group_of(key)
            end_token, tokens = self._positions.get(key), self._tokens_per_chunk.get(group)
            if end_token and tokens:
                nth, rest = divmod(end_token - 1, tokens)
                placed.append((group, nth, rest != tokens - 1, key))
            else:
                strays.append(key)
        placed.sort()
        runs = []
        for part in _consecutive(placed):
            run = self._run(part)
            if run is None:
                strays.extend(key for *_, key in part)
            else:
                runs.append(run)
        return runs, strays

    def _learn(self, positions: Mapping[bytes, int]) -> None:
        """Read the engine's new positions: the record only grows."""
        if len(positions) <= self._seen:
            return
        for key, end_token in islice(positions.items(), self._seen, None):
            group = group_of(key)
            tokens = self._tokens_per_chunk.get(group)
            if tokens and not end_token % tokens:
                self._by_place[group, end_token // tokens - 1] = key
        self._seen = len(positions)

    def _run(self, part: Sequence[_Placed]) -> Run | None:
        """Build the run of consecutive chunks; None if an earlier chunk of the first unit is unknown."""
        group, first, *_ = part[0]
        before = [self._by_place.get((group, nth)) for nth in range(unit_start(first), first)]
        known = [key for key in before if key is not None]
        if len(known) < len(before):
            return None
        keys = tuple([key for *_, key in part])
        return Run(chain_at(first, _hashes(known), _hashes(keys), group=group), keys)


def _consecutive(placed: Sequence[_Placed]) -> Iterator[Sequence[_Placed]]:
    """Cut sorted chunks at a new group, a gap, or a shared place."""
    begin = 0
    for at in range(1, len(placed)):
        group, nth, is_partial, _ = placed[at - 1]
        if is_partial or placed[at][1] != nth + 1 or placed[at][0] != group:
            yield placed[begin:at]
            begin = at
    if placed:
        yield placed[begin:]


def _each_by_itself(keys: Iterable[bytes]) -> Iterator[Run]:
    """Build one run per group for chunks without a known order."""
    by_group: dict[int, list[bytes]] = {}
    for key in keys:
        by_group.setdefault(group_of(key), []).append(key)
    for group, listed in sorted(by_group.items()):
        yield Run(unordered_chain(_hashes(listed), group=group), tuple(listed))


def _hashes(keys: Iterable[bytes]) -> list[bytes]:
    return [key[:-GROUP_BYTES] for key in keys]
