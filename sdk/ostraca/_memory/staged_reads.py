"""Reads of drives into staging memory of a device, from begin to the copy of good blocks.

A request has a piece of staging memory, for whole pages of its blocks. The device computes the tags there.
The reader keeps the memory alive, so a late read lands in memory of nobody else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca._memory.device_blocks import DeviceBlocks, DeviceStaging
from ostraca_fabric.model.extent import whole_pages

_NO_REQUEST = -1


class StagedReads:
    """Reads of one get. For the driver's thread."""

    def __init__(self, blocks: DeviceBlocks) -> None:
        """Begin without a read."""
        self._blocks = blocks
        self._staged: dict[int, DeviceStaging] = {}
        count = len(blocks.lengths)
        self._requests = np.full(count, _NO_REQUEST, np.int64)
        self._places = np.zeros(count, np.int64)

    def begin(
        self,
        request: int,
        at: NDArray[np.intp],
        drives: NDArray[np.intp],
        offsets: NDArray[np.int64],
    ) -> tuple[DeviceStaging, NDArray[np.int64]] | None:
        """Return memory for blocks *at* positions, and their places there; None with an ``obstacle``.

        Adjacent blocks of a drive are adjacent in memory.
        """
        spans = whole_pages(self._blocks.lengths[at]).astype(np.int64)
        staged = self._blocks.stage(int(spans.sum()), len(at))
        if staged is None:
            return None
        places, order = np.empty_like(spans), np.lexsort((offsets, drives))
        places[order] = np.cumsum(spans[order]) - spans[order]
        self._staged[request] = staged
        self._requests[at], self._places[at] = request, places
        return staged, places

    @property
    def obstacle(self) -> str:
        """Cause of a ``begin`` without memory."""
        if self._blocks.has_device_tags:
            return "the device has no memory left"
        return "the host computes tags of short blocks, and of blocks on several devices"

    def has(self, blocks: NDArray[np.int64]) -> bool:
        """Tell whether blocks to verify were read here; other blocks are verified apart."""
        return bool((self._requests[blocks] != _NO_REQUEST).any())

    def scatter(
        self,
        blocks: NDArray[np.int64],
        seeds: NDArray[np.uint64],
        tags: NDArray[np.uint8],
        *,
        until_s: float,
    ) -> NDArray[np.uint8]:
        """Verify blocks of one request, and start copies of the good ones, as ``DeviceBlocks.scatter``."""
        staged, places = self._staged[int(self._requests[blocks[0]])], self._places[blocks]
        return self._blocks.scatter_staged(staged, places, seeds, tags, positions=blocks, until_s=until_s)

    def forget(self, at: NDArray[np.intp]) -> None:
        """Forget blocks *at* positions, after failed reads: the agent delivers the blocks instead."""
        self._requests[at] = _NO_REQUEST

    def end(self, request: int) -> None:
        """Let go of a request's memory. No copy from there may be under way."""
        self._staged.pop(request, None)
