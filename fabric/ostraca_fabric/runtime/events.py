"""Events between threads: eventfds, used without giving the GIL up.

Python's own ``os.eventfd_write`` and ``os.eventfd_read`` give the GIL up for a microsecond. Beside a busy
thread of Python, the caller gets the GIL back after 5 ms.
"""

from __future__ import annotations

import ctypes

_libc = ctypes.PyDLL(None)
_libc.eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
_libc.eventfd_read.argtypes = (ctypes.c_int, ctypes.c_void_p)


def set_event(descriptor: int) -> None:
    """Make an eventfd readable."""
    _libc.eventfd_write(descriptor, 1)


def clear_event(descriptor: int) -> None:
    """Make a non-blocking eventfd unreadable, if it was readable."""
    _libc.eventfd_read(descriptor, ctypes.byref(ctypes.c_uint64()))
