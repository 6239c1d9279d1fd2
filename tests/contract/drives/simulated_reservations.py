"""Namespaces that can be reserved, as Linux's target has them, and hosts whose kernel passes commands on.

It follows ``drivers/nvme/target/pr.c`` of Linux 6.13: what each command does to registrants and to who holds
the reservation, what is refused with which status, and how the report is laid out. A host is known by its
host identifier, whatever controller it comes by.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ostraca_dpu_agent.adapters.nvme_of import nvme_request
from ostraca_dpu_agent.adapters.nvme_of.kernel import KernelError
from ostraca_dpu_agent.experimental.nvme_reservations import NvmeReservations

_DO_NOT_RETRY = 0x4000
CONFLICT = 0x83 | _DO_NOT_RETRY
INVALID_FIELD = 0x02 | _DO_NOT_RETRY
INVALID_OPCODE = 0x01 | _DO_NOT_RETRY
HOST_ID_INCONSISTENT = 0x18 | _DO_NOT_RETRY
_ALL_REGISTRANTS = (5, 6)
_REGISTRANTS_ONLY = (3, 4)


class SimulatedNamespace:
    """One namespace, and where the hosts open it: a file that is empty."""

    def __init__(self, device: Path, *, is_enabled: bool = True) -> None:
        device.touch()
        self.device = str(device)
        self.is_enabled = is_enabled
        """``resv_enable``."""

        self.is_reached = True
        """Whether a path leads there."""

        self.registrants: dict[uuid.UUID, int] = {}
        self.holder: uuid.UUID | None = None
        self.type = 0

    def may_write(self, host: uuid.UUID) -> bool:
        """Say whether a host's write would be taken."""
        if self.holder is None or self.holder == host:
            return True
        return self.type in (*_ALL_REGISTRANTS, *_REGISTRANTS_ONLY) and host in self.registrants

    def may_read(self, host: uuid.UUID) -> bool:
        """Say whether a host's read would be."""
        return self.type not in (2, 4, 6) or self.may_write(host)

    def lose_all(self) -> None:
        """Be taken back and offered again, as when the enclosure starts anew."""
        self.registrants, self.holder, self.type = {}, None, 0

    def command(self, host: uuid.UUID, opcode: int, words: tuple[int, ...], data: bytearray) -> int:
        """Take a command; return its status. A report is written into *data*."""
        if not self.is_enabled:
            return INVALID_OPCODE
        if opcode == 0x0E:
            return self._report(words, data)
        first, second = struct.unpack_from("<QQ", data)
        action, ignores_key, kind = words[0] & 7, words[0] >> 3 & 1, words[0] >> 8 & 0xFF
        assert not ignores_key, "every command here names its key"
        if (opcode, action) == (0x0D, 0):
            return 0 if self.registrants.setdefault(host, second) == second else CONFLICT
        if self.registrants.get(host) != first:
            return CONFLICT
        done = {
            (0x11, 0): lambda: self._acquire(host, kind),
            (0x11, 1): lambda: self._preempt(second),
            (0x15, 1): self._clear,
        }.get((opcode, action))
        return INVALID_OPCODE if done is None else done()

    def _acquire(self, host: uuid.UUID, kind: int) -> int:
        if self.holder is not None and (self.holder, self.type) != (host, kind):
            return CONFLICT
        self.holder, self.type = host, kind
        return 0

    def _clear(self) -> int:
        self.lose_all()
        return 0

    def _preempt(self, key: int) -> int:
        assert self.type in (0, *_ALL_REGISTRANTS), "no other type is preempted here"
        assert key, "key 0 would end every other registration"
        victims = [host for host, each in self.registrants.items() if each == key]
        for victim in victims:
            self._unregister(victim)
        return 0 if victims else CONFLICT

    def _unregister(self, host: uuid.UUID) -> None:
        self.registrants.pop(host, None)
        if self.holder == host:
            heir = next(iter(self.registrants), None) if self.type in _ALL_REGISTRANTS else None
            self.holder, self.type = heir, self.type if heir else 0

    def _report(self, words: tuple[int, ...], data: bytearray) -> int:
        if not words[1] & 1:
            return HOST_ID_INCONSISTENT
        if (words[0] + 1) * 4 != len(data):
            return INVALID_FIELD
        data[:] = bytes(len(data))
        struct.pack_into("<IBH", data, 0, 7, self.type, len(self.registrants))
        for number, (host, key) in enumerate(self.registrants.items()):
            at = 64 + 64 * number
            if at + 64 > len(data):
                break
            holds = self.type in _ALL_REGISTRANTS or host == self.holder
            struct.pack_into("<HB5xQ16s", data, at, 0xFFFF, holds, key, host.bytes)
        return 0


class SimulatedHost:
    """One host's kernel."""

    def __init__(self, *namespaces: SimulatedNamespace) -> None:
        self.id = uuid.uuid4()
        self.asked: list[str] = []
        """What was asked for."""

        self.reservations = NvmeReservations(ask=self._ask)
        self._namespaces = {each.device: each for each in namespaces}

    async def _ask(self, within_s: float, **request: str) -> dict[str, Any]:
        self.asked.append(request.get("act", request["do"]))
        with patch.object(fcntl, "ioctl", self._ioctl):
            answer = nvme_request.execute(request)
        if "errno" in answer:
            raise KernelError(int(str(answer["errno"])), str(answer["during"]))
        return answer

    def _ioctl(self, fd: int, code: int, argument: bytearray | None = None) -> int:
        namespace = self._namespaces.get(str(Path(f"/proc/self/fd/{fd}").readlink()))
        if namespace is None:
            raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))
        if not namespace.is_reached:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if code == 0x4E40:
            return 1
        assert code == 0xC0484E43
        assert argument is not None
        opcode, flags, _, nsid, _, _, _, address, _, length, *words, _, _ = struct.unpack(
            "<BBHIIIQQ10I", argument
        )
        assert (flags, nsid) == (0, 1)
        buffer = (ctypes.c_char * length).from_address(address)
        data = bytearray(buffer.raw)
        status = namespace.command(self.id, opcode, tuple(words), data)
        buffer.raw = bytes(data)
        return status
