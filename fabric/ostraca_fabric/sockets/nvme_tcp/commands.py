"""Commands and completions of NVMe over fabrics, encoded and parsed. Pure."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from ostraca_fabric.sockets.nvme_tcp.pdus import COMMAND_BYTES

FABRICS = 0x7F
ADMIN_QUEUE = 0
DYNAMIC_CONTROLLER = 0xFFFF
CONNECT_BYTES = 1024
HOST_NQN_AT = 512
"""Place of the host's NQN in the data of a Connect command."""

SUBSYSTEM_NQN_AT = 256
DATA_INVALID = 1 << 16
"""Result of a refused Connect: the wrong place lies in the data, not in the command."""

_HEAD = struct.Struct("<BBHI")
_SGL = struct.Struct("<QI3xB")
_WORDS = struct.Struct("<6I")
_SGL_AT, _WORDS_AT = 24, 40
_CONNECT_WORDS = struct.Struct("<HHHBxI")
_CONNECT_DATA = struct.Struct("<16sH")
_COMPLETION = struct.Struct("<QHHHH")
_SGL_FLAG = 0x40
_NQN_FIELD_BYTES = 256
_STATUS_MASK = 0x7FF
_DO_NOT_RETRY = 1 << 14


class AdminOpcode(IntEnum):
    """Opcode on the admin queue."""

    GET_LOG_PAGE = 0x02
    IDENTIFY = 0x06
    SET_FEATURES = 0x09
    GET_FEATURES = 0x0A
    ASYNC_EVENT = 0x0C
    KEEP_ALIVE = 0x18


class IoOpcode(IntEnum):
    """Opcode on an I/O queue."""

    FLUSH = 0x00
    WRITE = 0x01
    READ = 0x02


class FabricsType(IntEnum):
    """Type of a fabrics command."""

    PROPERTY_SET = 0x00
    CONNECT = 0x01
    PROPERTY_GET = 0x04


class Property(IntEnum):
    """Offset of a controller's property."""

    CAPABILITIES = 0x00
    VERSION = 0x08
    CONFIGURATION = 0x14
    STATUS = 0x1C


class Feature(IntEnum):
    """Identifier of a feature."""

    QUEUES = 0x07
    ASYNC_EVENTS = 0x0B
    KEEP_ALIVE = 0x0F


class SglType(IntEnum):
    """Type of a command's SGL descriptor: place of the data."""

    IN_CAPSULE = 0x01
    TRANSPORT = 0x5A
    """Data follow in PDUs of their own."""


class NvmeStatus(IntEnum):
    """Status of a completion: type in bits 8 to 10, code in bits 0 to 7."""

    SUCCESS = 0x000
    INVALID_OPCODE = 0x001
    INVALID_FIELD = 0x002
    INTERNAL_ERROR = 0x006
    INVALID_NAMESPACE = 0x00B
    SEQUENCE_ERROR = 0x00C
    SGL_LENGTH = 0x00F
    SGL_TYPE = 0x011
    LBA_RANGE = 0x080
    ASYNC_LIMIT = 0x105
    INVALID_LOG_PAGE = 0x109
    CONNECT_FORMAT = 0x180
    CONTROLLER_BUSY = 0x181
    CONNECT_PARAMETERS = 0x182
    CONNECT_HOST = 0x184
    WRITE_FAULT = 0x280
    READ_ERROR = 0x281


_RETRIABLE = {NvmeStatus.SUCCESS, NvmeStatus.INTERNAL_ERROR, NvmeStatus.CONTROLLER_BUSY}


@dataclass(frozen=True, slots=True)
class NvmeCommand:
    """Submission queue entry."""

    opcode: int
    id: int = 0
    namespace: int = 0
    """Namespace; for a fabrics command, its type in the lowest byte."""

    sgl_type: int = SglType.TRANSPORT
    sgl_offset: int = 0
    sgl_bytes: int = 0
    words: tuple[int, int, int, int, int, int] = (0, 0, 0, 0, 0, 0)
    """Command dwords 10 to 15."""

    @property
    def fabrics_type(self) -> int:
        """Return the type of a fabrics command."""
        return self.namespace & 0xFF

    @property
    def first_block(self) -> int:
        """Return the first logical block of a read or write."""
        return self.words[0] | self.words[1] << 32

    @property
    def blocks(self) -> int:
        """Return the number of logical blocks of a read or write."""
        return (self.words[2] & 0xFFFF) + 1

    def encode(self) -> bytes:
        """Return the 64 bytes of the entry."""
        entry = bytearray(COMMAND_BYTES)
        _HEAD.pack_into(entry, 0, self.opcode, _SGL_FLAG, self.id, self.namespace)
        _SGL.pack_into(entry, _SGL_AT, self.sgl_offset, self.sgl_bytes, self.sgl_type)
        _WORDS.pack_into(entry, _WORDS_AT, *self.words)
        return bytes(entry)

    @classmethod
    def parse(cls, entry: bytes | bytearray) -> NvmeCommand:
        """Parse 64 bytes; every content is a command, possibly one to refuse."""
        opcode, _, number, namespace = _HEAD.unpack_from(entry)
        offset, length, kind = _SGL.unpack_from(entry, _SGL_AT)
        return cls(opcode, number, namespace, kind, offset, length, _WORDS.unpack_from(entry, _WORDS_AT))


@dataclass(frozen=True, slots=True)
class NvmeCompletion:
    """Completion queue entry."""

    command: int
    status: int = NvmeStatus.SUCCESS
    result: int = 0
    queue: int = 0
    head: int = 0

    def encode(self) -> bytes:
        """Return the 16 bytes of the entry."""
        status = int(self.status) | (0 if self.status in _RETRIABLE else _DO_NOT_RETRY)
        return _COMPLETION.pack(self.result, self.head, self.queue, self.command, status << 1)

    @classmethod
    def parse(cls, entry: bytes | bytearray) -> NvmeCompletion:
        """Parse 16 bytes."""
        result, head, queue, command, status = _COMPLETION.unpack(entry)
        return cls(command, status >> 1 & _STATUS_MASK, result, queue, head)


@dataclass(frozen=True, slots=True)
class Connect:
    """Connect command, with its data."""

    subsystem: str
    host: str
    host_id: bytes
    queue: int = ADMIN_QUEUE
    controller: int = DYNAMIC_CONTROLLER
    queue_entries: int = 128
    keep_alive_ms: int = 0
    is_known_format: bool = True

    def command(self, number: int) -> NvmeCommand:
        """Return the command with identifier *number*."""
        packed = _CONNECT_WORDS.pack(0, self.queue, self.queue_entries - 1, 0, self.keep_alive_ms)
        words = _WORDS.unpack(packed.ljust(_WORDS.size, b"\0"))
        return NvmeCommand(FABRICS, number, FabricsType.CONNECT, SglType.IN_CAPSULE, 0, CONNECT_BYTES, words)

    def data(self) -> bytes:
        """Return the data of the command."""
        data = bytearray(CONNECT_BYTES)
        _CONNECT_DATA.pack_into(data, 0, self.host_id, self.controller)
        for at, name in ((SUBSYSTEM_NQN_AT, self.subsystem), (HOST_NQN_AT, self.host)):
            data[at : at + len(name)] = name.encode()
        return bytes(data)

    @classmethod
    def parse(cls, command: NvmeCommand, data: bytes | bytearray) -> Connect:
        """Parse a command with CONNECT_BYTES of data; unprintable names become unknown names."""
        packed = _WORDS.pack(*command.words)
        version, queue, entries, _, keep_alive_ms = _CONNECT_WORDS.unpack_from(packed)
        host_id, controller = _CONNECT_DATA.unpack_from(data)
        return cls(
            _name_at(data, SUBSYSTEM_NQN_AT),
            _name_at(data, HOST_NQN_AT),
            host_id,
            queue,
            controller,
            entries + 1,
            keep_alive_ms,
            version == 0,
        )


def property_set(kind: Property, value: int) -> NvmeCommand:
    """Return a command that sets a property of four bytes."""
    return NvmeCommand(FABRICS, 0, FabricsType.PROPERTY_SET, words=(0, kind, value, 0, 0, 0))


def property_get(kind: Property) -> NvmeCommand:
    """Return a command that gets a property."""
    is_long = int(kind is Property.CAPABILITIES)
    return NvmeCommand(FABRICS, 0, FabricsType.PROPERTY_GET, words=(is_long, kind, 0, 0, 0, 0))


def block_command(opcode: IoOpcode, namespace: int, first_block: int, blocks: int, size: int) -> NvmeCommand:
    """Return a read or write of *blocks* logical blocks with *size* bytes."""
    words = (first_block & 0xFFFFFFFF, first_block >> 32, blocks - 1, 0, 0, 0)
    return NvmeCommand(opcode, 0, namespace, SglType.TRANSPORT, 0, size, words)


def _name_at(data: bytes | bytearray, at: int) -> str:
    return bytes(data[at : at + _NQN_FIELD_BYTES]).partition(b"\0")[0].decode("ascii", errors="replace")
