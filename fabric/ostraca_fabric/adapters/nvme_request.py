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


def answered(request: dict[str, str]) -> dict[str, object]:
    """Do what is asked."""
    match request["do"]:
        case "connect":
            return connect(request["fabrics"], request["log"], request["options"])
        case "options":
            return options(request["fabrics"])
        case "active":
            return active(request["device"])
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
