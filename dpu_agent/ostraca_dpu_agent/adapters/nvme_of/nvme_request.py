"""A request to Linux's NVMe-oF host: ``python -I -S nvme_request.py``.

Such a call may block in the kernel while an enclosure is silent, and some calls end by no signal. A
separate process therefore makes the call, so that no caller must wait for its end. The request is JSON on
standard input: arguments are readable by every user, and a request may hold a secret. The answer is a JSON
object on standard output. Only the standard library is imported, so the program starts in a few
milliseconds.

A controller is made as by ``nvme connect``: write the options to ``/dev/nvme-fabrics``, then read the
controller's number.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import struct
import sys

_DHCHAP_PREFIX = "DHHC-"
_LINES_MAX = 32
_LINE_CHARS_MAX = 400
_READ_BYTES = 1 << 16
_IDENTIFY = 0x06
_ACTIVE_NAMESPACES = 0x02
_LIST_BYTES = 4096
_ADMIN_COMMAND = struct.Struct("<BBHIIIQQIIIIIIIIII")
"""``struct nvme_passthru_cmd`` of ``linux/nvme_ioctl.h``."""

_ADMIN_IOCTL = 0xC0484E41
"""``NVME_IOCTL_ADMIN_CMD``."""

_IO_IOCTL = 0xC0484E43
"""``NVME_IOCTL_IO_CMD``."""

_ID_IOCTL = 0x4E40
"""``NVME_IOCTL_ID``: the number of a device's namespace within its subsystem."""

_REGISTER, _REPORT, _ACQUIRE, _RELEASE = 0x0D, 0x0E, 0x11, 0x15
_TYPE = 5 << 8
"""Write Exclusive - All Registrants."""

_COMMANDS = {
    "register": (_REGISTER, 0),
    "reserve": (_ACQUIRE, _TYPE),
    "clear": (_RELEASE, 1),
    "preempt": (_ACQUIRE, _TYPE | 1),
}
"""Command of each action, and its first word: action and type."""

_CONFLICT = 0x83
_UNSUPPORTED = (0x01, 0x02)
"""Invalid Command Opcode, and Invalid Field."""

_STATUS_BITS = 0x7FF
_REGISTRANTS_MAX = 511
_REPORT_HEAD = struct.Struct("<IBH2xB54x")
_REGISTRANT = struct.Struct("<HB5xQ16s32x")
"""Registrant of the extended data structure, the only form in NVMe-oF: host identifiers of 128 bits."""


class KernelLog:
    """Kernel log since a point in time; empty if this process may not read the log."""

    def __init__(self, path: str) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            self._fd = -1
            return
        try:
            os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            os.close(self._fd)
            self._fd = -1

    def close(self) -> None:
        """Stop following the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def lines(self) -> list[str]:
        """Return the NVMe lines since the log was opened."""
        found: list[str] = []
        while self._fd >= 0 and len(found) < _LINES_MAX:
            try:
                record = os.read(self._fd, _READ_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # lines were overwritten before the read
                    continue
                break
            if not record:
                break
            text = record.decode("utf-8", "replace").partition(";")[2].split("\n", 1)[0]
            if text.startswith("nvme") and _DHCHAP_PREFIX not in text:
                found.append(text[:_LINE_CHARS_MAX])
        return found


def connect(fabrics: str, log: str, options: str) -> dict[str, object]:
    """Make a controller; return its number."""
    fd = os.open(fabrics, os.O_RDWR | os.O_NOCTTY)
    log_reader = KernelLog(log)
    try:
        os.write(fd, options.encode())
        answer = os.read(fd, _READ_BYTES).decode()
    except OSError as error:
        return {"errno": error.errno, "during": "connect", "log": log_reader.lines()}
    found = dict(part.partition("=")[::2] for part in answer.strip().split(","))
    return {"instance": int(found["instance"])}


def options(fabrics: str) -> dict[str, object]:
    """Return the options known to this kernel.

    Empty for a kernel that lists none (Linux before 5.17).
    """
    fd = os.open(fabrics, os.O_RDWR | os.O_NOCTTY)
    try:
        answer = os.read(fd, _READ_BYTES).decode()
    except OSError as error:
        if error.errno == errno.EINVAL:
            return {"options": []}
        raise
    return {"options": [part.partition("=")[0] for part in answer.strip().split(",")]}


def write(path: str, text: str) -> dict[str, object]:
    """Write to an attribute."""
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, text.encode())
    return {}


def active(device: str) -> dict[str, object]:
    """Return the number of active namespaces of a controller, up to 1024."""
    fd = os.open(device, os.O_RDONLY)
    listed = ctypes.create_string_buffer(_LIST_BYTES)
    command = bytearray(
        _ADMIN_COMMAND.pack(
            _IDENTIFY,
            0,
            0,
            0,
            0,
            0,
            0,
            ctypes.addressof(listed),
            0,
            _LIST_BYTES,
            _ACTIVE_NAMESPACES,
            *[0] * 7,
        )
    )
    status = fcntl.ioctl(fd, _ADMIN_IOCTL, command)
    if status:
        return {"errno": errno.EIO, "during": f"identify, status {status:#x}", "log": []}
    return {"active": sum(bool(number) for (number,) in struct.iter_unpack("<I", listed.raw))}


def pass_command(
    fd: int, opcode: int, word: int, data: ctypes.Array[ctypes.c_char], *, extended: int = 0
) -> int:
    """Pass a reservation command to a namespace.

    Returns the status code, without the bits around the code.
    """
    words = [word, extended, 0, 0, 0, 0]
    command = _ADMIN_COMMAND.pack(
        *(opcode, 0, 0, fcntl.ioctl(fd, _ID_IOCTL), 0, 0, 0),
        *(ctypes.addressof(data), 0, len(data), *words, 0, 0),
    )
    status: int = fcntl.ioctl(fd, _IO_IOCTL, bytearray(command))
    return status & _STATUS_BITS


def report(device: str) -> dict[str, object] | None:
    """Return a namespace's reservation and registrants.

    None for a device without reservations. A failed query returns ``errno``.
    """
    data = ctypes.create_string_buffer(_REPORT_HEAD.size + _REGISTRANTS_MAX * _REGISTRANT.size)
    try:
        status = pass_command(os.open(device, os.O_RDONLY), _REPORT, len(data) // 4 - 1, data, extended=1)
    except OSError as error:
        return None if error.errno in (errno.ENOTTY, errno.EINVAL) else {"errno": error.errno}
    if status:
        return None if status in _UNSUPPORTED else {"errno": errno.EIO}
    _, kind, count, _ = _REPORT_HEAD.unpack_from(data)
    listed = data.raw[_REPORT_HEAD.size :][: min(count, _REGISTRANTS_MAX) * _REGISTRANT.size]
    return {"type": kind, "keys": [key for _, _, key, _ in _REGISTRANT.iter_unpack(listed)]}


def reserve(device: str, act: str, key: int, other: int) -> dict[str, object]:
    """Change the reservation of a namespace; return whether the change succeeded."""
    opcode, word = _COMMANDS[act]
    keys = {"register": (0, key), "preempt": (key, other)}.get(act, (key, 0))
    data = ctypes.create_string_buffer(struct.pack("<QQ", *keys), 16)
    fd = os.open(device, os.O_RDWR)
    status = pass_command(fd, opcode, word, data)
    if status not in (0, _CONFLICT):
        return {"errno": errno.EIO, "during": f"{act}, status {status:#x}", "log": []}
    return {"is_done": status == 0}


def execute(request: dict[str, str]) -> dict[str, object]:
    """Execute a request."""
    match request["do"]:
        case "connect":
            return connect(request["fabrics"], request["log"], request["options"])
        case "options":
            return options(request["fabrics"])
        case "active":
            return active(request["device"])
        case "reports":
            return {"reports": [report(device) for device in request["devices"].split("\n")]}
        case "reserve":
            return reserve(request["device"], request["act"], int(request["key"]), int(request["other"]))
        case _:
            return write(request["path"], request["text"])


def main() -> None:
    """Execute the request on standard input."""
    try:
        answer = execute(json.load(sys.stdin))
    except OSError as error:
        answer = {"errno": error.errno, "during": "open", "log": []}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
