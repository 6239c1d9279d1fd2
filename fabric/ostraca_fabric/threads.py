"""Names of threads that the kernel shows: in ``top -H``, in profilers, and to ``benchmarks.where``."""

from __future__ import annotations

import ctypes

_PR_SET_NAME = 15
_NAME_BYTES_MAX = 15

_libc = ctypes.CDLL(None, use_errno=True)


def show_name(name: str) -> None:
    """Give the calling thread a name of up to 15 bytes; a longer one is cut.

    Before 3.14 Python keeps to itself what ``threading.Thread`` is told.
    """
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:_NAME_BYTES_MAX]), 0, 0, 0)
