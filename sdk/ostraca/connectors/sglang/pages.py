"""Names of pages, and the blocks of a page. Pure.

SGLang names a page by a hash of all tokens up to the page's end. A page of the main pool that fits one block
keeps SGLang's hash, so that ``ostraca explain`` takes the hash from SGLang's log. Hashes of other blocks are
derived from page, pool and number, so bytes of another pool or form are a miss. A generation, once an engine
has cleared its storage, changes all hashes.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ostraca.connectors.kv_identity.chains import Run, chain_at, unit_start, unordered_chain

HASH_BYTES = 32

_HEX_HASH = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


@dataclass(frozen=True, slots=True)
class PageForm:
    """Form of the pages of one pool."""

    part_bytes: tuple[int, ...]
    """Sizes of a page's parts in memory, in order; empty for a pool without bytes."""

    block_bytes: int
    """Largest block."""

    facts: str = ""
    """Facts about the pool that the layout of the volume does not hold; empty for the main pool."""

    rank: int = 0
    """Rank in the layout of the volume."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return sum(self.part_bytes)

    @property
    def blocks_per_page(self) -> int:
        """Blocks of a page."""
        return -(-self.page_bytes // self.block_bytes)

    def hashes(self, keys: Sequence[str], generation: bytes = b"") -> list[bytes]:
        """Return the hashes of the blocks of pages, page after page."""
        found = []
        for key in keys:
            page = bytes.fromhex(key) if _HEX_HASH.fullmatch(key) else _digest(key.encode())
            if not self.facts and not generation and self.blocks_per_page == 1:
                found.append(page)
                continue
            root = _digest(page, self.facts.encode(), generation)
            found.extend(_digest(root, number.to_bytes(4, "big")) for number in range(self.blocks_per_page))
        return found

    def run(self, keys: Sequence[str], prefix: Sequence[str] | None, generation: bytes = b"") -> Run:
        """Return the run of the blocks of pages that follow *prefix*, all keys from the root.

        Without *prefix*, positions are unknown, and each block is placed by its own hash.
        """
        hashes = self.hashes(keys, generation)
        if prefix is None:
            return Run(unordered_chain(hashes, rank=self.rank), tuple(hashes))
        position = len(prefix) * self.blocks_per_page
        first_page = unit_start(position) // self.blocks_per_page
        earlier = self.hashes(prefix[first_page:], generation)
        unit = earlier[len(earlier) - (position - unit_start(position)) :]
        return Run(chain_at(position, unit, hashes, rank=self.rank), tuple(hashes))

    def are_pages_good(self, are_good: Sequence[bool]) -> list[bool]:
        """Return the success of each page: all of its blocks are good."""
        count = self.blocks_per_page
        return [all(are_good[begin : begin + count]) for begin in range(0, len(are_good), count)]

    def blocks(self, addresses: Sequence[int]) -> list[list[tuple[int, int]]]:
        """Cut a page, given as the address of each part, into blocks: address and bytes of each piece."""
        blocks: list[list[tuple[int, int]]] = [[] for _ in range(self.blocks_per_page)]
        before = 0
        for address, part_bytes in zip(addresses, self.part_bytes, strict=True):
            begin, end = before, before + part_bytes
            while begin < end:
                number = begin // self.block_bytes
                stop = min(end, (number + 1) * self.block_bytes)
                blocks[number].append((address + begin - before, stop - begin))
                begin = stop
            before = end
        return blocks


def trailing_ends(are_there: Sequence[bool], window: int) -> list[int]:
    """Return the prefix lengths whose last *window* pages are all there, in ascending order."""
    ends, begin = [], 0
    for end, is_there in enumerate(are_there, 1):
        if not is_there:
            begin = end
        elif begin <= max(0, end - window):
            ends.append(end)
    return ends


def leading(are_good: Sequence[bool]) -> int:
    """Count the successes from the first on."""
    return next((n for n, is_good in enumerate(are_good) if not is_good), len(are_good))


def _digest(*parts: bytes) -> bytes:
    hashed = hashlib.blake2b(digest_size=HASH_BYTES, person=b"ostraca-sglang")
    for part in parts:
        hashed.update(len(part).to_bytes(4, "big") + part)
    return hashed.digest()
