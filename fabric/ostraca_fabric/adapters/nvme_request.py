"""One request to Linux's NVMe-oF host, as a program of its own: ``python -I -S nvme_request.py``.

Each of these calls may block in the kernel for as long as an enclosure does not answer, and no signal ends
some of them; so a process makes it whom nobody has to wait for. The request comes by standard input, as JSON,
for it may hold a secret, and arguments can be read by everybody. The answer is one JSON object on standard
output. Nothing but the standard library is imported, so it starts in a few milliseconds.

A controller is made as ``nvme connect`` makes it: by writing its options to ``/dev/nvme-fabrics``, and
reading back which one it is.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import struct
import sys

_BEGINS_SECRETS = "DHHC-"
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
"""``NVME_IOCTL_ID``: which namespace of its subsystem a device is."""

_REGISTER, _REPORT, _ACQUIRE, _RELEASE = 0x0D, 0x0E, 0x11, 0x15
_TYPE = 5 << 8
"""Write Exclusive - All Registrants."""

_ACTS = {
    "register": (_REGISTER, 0),
    "reserve": (_ACQUIRE, _TYPE),
    "clear": (_RELEASE, 1),
    "bar": (_ACQUIRE, _TYPE | 1),
}
"""The command of each, and its first word: the action, with the type."""

_CONFLICT = 0x83
_NOT_KNOWN = (0x01, 0x02)
"""Invalid Command Opcode, and Invalid Field."""

_STATUS_BITS = 0x7FF
_REGISTRANTS_MAX = 511
_REPORT_HEAD = struct.Struct("<IBH2xB54x")
_REGISTRANT = struct.Struct("<HB5xQ16s32x")
"""As of the extended data structure, with host identifiers of 128 bits, which NVMe-oF has alone."""


class Log:
    """What the kernel says meanwhile; nothing where this process may not read it."""

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
        """Follow it no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def lines(self) -> list[str]:
        """Return what it said of NVMe since this was made."""
        found: list[str] = []
        while self._fd >= 0 and len(found) < _LINES_MAX:
            try:
                record = os.read(self._fd, _READ_BYTES)
            except OSError as error:
                if error.errno == errno.EPIPE:  # some were overwritten before they were read
                    continue
                break
            if not record:
                break
            text = record.decode("utf-8", "replace").partition(";")[2].split("\n", 1)[0]
            if text.startswith("nvme") and _BEGINS_SECRETS not in text:
                found.append(text[:_LINE_CHARS_MAX])
        return found


def connect(fabrics: str, log: str, options: str) -> dict[str, object]:
    """Make a controller; return its number."""
    fd = os.open(fabrics, os.O_RDWR | os.O_NOCTTY)
    said = Log(log)
    try:
        os.write(fd, options.encode())
        answer = os.read(fd, _READ_BYTES).decode()
    except OSError as error:
        return {"errno": error.errno, "during": "connect", "log": said.lines()}
    found = dict(part.partition("=")[::2] for part in answer.strip().split(","))
    return {"instance": int(found["instance"])}


def options(fabrics: str) -> dict[str, object]:
    """Return which options this kernel knows; none where it does not say (Linux before 5.17)."""
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
    """Return how many namespaces a controller says are active: of up to 1024."""
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


def passed(fd: int, opcode: int, word: int, data: ctypes.Array[ctypes.c_char], *, extended: int = 0) -> int:
    """Pass a command on reservations to a namespace; return its status, without the bits around it."""
    words = [word, extended, 0, 0, 0, 0]
    command = _ADMIN_COMMAND.pack(
        *(opcode, 0, 0, fcntl.ioctl(fd, _ID_IOCTL), 0, 0, 0),
        *(ctypes.addressof(data), 0, len(data), *words, 0, 0),
    )
    status: int = fcntl.ioctl(fd, _IO_IOCTL, bytearray(command))
    return status & _STATUS_BITS


def report(device: str) -> dict[str, object] | None:
    """Return how a namespace is reserved, and by whom; None where it is none that can be. What kept it from
    being asked is ``errno``.
    """
    data = ctypes.create_string_buffer(_REPORT_HEAD.size + _REGISTRANTS_MAX * _REGISTRANT.size)
    try:
        status = passed(os.open(device, os.O_RDONLY), _REPORT, len(data) // 4 - 1, data, extended=1)
    except OSError as error:
        return None if error.errno in (errno.ENOTTY, errno.EINVAL) else {"errno": error.errno}
    if status:
        return None if status in _NOT_KNOWN else {"errno": errno.EIO}
    _, kind, count, _ = _REPORT_HEAD.unpack_from(data)
    listed = data.raw[_REPORT_HEAD.size :][: min(count, _REGISTRANTS_MAX) * _REGISTRANT.size]
    return {"type": kind, "keys": [key for _, _, key, _ in _REGISTRANT.iter_unpack(listed)]}


def reserve(device: str, act: str, key: int, other: int) -> dict[str, object]:
    """Ask for something about the reservation of a namespace; say whether it was done."""
    opcode, word = _ACTS[act]
    keys = {"register": (0, key), "bar": (key, other)}.get(act, (key, 0))
    data = ctypes.create_string_buffer(struct.pack("<QQ", *keys), 16)
    fd = os.open(device, os.O_RDWR)
    status = passed(fd, opcode, word, data)
    if status not in (0, _CONFLICT):
        return {"errno": errno.EIO, "during": f"{act}, status {status:#x}", "log": []}
    return {"is_done": status == 0}


def answered(request: dict[str, str]) -> dict[str, object]:
    """Do what is asked."""
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
    """Do what standard input asks."""
    try:
        answer = answered(json.load(sys.stdin))
    except OSError as error:
        answer = {"errno": error.errno, "during": "open", "log": []}
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
