"""How deep in their chains the blocks of a put lie, and which chains are too short to be worth it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.chain import DEPTH_UNKNOWN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from ostraca_dpu_agent.volumes import ServedVolume
    from ostraca_fabric.chain import Span


def depths_of(spans: Sequence[Span]) -> NDArray[np.uint32]:
    """Return how many blocks of its chain come before each block; DEPTH_UNKNOWN where nobody knows."""
    depths = np.full(sum(map(len, spans)), DEPTH_UNKNOWN, np.uint32)
    begin = 0
    for span in spans:
        if span.depth != DEPTH_UNKNOWN:
            depths[begin : begin + len(span)] = np.arange(span.depth, span.depth + len(span))
        begin += len(span)
    return depths


def is_too_short(volume: ServedVolume, spans: Sequence[Span]) -> NDArray[np.bool_]:
    """Say of each block whether its whole chain, as far as the writer knows it, is below break-even.

    What counts is the chain's length and not the block's depth: a long chain is loaded in one go, its first
    blocks with it. Blocks of no chain are never too short.
    """
    page_tokens = volume.record.layout.page_tokens
    short = [0 < span.chain_blocks * page_tokens < volume.break_even_tokens for span in spans]
    return np.repeat(np.array(short, np.bool_), [len(span) for span in spans])
