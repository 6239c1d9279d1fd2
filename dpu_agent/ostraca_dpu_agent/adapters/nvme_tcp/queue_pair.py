"""Queue pair: a connection to a controller, for a single thread at a time.

Several commands are under way at once. Each is answered within ``io_timeout_s``, or the connection ends with
all of its commands. Nothing is sent again: a failed write may have reached the drive, or reaches it until the
target's own time limit for data.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.target import Controller
from ostraca_fabric.sockets.nvme_tcp.commands import (
    ADMIN_QUEUE,
    Connect,
    IoOpcode,
    NvmeCommand,
    NvmeCompletion,
    NvmeStatus,
)
from ostraca_fabric.sockets.nvme_tcp.pdus import (
    COMMON_BYTES,
    LAST,
    SUCCESS,
    DataPart,
    FatalStatus,
    InitRequest,
    InitResponse,
    PduError,
    PduHeader,
    PduType,
    command_pdu,
    data_header,
    parse_termination,
)
from ostraca_fabric.sockets.nvme_tcp.stream import PduStream

TRANSFER_BYTES_MAX = 1 << 20
"""Most data of a command."""

_WINDOW = 16
"""Commands under way on one connection."""

_IDS = 1 << 15
_AUTHENTICATION = 0b11 << 16


class ConnectRefusedError(OstracaError):
    """Connect command refused by the controller."""

    def __init__(self, status: int, result: int) -> None:
        super().__init__(f"status {status:#x}, result {result:#x}")
        self.status, self.result = status, result

    @property
    def needs_secret(self) -> bool:
        """Whether the controller wants to authenticate the host."""
        return self.status == NvmeStatus.SUCCESS


@dataclass(slots=True, eq=False)
class Transfer:
    """Command with its data, and how far both are."""

    command: NvmeCommand
    buffers: Sequence[memoryview] = ()
    size: int = 0
    moved: int = 0
    status: int | None = None
    """Status of the completion; None until then."""

    result: int = 0
    until_s: float = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the command was completed without an error."""
        return self.status == NvmeStatus.SUCCESS

    @property
    def sends_data(self) -> bool:
        """Whether data go to the controller."""
        return self.command.opcode == IoOpcode.WRITE


class QueuePair:
    """Connection to a controller, connected at construction."""

    def __init__(self, controller: Controller, connect: Connect, *, connect_s: float) -> None:
        """Connect within *connect_s*. Raises OSError, EOFError, PduError and ConnectRefusedError."""
        until_s = time.monotonic() + connect_s
        sock = socket.create_connection((controller.address, controller.service), timeout=connect_s)
        try:
            self.stream = PduStream(sock)
        except BaseException:
            sock.close()
            raise
        self.number = connect.queue
        self._id = 0
        self._h2c_bytes_max = TRANSFER_BYTES_MAX
        try:
            self._greet(until_s)
            self.controller_id = self._connect(connect, until_s)
        except BaseException:
            self.stream.close()
            raise

    def run(self, transfers: Sequence[Transfer], timeout_s: float) -> None:
        """Run commands until all have ended, each within *timeout_s* of its begin.

        The status of each command is in its transfer. Raises OSError, EOFError and PduError; then the
        connection is unusable, and commands without a status failed.
        """
        under_way: dict[int, Transfer] = {}
        begun = 0
        while begun < len(transfers) or under_way:
            while begun < len(transfers) and len(under_way) < _WINDOW:
                self._begin(transfers[begun], under_way, timeout_s)
                begun += 1
            # The oldest command has the earliest deadline.
            self._receive(under_way, next(iter(under_way.values())).until_s)

    def ask(self, command: NvmeCommand, timeout_s: float, size: int = 0) -> tuple[Transfer, bytearray]:
        """Run a command of the admin queue; return the transfer with *size* bytes of data."""
        data = bytearray(size)
        if size:
            command = replace(command, sgl_bytes=size)
        transfer = Transfer(command, [memoryview(data)] if size else (), size)
        self.run([transfer], timeout_s)
        return transfer, data

    def close(self) -> None:
        """Close the connection at once."""
        self.stream.close()

    def _greet(self, until_s: float) -> None:
        self.stream.send(InitRequest().encode(), until_s)
        header = self.stream.receive_common(0, until_s)
        if header.type is not PduType.INIT_RESPONSE:
            raise PduError(FatalStatus.SEQUENCE, f"{header.type.name} answers the handshake")
        answer = InitResponse.parse(self.stream.receive(header.header_bytes - COMMON_BYTES, until_s))
        if answer.alignment:
            raise PduError(FatalStatus.PARAMETER, "the target wants aligned data, which is not supported")
        self._h2c_bytes_max = min(answer.h2c_bytes_max, TRANSFER_BYTES_MAX)

    def _connect(self, connect: Connect, until_s: float) -> int:
        command = connect.command(0)
        self.stream.send(command_pdu(command.encode(), connect.data()), until_s)
        transfer = Transfer(command)
        self._receive({0: transfer}, until_s)
        assert transfer.status is not None
        if not transfer.is_good or (connect.queue == ADMIN_QUEUE and transfer.result & _AUTHENTICATION):
            raise ConnectRefusedError(transfer.status, transfer.result)
        return transfer.result & 0xFFFF

    def _begin(self, transfer: Transfer, under_way: dict[int, Transfer], timeout_s: float) -> None:
        self._id = (self._id + 1) % _IDS
        transfer.until_s = time.monotonic() + timeout_s
        under_way[self._id] = transfer
        self.stream.send(command_pdu(replace(transfer.command, id=self._id).encode()), transfer.until_s)

    def _receive(self, under_way: dict[int, Transfer], until_s: float) -> None:
        """Receive a PDU, and do what it asks for."""
        header = self.stream.receive_common(TRANSFER_BYTES_MAX, until_s)
        rest = self.stream.receive(header.header_bytes - COMMON_BYTES, until_s)
        match header.type:
            case PduType.RESPONSE:
                done = NvmeCompletion.parse(rest)
                _end(under_way, done.command, done.status, done.result)
            case PduType.TARGET_DATA:
                self._take(under_way, header, DataPart.parse(rest), until_s)
            case PduType.READY:
                self._give(under_way, DataPart.parse(rest), until_s)
            case PduType.TARGET_TERMINATION:
                raise EOFError(f"the target ended the connection: error {parse_termination(rest)}")
            case _:
                raise PduError(FatalStatus.SEQUENCE, f"the target sent {header.type.name}")

    def _take(
        self, under_way: dict[int, Transfer], header: PduHeader, part: DataPart, until_s: float
    ) -> None:
        transfer = under_way.get(part.command)
        if (
            transfer is None
            or transfer.sends_data
            or part.offset != transfer.moved
            or part.length != header.data_bytes
            or not 0 < part.length <= transfer.size - transfer.moved
        ):
            raise PduError(FatalStatus.DATA_RANGE, "the target sent data that no command asked for")
        self.stream.receive(header.pad_bytes, until_s)
        self.stream.receive_into(cut(transfer.buffers, part.offset, part.length), until_s)
        transfer.moved += part.length
        if header.flags & SUCCESS:
            _end(under_way, part.command, NvmeStatus.SUCCESS, 0)

    def _give(self, under_way: dict[int, Transfer], part: DataPart, until_s: float) -> None:
        transfer = under_way.get(part.command)
        if (
            transfer is None
            or not transfer.sends_data
            or part.offset != transfer.moved
            or not 0 < part.length <= transfer.size - transfer.moved
        ):
            raise PduError(FatalStatus.DATA_RANGE, "the target asked for data that no command has")
        end = part.offset + part.length
        while transfer.moved < end:
            length = min(self._h2c_bytes_max, end - transfer.moved)
            flags = LAST if transfer.moved + length == end else 0
            sent = DataPart(part.command, part.tag, transfer.moved, length)
            header = memoryview(data_header(PduType.HOST_DATA, sent, flags=flags))
            self.stream.send([header, *cut(transfer.buffers, transfer.moved, length)], until_s)
            transfer.moved += length


def cut(buffers: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """Return *length* bytes of *buffers*, from *offset* on."""
    parts = []
    for each in buffers:
        if offset < len(each) and length:
            part = each[offset : offset + length]
            parts.append(part)
            length -= len(part)
        offset = max(0, offset - len(each))
    return parts


def _end(under_way: dict[int, Transfer], number: int, status: int, result: int) -> None:
    transfer = under_way.pop(number, None)
    if transfer is None:
        raise PduError(FatalStatus.SEQUENCE, "the target completed a command that is not under way")
    if status == NvmeStatus.SUCCESS and transfer.moved != transfer.size:
        raise PduError(FatalStatus.SEQUENCE, f"the target moved {transfer.moved} of {transfer.size} bytes")
    transfer.status, transfer.result = status, result
