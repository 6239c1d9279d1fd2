"""Bulk frames by hand, right or wrong."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np


def bulk_start(transfer: int, places: Sequence[int], lengths: Sequence[int]) -> bytes:
    """Return what goes before the blocks; neither count nor sums are looked at."""
    columns = np.array(places, "<u8").tobytes() + np.array(lengths, "<u4").tobytes()
    rest = struct.pack("<BQI", 1, transfer, len(places)) + columns
    return struct.pack("<I", len(rest) + sum(lengths)) + rest


def bulk_frame(transfer: int, *blocks: tuple[int, bytes]) -> bytes:
    """Return the frame that carries these bytes to these places."""
    places, payloads = [place for place, _ in blocks], [payload for _, payload in blocks]
    return bulk_start(transfer, places, list(map(len, payloads))) + b"".join(payloads)
