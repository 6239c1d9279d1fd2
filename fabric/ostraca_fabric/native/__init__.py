"""Loops over blocks in C, the longer ones without the GIL (``library``), the others with it (``brief``).

Python handles requests, waves and I/Os. Work on each *block* (hashing, comparing, copying, I/O, lookup by
key) is a single call into this library for a whole batch. ``hatch_build.py`` compiles the C files of this
folder at installation; docs/adr/0010 has the reasons.

Only the modules that define the calls import this module; the SDK's copy pool chooses how to call. The calls
take addresses, so callers keep the memory alive during a call.
"""

from __future__ import annotations

import ctypes
from ctypes import (
    addressof,
    c_char,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_uint32,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from xxhash import _xxhash  # type: ignore[attr-defined]  # the stubs lack the C module

FILE_NAME = "libostraca.so"

INTERFACE = 16
"""Interface of the library, equal to the number in ``ostraca.h``. A library compiled from other sources would
misread arguments and crash the process."""

_REMEDY = "Run `make test`, or `pip install -e .` in your own environment, which compile it"

_at = c_void_p  # an array's first byte
_bytes = c_uint64
_count = c_int64

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    # memory, its size, offsets, lengths, seeds, tags made, blocks
    "ostraca_tags": (_count, [_at, _bytes, _at, _at, _at, _at, _count]),
    # memory, its size, offsets, lengths, seeds, tags, states, blocks, in pages, process, addresses there
    "ostraca_verify": (_count, [_at, _bytes, _at, _at, _at, _at, _at, _count, c_int, c_int, _at]),
    # memory, its size, offsets, lengths, seeds, parts, first part of each block, tags made, blocks
    "ostraca_gather": (_count, [_at, _bytes, _at, _at, _at, _at, _at, _at, _count]),
    # memory, its size, offsets, lengths, seeds, tags, parts, first part, which block, until_s, process,
    # addresses there, verdicts, blocks
    "ostraca_scatter": (
        _count,
        [_at, _bytes, _at, _at, _at, _at, _at, _at, _at, c_double, c_int, _at, _at, _count],
    ),
    # no io_uring, bytes under way of a drive and in all, checkers, errno; the engine
    "ostraca_io_open": (_at, [c_int, _bytes, _bytes, c_int, _at]),
    "ostraca_io_close": (None, [_at]),
    "ostraca_io_event": (c_int, [_at]),
    "ostraca_io_mode": (c_char_p, [_at]),
    # the engine, descriptor, process, drive's size; the drive
    "ostraca_io_attach": (_at, [_at, c_int, c_int, _bytes]),
    "ostraca_io_detach": (None, [_at]),
    # the drive, operation, columns, ticket
    "ostraca_io_submit": (_count, [_at, c_int, _at, c_uint64]),
    # the engine, ends, room for how many
    "ostraca_io_take": (_count, [_at, _at, _count]),
    # descriptor, head, its bytes, passage, bytes passed, most bytes of blocks to move
    "ostraca_send": (_count, [c_int, _at, _bytes, _at, _bytes, _bytes]),
    # descriptor, passage, bytes passed, most bytes of blocks to move, tail, its bytes, descriptor that ends
    # the wait, most ms to wait
    "ostraca_receive": (_count, [c_int, _at, _bytes, _bytes, _at, _bytes, c_int, c_int64]),
    # passage, bytes passed, bytes that came, how many
    "ostraca_fill": (_count, [_at, _bytes, _at, _bytes]),
    # key, its bytes, person, prefix, its bytes, rows, bytes of one, suffixes, bytes of one, bytes from one to
    # the next, digests, bytes of one, rows
    "ostraca_blake2b_rows": (
        _count,
        [_at, _bytes, _at, _at, _bytes, _at, _bytes, _at, _bytes, _bytes, _at, _bytes, _count],
    ),
    # units, rank and group of each, enclosures, their shares, how many, shards by enclosure, their shares and
    # indexes, most shards of one, shards chosen, units
    "ostraca_place": (None, [_at, _at, _at, _at, _count, _at, _at, _at, _count, _at, _count]),
    # numbers, variates, numbers
    "ostraca_variates": (None, [_at, _at, _count]),
    # pool, bytes of a slot, offsets taken, how many
    "ostraca_slots_take": (_count, [_at, c_int64, _at, _count]),
    # pool, bytes of a slot, how many, the highest state that a page of them may be in
    "ostraca_slots_fit": (_count, [_at, c_int64, _count, c_int]),
    # pool, offsets, how many, state before, state after
    "ostraca_slots_move": (_count, [_at, _at, _count, c_int, c_int]),
    # offsets, how many, bytes of a chunk and of a slot, numbers made
    "ostraca_slots_number": (c_int64, [_at, _count, c_int64, c_int64, _at]),
    # offsets in staging, its size, offsets in the arena, its size, lengths, the longest allowed, how many
    "ostraca_wave_fits": (c_int64, [_at, _bytes, _at, _bytes, _at, c_int64, _count]),
    # slots, mask, keys by row, keys wanted, rows found, how many
    "ostraca_table_find": (None, [_at, c_uint64, _at, _at, _at, _count]),
    # slots, mask, keys by row, numbers by row, keys and numbers wanted, positions and rows found, how many
    "ostraca_table_match": (_count, [_at, c_uint64, _at, _at, _at, _at, _at, _count]),
    # slots, mask, keys by row, rows, rows that hold the keys, how many
    "ostraca_table_enter": (None, [_at, c_uint64, _at, _at, _at, _count]),
    # slots, mask, keys by row, rows, how many
    "ostraca_table_remove": (_count, [_at, c_uint64, _at, _at, _count]),
    # states of the parts, rows, numbers, how many, their part
    "ostraca_lru_enter": (None, [_at, _at, _at, _count, _count]),
    # states of the parts, rows, numbers, how many
    "ostraca_lru_hold": (None, [_at, _at, _at, _count]),
    "ostraca_lru_let_go": (_count, [_at, _at, _at, _count]),
    # states of the parts, rows, most protected bytes of each part, parts
    "ostraca_lru_protect": (None, [_at, _at, _at, _count]),
    # states of the parts, rows, bytes wanted, numbers, room for how many, the part
    "ostraca_lru_evict": (_count, [_at, _at, c_int64, _at, _count, _count]),
    # the index, keys wanted, rows found, how many
    "ostraca_index_find": (None, [_at, _at, _at, _count]),
    # the index, keys wanted, lengths by row, whether read bits are set, which are listed, how many
    "ostraca_index_has": (_count, [_at, _at, _at, _count, _at, _count]),
    # the index, rows, how many
    "ostraca_index_place": (None, [_at, _at, _count]),
    "ostraca_index_unplace": (_count, [_at, _at, _count]),
    # pages, lengths and tags by row, rows, bytes of a page, whether read bits are set, offsets, lengths and
    # tags made, how many
    "ostraca_index_read": (None, [_at, _at, _at, _at, _bytes, _count, _at, _at, _at, _count]),
    # next chunks, free chunks, a segment's newest chunk, its rows, rows taken, how many
    "ostraca_index_take_rows": (None, [_at, _at, _at, _at, _at, _count]),
    # next chunks, a segment's newest chunk, its rows, rows listed
    "ostraca_index_rows_of": (None, [_at, c_int32, c_uint32, _at]),
}

BRIEF_BYTES = 4 << 20
"""Bytes to copy and hash in half a millisecond: a tenth of what other threads of Python may take."""

_XXH3 = (
    "XXH3_128bits_withSeed",
    "XXH3_createState",
    "XXH3_128bits_reset_withSeed",
    "XXH3_128bits_update",
    "XXH3_128bits_digest",
    "XXH3_freeState",
)


def at(array: NDArray[Any] | bytearray | memoryview) -> int:
    """Return the address of an array's first byte.

    The array must be C-contiguous, and outlive the call.
    """
    try:
        return addressof(c_char.from_buffer(array))  # type: ignore[arg-type]  # a quarter of the time below
    except (TypeError, ValueError):  # read-only, empty, or not contiguous
        assert not isinstance(array, (bytearray, memoryview)), "such memory is writable and not empty"
        assert array.flags.c_contiguous, "C sees an array's items one after another"
        return int(array.__array_interface__["data"][0])  # a fifth of the time of ``array.ctypes.data``


def loaded(path: Path) -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """Return the library at *path*, without the GIL during calls and with it.

    Raises ImportError, with the remedy, for an unusable file.
    """
    if not path.exists():
        raise ImportError(
            f"{FILE_NAME} is not there: this is a source tree that was never installed. {_REMEDY}"
        )
    found = ctypes.CDLL(str(path))
    interface = found.ostraca_interface() if hasattr(found, "ostraca_interface") else 0
    if interface != INTERFACE:
        raise ImportError(
            f"{path} was compiled from other sources than the Python beside it (its interface is "
            f"{interface}, and {INTERFACE} is wanted). {_REMEDY} anew"
        )
    brief_calls = ctypes.PyDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        for function in (getattr(found, name), getattr(brief_calls, name)):
            function.restype, function.argtypes = result, arguments
    hashing = ctypes.CDLL(_xxhash.__file__)
    try:
        functions = [ctypes.cast(_widest(hashing, name), c_void_p).value for name in _XXH3]
    except AttributeError as error:
        raise ImportError(
            f"the xxhash package at {_xxhash.__file__} does not offer {error}: install the one from PyPI"
        ) from error
    found.ostraca_use_xxh3((c_void_p * len(_XXH3))(*functions))
    return found, brief_calls


def _widest(hashing: ctypes.CDLL, name: str) -> Any:  # noqa: ANN401 (ctypes has no type for a function's address)
    """Return an XXH3 function, preferring dispatch to the widest vectors of the machine.

    The plain name uses SSE2 on x86-64, at half the speed.
    """
    chooses = f"{name}_dispatch"
    return getattr(hashing, chooses if hasattr(hashing, chooses) else name)


library, brief = loaded(Path(__file__).with_name(FILE_NAME))
"""The loaded library. Comments in the C files describe the functions. Calls of *brief* keep the GIL: beside a
busy thread of Python, a call that gives the GIL up gets it back after 5 ms.
"""


def library_for(work_bytes: int) -> ctypes.CDLL:
    """Return the library for a call over so many bytes: with the GIL if the call is brief."""
    return brief if work_bytes <= BRIEF_BYTES else library
