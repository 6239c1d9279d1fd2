"""Identify data of controllers and namespaces, encoded and parsed. Pure.

NVMe base specification 1.4, "Identify command".
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from ostraca_fabric.errors import ProtocolError

IDENTIFY_BYTES = 4096
VERSION = 0x10400
"""NVMe 1.4."""

LBA_SHIFT_LEAST, LBA_SHIFT_MOST = 9, 12
"""Pieces of drives begin and end at 4096 bytes, so larger blocks are of no use."""

LISTED_MAX = 1024
"""Most namespaces in one list of active namespaces."""

_NGUID_BYTES = 16
_NGUID_KIND, _UUID_KIND = 2, 3
_NGUID_AT, _FORMATS_AT, _FORMAT_AT = 104, 128, 26
_NQN_AT, _NQN_BYTES = 768, 256
_ENTRIES_MAX = 128
_ENTRY_SIZES = 0x66, 0x44
_KEEP_ALIVE_UNIT_MS = 100
_CAPABILITIES = (_ENTRIES_MAX - 1) | 1 << 16 | 20 << 24 | 1 << 37


class IdentifyKind(IntEnum):
    """CNS of an Identify command."""

    NAMESPACE = 0x00
    CONTROLLER = 0x01
    ACTIVE_NAMESPACES = 0x02
    DESCRIPTORS = 0x03


CAPABILITIES = _CAPABILITIES
"""CAP of the target: 128 entries, contiguous queues, ready within ten seconds, NVM command set."""


@dataclass(frozen=True, slots=True)
class ControllerIdentity:
    """Identity of a controller."""

    subsystem: str
    controller: int
    serial: str
    model: str
    firmware: str
    transfer_bytes_max: int
    """Most data of a command, as MDTS; 0 for no limit."""

    has_volatile_cache: bool
    capsule_bytes: int = 64
    """IOCCSZ: size of a command capsule on I/O queues, data inside included."""

    namespaces_max: int = LISTED_MAX

    def encode(self) -> bytes:
        """Return the 4096 bytes of the Identify data."""
        data = bytearray(IDENTIFY_BYTES)
        data[4:24] = _text(self.serial, 20)
        data[24:64] = _text(self.model, 40)
        data[64:72] = _text(self.firmware, 8)
        data[76] = 0b11  # CMIC: several ports, several controllers
        data[77] = (self.transfer_bytes_max // IDENTIFY_BYTES).bit_length() - 1
        struct.pack_into("<HI", data, 78, self.controller, VERSION)
        data[96] = 1  # CTRATT: host identifiers of 128 bits
        data[111] = 1  # CNTRLTYPE: I/O controller
        data[258] = data[259] = 3  # ACL, AERL
        struct.pack_into("<H", data, 320, 1000 // _KEEP_ALIVE_UNIT_MS)
        data[512], data[513] = _ENTRY_SIZES
        struct.pack_into("<HI", data, 514, _ENTRIES_MAX, self.namespaces_max)
        data[525] = int(self.has_volatile_cache)
        struct.pack_into("<I", data, 536, 1 | 1 << 20)  # SGLS: supported, data in capsules
        data[_NQN_AT : _NQN_AT + len(self.subsystem)] = self.subsystem.encode()
        struct.pack_into("<IIHBB", data, 1792, self.capsule_bytes // 16, 1, 0, 0, 1)
        return bytes(data)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> ControllerIdentity:
        """Parse 4096 bytes."""
        shift = data[77]
        return cls(
            subsystem=_shown(bytes(data[_NQN_AT : _NQN_AT + _NQN_BYTES]).partition(b"\0")[0]),
            controller=struct.unpack_from("<H", data, 78)[0],
            serial=_shown(data[4:24]),
            model=_shown(data[24:64]),
            firmware=_shown(data[64:72]),
            transfer_bytes_max=IDENTIFY_BYTES << min(shift, 20) if shift else 0,
            has_volatile_cache=bool(data[525] & 1),
            capsule_bytes=struct.unpack_from("<I", data, 1792)[0] * 16,
            namespaces_max=struct.unpack_from("<I", data, 516)[0],
        )


@dataclass(frozen=True, slots=True)
class NamespaceIdentity:
    """Identity and size of a namespace."""

    nguid: str
    """32 hexadecimal digits; empty without an NGUID."""

    blocks: int
    lba_bytes: int

    def encode(self) -> bytes:
        """Return the 4096 bytes of the Identify data."""
        data = bytearray(IDENTIFY_BYTES)
        struct.pack_into("<QQQ", data, 0, self.blocks, self.blocks, self.blocks)
        data[30] = 1  # NMIC: shared by several controllers
        data[_NGUID_AT : _NGUID_AT + _NGUID_BYTES] = bytes.fromhex(self.nguid)
        data[_FORMATS_AT + 2] = self.lba_bytes.bit_length() - 1
        return bytes(data)

    @classmethod
    def parse(cls, data: bytes | bytearray) -> NamespaceIdentity:
        """Parse 4096 bytes, zeroes for an inactive namespace. Raises ProtocolError for unusable blocks."""
        blocks = struct.unpack_from("<Q", data, 0)[0]
        chosen = _FORMATS_AT + 4 * (data[_FORMAT_AT] & 0x0F)
        metadata_bytes, shift = struct.unpack_from("<HB", data, chosen)
        if blocks and (metadata_bytes or not LBA_SHIFT_LEAST <= shift <= LBA_SHIFT_MOST):
            raise ProtocolError(
                f"the namespace has blocks of 2^{shift} bytes with {metadata_bytes} bytes of metadata: "
                "format it with 512 or 4096 bytes, without metadata"
            )
        nguid = bytes(data[_NGUID_AT : _NGUID_AT + _NGUID_BYTES])
        return cls(nguid.hex() if any(nguid) else "", blocks, 1 << shift)


def encode_namespaces(numbers: Sequence[int]) -> bytes:
    """Return the list of active namespaces, in ascending order."""
    return struct.pack(f"<{len(numbers)}I", *numbers).ljust(IDENTIFY_BYTES, b"\0")


def parse_namespaces(data: bytes | bytearray) -> list[int]:
    """Parse the list of active namespaces, up to its first zero."""
    numbers: list[int] = []
    for (number,) in struct.iter_unpack("<I", data):
        if not number:
            break
        numbers.append(number)
    return numbers


def encode_descriptors(nguid: str, uuid: str) -> bytes:
    """Return the identification descriptors of a namespace: NGUID and UUID."""
    data = b""
    for kind, value in ((_NGUID_KIND, nguid), (_UUID_KIND, uuid.replace("-", ""))):
        data += bytes((kind, _NGUID_BYTES, 0, 0)) + bytes.fromhex(value)
    return data.ljust(IDENTIFY_BYTES, b"\0")


def parse_identity(data: bytes | bytearray) -> str:
    """Return the NGUID among identification descriptors, or else the UUID; empty without both."""
    found: dict[int, str] = {}
    at = 0
    while at + 4 <= len(data) and data[at]:
        kind, size = data[at], data[at + 1]
        value = bytes(data[at + 4 : at + 4 + size])
        if size == _NGUID_BYTES == len(value) and any(value):
            found.setdefault(kind, value.hex())
        at += 4 + size
    return found.get(_NGUID_KIND) or found.get(_UUID_KIND, "")


def _text(value: str, size: int) -> bytes:
    return value.encode("ascii", errors="replace")[:size].ljust(size)


def _shown(field: bytes | bytearray) -> str:
    text = bytes(field).decode("ascii", errors="replace").strip(" \0")
    return "".join(each if each.isprintable() else "?" for each in text)
