"""Many rows at once: BLAKE2b of each, for keys, seeds of tags, and placement; and which differ."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ostraca_fabric.native import at, library

_PERSON_BYTES = 16
_DIGEST_BYTES_MAX = 64


def blake2b_rows(
    prefix: bytes,
    rows: bytes,
    suffixes: NDArray[np.uint8] | bytes,
    *,
    count: int,
    digest_bytes: int,
    person: bytes,
    key: bytes = b"",
) -> NDArray[np.uint8]:
    """Return BLAKE2b (RFC 7693) over *prefix*, one row, and its suffix, for each row: (n, *digest_bytes*).

    *rows* holds *count* rows of the same length, one after another; *suffixes* has shape (n, suffix bytes),
    or is what follows each of them.
    *person* has up to 16 bytes and *key* up to 64, as with ``hashlib.blake2b``.
    """
    row_bytes, left_over = divmod(len(rows), count) if count else (0, len(rows))
    assert not left_over, f"{len(rows)} bytes are not {count} rows"
    assert len(person) <= _PERSON_BYTES, "a personalisation has at most 16 bytes"
    assert len(key) <= _DIGEST_BYTES_MAX, "a key has at most 64 bytes"
    assert 0 < digest_bytes <= _DIGEST_BYTES_MAX, "digests have 1 to 64 bytes"
    if isinstance(suffixes, bytes):
        suffix_bytes, suffix_step = len(suffixes), 0
    else:
        suffixes = np.ascontiguousarray(suffixes, np.uint8)
        suffix_bytes = suffix_step = suffixes.shape[1]
        assert len(suffixes) == count, "each row has a suffix"
    digests = np.empty((count, digest_bytes), np.uint8)
    library.ostraca_blake2b_rows(
        key,
        len(key),
        person.ljust(_PERSON_BYTES, b"\0"),
        prefix,
        len(prefix),
        rows,
        row_bytes,
        suffixes if isinstance(suffixes, bytes) else at(suffixes),
        suffix_bytes,
        suffix_step,
        at(digests),
        digest_bytes,
        count,
    )
    return digests


def distinct(numbers: NDArray[np.intp]) -> NDArray[np.intp]:
    """Return the different ones of small numbers, none negative, in order.

    Takes as much time and memory as the largest is high, and a tenth of what ``np.unique`` takes for a few.
    """
    return np.flatnonzero(np.bincount(numbers))
