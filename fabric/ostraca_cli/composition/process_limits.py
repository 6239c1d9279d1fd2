"""Environment of a process: folders, descriptors, threads, memory.

The module explains a lack of resources in a sentence, and refuses a start under limits that are too low.
"""

from __future__ import annotations

import errno
import os
import resource

from ostraca_fabric.errors import OstracaError, ResourceError
from ostraca_fabric.nixl.room import startable_threads
from ostraca_fabric.runtime.os_errors import explained

_NO_MEMORY = (
    "this process has no memory left: raise the limit (ulimit -v, or memory.max of the cgroup), or "
    "lower the memory settings"
)
_NO_THREAD = (
    "this process can't start another thread: raise the limits (ulimit -u, ulimit -v, or pids.max of "
    "the cgroup)"
)
_ETCD_THREADS = 16
_ETCD_DESCRIPTORS = 24
"""Descriptors of grpc, and of the rest of its process."""

_NOT_LOADED = (
    "cannot open shared object",
    "failed to map segment",
    "cannot allocate memory",
    "Cannot allocate",
)


def error_text(error: BaseException) -> str:
    """Return the sentence for an error of the environment; empty for other errors."""
    if isinstance(error, OstracaError):
        return str(error)
    if isinstance(error, OSError):
        return _words_of_system(error)
    if isinstance(error, MemoryError):
        return _NO_MEMORY
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return _NO_THREAD
    if isinstance(error, ImportError) and any(each in str(error) for each in _NOT_LOADED):
        return (
            f"a library can't be loaded ({error}): raise the memory limit (ulimit -v), or reinstall "
            "the library"
        )
    return ""


def _words_of_system(error: OSError) -> str:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        whose = "this process" if error.errno == errno.EMFILE else "this machine"
        return f"{whose} has no file descriptor left (limit of this process: {soft}): raise ulimit -n"
    if error.errno == errno.ENOMEM:
        return _NO_MEMORY
    if error.errno == errno.ENOENT and not error.filename and not _has_working_directory():
        return "the working directory was removed: change to another directory, or use absolute paths"
    return explained(error)


def _has_working_directory() -> bool:
    try:
        os.getcwd()  # noqa: PTH109 (the question is whether it fails)
    except OSError:
        return False
    return True


def check_client_of_etcd(consumer: str) -> None:
    """Raise ResourceError if an etcd client would lack threads or descriptors."""
    check_descriptors(_ETCD_DESCRIPTORS, consumer=consumer)
    check_threads(_ETCD_THREADS, consumer=consumer)


def check_threads(required: int, *, consumer: str) -> None:
    """Raise ResourceError, with both numbers, if too few threads can be started.

    Starts and ends threads, because limits of user, cgroup and address space all count.
    """
    started = startable_threads(required)
    if started < required:
        raise ResourceError(
            f"{consumer} needs {required} threads, and can start {started}: raise ulimit -u, ulimit -v, or "
            "pids.max of the cgroup"
        )


def check_descriptors(required: int, *, consumer: str) -> None:
    """Raise ResourceError, with both numbers, if too few descriptors are allowed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and limit < required:
        raise ResourceError(
            f"{consumer} needs at least {required} file descriptors, and the limit is {limit}: raise ulimit "
            "-n, or LimitNOFILE of the unit"
        )
