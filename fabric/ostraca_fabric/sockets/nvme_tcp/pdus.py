"""PDUs of NVMe/TCP, encoded and parsed. Pure.

NVMe TCP transport specification, "Transport Specific Content". Every field of a received header is checked
before use, so a wrong length can neither allocate memory nor end a loop late. Digests are not supported: the
target answers a request for digests without them, and a PDU with a digest is an error.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from ostraca_fabric.errors import ProtocolError

COMMON_BYTES = 8
"""Common part at the begin of every PDU."""

INIT_BYTES = 128
COMMAND_BYTES = 64
COMPLETION_BYTES = 16
CONTROL_BYTES_MAX = 8192
"""Most data inside of the capsule of an admin or fabrics command."""

H2C_BYTES_LEAST = 4096
"""Least MAXH2CDATA that a target may announce."""

TERMINATION_BYTES_MAX = 152
ALIGNMENT_MAX = 31

DIGEST_FLAGS = 0x03
LAST = 0x04
SUCCESS = 0x08

_COMMON = struct.Struct("<BBBBI")
_INIT_REQUEST = struct.Struct("<HBBI")
_INIT_RESPONSE = struct.Struct("<HBBI")
_DATA = struct.Struct("<HHII4x")
_TERMINATION = struct.Struct("<HI10x")


class PduType(IntEnum):
    """Type of a PDU."""

    INIT_REQUEST = 0x00
    INIT_RESPONSE = 0x01
    HOST_TERMINATION = 0x02
    TARGET_TERMINATION = 0x03
    COMMAND = 0x04
    RESPONSE = 0x05
    HOST_DATA = 0x06
    TARGET_DATA = 0x07
    READY = 0x09
    """R2T: the target is ready for a part of a write's data."""


class FatalStatus(IntEnum):
    """Reason for the end of a connection, as in a termination PDU."""

    HEADER_FIELD = 0x01
    SEQUENCE = 0x02
    HEADER_DIGEST = 0x03
    DATA_RANGE = 0x04
    LIMIT = 0x05
    PARAMETER = 0x06


_HEADER_BYTES = {
    PduType.INIT_REQUEST: INIT_BYTES,
    PduType.INIT_RESPONSE: INIT_BYTES,
    PduType.HOST_TERMINATION: 24,
    PduType.TARGET_TERMINATION: 24,
    PduType.COMMAND: COMMON_BYTES + COMMAND_BYTES,
    PduType.RESPONSE: COMMON_BYTES + COMPLETION_BYTES,
    PduType.HOST_DATA: COMMON_BYTES + _DATA.size,
    PduType.TARGET_DATA: COMMON_BYTES + _DATA.size,
    PduType.READY: COMMON_BYTES + _DATA.size,
}
_WITH_DATA = {PduType.COMMAND, PduType.HOST_DATA, PduType.TARGET_DATA}
_TERMINATIONS = {PduType.HOST_TERMINATION, PduType.TARGET_TERMINATION}
DATA_HEADER_BYTES = _HEADER_BYTES[PduType.TARGET_DATA]
_RESERVED_INIT = bytes(INIT_BYTES - COMMON_BYTES - _INIT_REQUEST.size)


class PduError(ProtocolError):
    """PDU that breaks the specification; the connection ends."""

    def __init__(self, status: FatalStatus, message: str) -> None:
        super().__init__(message)
        self.status = status
        """Reason for the termination PDU."""


@dataclass(frozen=True, slots=True)
class PduHeader:
    """Common part of a PDU, checked."""

    type: PduType
    flags: int
    header_bytes: int
    pad_bytes: int
    """Bytes between header and data."""

    data_bytes: int

    @property
    def is_last(self) -> bool:
        """Whether a data PDU is the last of its transfer."""
        return bool(self.flags & LAST)


def parse_common(common: bytes | bytearray, data_bytes_max: int) -> PduHeader:
    """Parse the common part of a PDU, with up to *data_bytes_max* of data. Raises PduError."""
    number, flags, header_bytes, data_offset, total_bytes = _COMMON.unpack(common)
    try:
        kind = PduType(number)
    except ValueError:
        raise PduError(FatalStatus.HEADER_FIELD, f"PDU type {number:#x} is unknown") from None
    if header_bytes != _HEADER_BYTES[kind]:
        raise PduError(FatalStatus.HEADER_FIELD, f"{kind.name} has a header of {header_bytes} bytes")
    if kind in _TERMINATIONS:
        if not header_bytes <= total_bytes <= TERMINATION_BYTES_MAX:
            raise PduError(FatalStatus.HEADER_FIELD, f"{kind.name} has {total_bytes} bytes")
        return PduHeader(kind, flags, header_bytes, 0, total_bytes - header_bytes)
    if flags & DIGEST_FLAGS:
        raise PduError(FatalStatus.HEADER_FIELD, f"{kind.name} has a digest, and none was agreed on")
    if kind not in _WITH_DATA or total_bytes == header_bytes:
        if total_bytes != header_bytes:
            raise PduError(FatalStatus.HEADER_FIELD, f"{kind.name} has {total_bytes} bytes")
        return PduHeader(kind, flags, header_bytes, 0, 0)
    if not header_bytes <= data_offset <= total_bytes:
        raise PduError(FatalStatus.HEADER_FIELD, f"{kind.name} has its data at {data_offset}")
    if total_bytes - data_offset > data_bytes_max:
        raise PduError(FatalStatus.LIMIT, f"{kind.name} has {total_bytes - data_offset} bytes of data")
    return PduHeader(kind, flags, header_bytes, data_offset - header_bytes, total_bytes - data_offset)


@dataclass(frozen=True, slots=True)
class InitRequest:
    """ICReq: begin of a connection, from the host."""

    alignment: int = 0
    """HPDA: alignment of data for the host, in units of four bytes, less one."""

    digests: int = 0
    ready_max: int = 0
    """MAXR2T: concurrent R2T of a command, less one."""

    def encode(self) -> bytes:
        """Return the whole PDU."""
        body = _INIT_REQUEST.pack(0, self.alignment, self.digests, self.ready_max)
        return _COMMON.pack(PduType.INIT_REQUEST, 0, INIT_BYTES, 0, INIT_BYTES) + body + _RESERVED_INIT

    @classmethod
    def parse(cls, rest: bytes | bytearray) -> InitRequest:
        """Parse the part behind the common part. Raises PduError."""
        version, alignment, digests, ready_max = _INIT_REQUEST.unpack_from(rest)
        if version:
            raise PduError(FatalStatus.PARAMETER, f"PDU format version {version} is unknown")
        if alignment > ALIGNMENT_MAX:
            raise PduError(FatalStatus.HEADER_FIELD, f"alignment {alignment} is above {ALIGNMENT_MAX}")
        return cls(alignment, digests, ready_max)


@dataclass(frozen=True, slots=True)
class InitResponse:
    """ICResp: answer of the target."""

    alignment: int = 0
    digests: int = 0
    h2c_bytes_max: int = 1 << 20
    """MAXH2CDATA: most data of one H2CData PDU."""

    def encode(self) -> bytes:
        """Return the whole PDU."""
        body = _INIT_RESPONSE.pack(0, self.alignment, self.digests, self.h2c_bytes_max)
        return _COMMON.pack(PduType.INIT_RESPONSE, 0, INIT_BYTES, 0, INIT_BYTES) + body + _RESERVED_INIT

    @classmethod
    def parse(cls, rest: bytes | bytearray) -> InitResponse:
        """Parse the part behind the common part. Raises PduError."""
        version, alignment, digests, h2c_bytes_max = _INIT_RESPONSE.unpack_from(rest)
        if version:
            raise PduError(FatalStatus.PARAMETER, f"PDU format version {version} is unknown")
        if alignment > ALIGNMENT_MAX or digests:
            raise PduError(FatalStatus.PARAMETER, "the target wants digests or a wrong alignment")
        if h2c_bytes_max < H2C_BYTES_LEAST:
            raise PduError(FatalStatus.PARAMETER, f"the target takes {h2c_bytes_max} bytes per PDU")
        return cls(alignment, digests, h2c_bytes_max)


@dataclass(frozen=True, slots=True)
class DataPart:
    """Part of a command's data: fields of H2CData, C2HData and R2T."""

    command: int
    """CCCID: identifier of the command."""

    tag: int
    """TTAG: the target's tag of the transfer; 0 in C2HData."""

    offset: int
    length: int

    @classmethod
    def parse(cls, rest: bytes | bytearray) -> DataPart:
        """Parse the part behind the common part."""
        return cls(*_DATA.unpack(rest))


def data_header(
    kind: PduType, part: DataPart, *, flags: int = 0, data_offset: int = DATA_HEADER_BYTES
) -> bytes:
    """Return the header of H2CData or C2HData, padded to *data_offset*."""
    header = _COMMON.pack(kind, flags, DATA_HEADER_BYTES, data_offset, data_offset + part.length)
    body = _DATA.pack(part.command, part.tag, part.offset, part.length)
    return (header + body).ljust(data_offset, b"\0")


def ready_pdu(part: DataPart) -> bytes:
    """Return an R2T for *part* of a write."""
    header = _COMMON.pack(PduType.READY, 0, DATA_HEADER_BYTES, 0, DATA_HEADER_BYTES)
    return header + _DATA.pack(part.command, part.tag, part.offset, part.length)


def aligned_offset(alignment: int) -> int:
    """Return the offset of data in C2HData for the host's *alignment*."""
    unit = (alignment + 1) * 4
    return -(-DATA_HEADER_BYTES // unit) * unit


def command_pdu(command: bytes | bytearray, data: bytes | bytearray = b"") -> bytes:
    """Return a command capsule, with *data* inside."""
    header_bytes = _HEADER_BYTES[PduType.COMMAND]
    header = _COMMON.pack(
        PduType.COMMAND, 0, header_bytes, header_bytes if data else 0, header_bytes + len(data)
    )
    return header + command + data


def response_pdu(completion: bytes | bytearray) -> bytes:
    """Return a response capsule."""
    size = _HEADER_BYTES[PduType.RESPONSE]
    return _COMMON.pack(PduType.RESPONSE, 0, size, 0, size) + completion


def termination_pdu(kind: PduType, status: FatalStatus, offending: bytes | bytearray) -> bytes:
    """Return the last PDU of a connection, with the begin of the *offending* PDU."""
    header_bytes = _HEADER_BYTES[kind]
    shown = bytes(offending[: TERMINATION_BYTES_MAX - header_bytes])
    header = _COMMON.pack(kind, 0, header_bytes, 0, header_bytes + len(shown))
    return header + _TERMINATION.pack(status, 0) + shown


def parse_termination(rest: bytes | bytearray) -> int:
    """Return the status of a termination PDU, as the other end sent it."""
    status, _ = _TERMINATION.unpack_from(rest)
    return int(status)
