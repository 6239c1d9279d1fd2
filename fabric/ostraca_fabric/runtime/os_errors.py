"""Errors of the operating system as sentences: object, state, remedy. Pure."""

from __future__ import annotations

import errno
import os

_STATES = {
    errno.EACCES: ("permission denied", "run this as the owner, or give its user access"),
    errno.EPERM: ("operation not permitted", "run this as the owner, or give its user access"),
    errno.EROFS: ("the file system is mounted read-only", "mount it for writing"),
    errno.ENOSPC: ("the file system is full", "free some space there"),
    errno.EDQUOT: ("the disk quota is used up", "free some space there, or raise the quota"),
    errno.ENOENT: ("nothing is there", "check the path, or mount the disk"),
    errno.ENOTDIR: ("a part of its path is not a folder", "correct the path"),
    errno.EISDIR: ("it is a folder, not a file", "move it away"),
    errno.ELOOP: ("its links lead in a circle", "correct the links"),
    errno.EMFILE: ("no file descriptor is left to this process", "raise its limit of open files (ulimit -n)"),
    errno.ENFILE: ("no file descriptor is left on this machine", "raise fs.file-max"),
    errno.EIO: ("the disk failed", "read the kernel's log, and replace the disk"),
    errno.ENXIO: ("no device is behind it", "connect the device"),
    errno.ENODEV: ("no device is behind it", "connect the device"),
    errno.ESTALE: ("the network file system lost it", "mount that again"),
    errno.ETXTBSY: ("a running program is executed from this file", "end the program, or correct the path"),
    errno.EADDRINUSE: ("the address is in use", "end the other listener, or take another address"),
    errno.EADDRNOTAVAIL: ("this machine does not have the address", "take an address of this machine"),
    errno.EEXIST: ("something is there already", "name another place"),
    errno.ENAMETOOLONG: ("the path is too long", "take a shorter one"),
    errno.ENOTCONN: ("its file system is not connected", "mount that again"),
    errno.ECONNREFUSED: ("nothing listens there", "start the server, or correct the address"),
    errno.EBUSY: ("in use by another process", "end that process"),
}


def state_and_remedy(error: OSError) -> tuple[str, str]:
    """Return state and remedy of an error as clauses; no remedy if none is known."""
    number = error.errno
    if number is None:
        return str(error) or type(error).__name__, ""
    if error.strerror not in (None, os.strerror(number)):  # a text set by the raiser
        return error.strerror, ""
    return _STATES.get(number) or (os.strerror(number), "")


def explained(error: OSError) -> str:
    """Return an error as ``object: state; remedy``, in place of ``[Errno 13] ...``."""
    state, remedy = state_and_remedy(error)
    names = [_name(each) for each in (error.filename, error.filename2) if each is not None]
    told = f"{' -> '.join(names)}: {state}" if names else state
    return f"{told}; {remedy}" if remedy else told


def _name(path: object) -> str:
    return os.fsdecode(path) if isinstance(path, bytes) else str(path)
