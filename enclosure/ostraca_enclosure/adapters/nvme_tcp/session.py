"""Connection of a host to the target: handshake, then commands in sequence.

Data of a write arrive only after a request of the target (R2T), never inside a command. Data later than
``silence_max_s`` after the request are dropped with the connection. So no write lands later after its host
gave up, despite partitions, full sockets, and stops of this process.

Memory is bounded: a buffer for a command's data, and commands in a queue of agreed length.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections import deque
from contextlib import suppress

from ostraca_enclosure.adapters.nvme_tcp.controller_commands import answer_admin, answer_property
from ostraca_enclosure.adapters.nvme_tcp.served_file import ServedFile
from ostraca_enclosure.adapters.nvme_tcp.subsystem import TRANSFER_BYTES_MAX, ServedController, Subsystem
from ostraca_fabric.errors import shown
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.sockets.nvme_tcp.commands import (
    CONNECT_BYTES,
    DATA_INVALID,
    FABRICS,
    HOST_NQN_AT,
    SUBSYSTEM_NQN_AT,
    AdminOpcode,
    Connect,
    FabricsType,
    IoOpcode,
    NvmeCommand,
    NvmeCompletion,
    NvmeStatus,
    SglType,
)
from ostraca_fabric.sockets.nvme_tcp.pdus import (
    COMMON_BYTES,
    CONTROL_BYTES_MAX,
    LAST,
    DataPart,
    FatalStatus,
    InitRequest,
    InitResponse,
    PduError,
    PduHeader,
    PduType,
    aligned_offset,
    data_header,
    ready_pdu,
    response_pdu,
    termination_pdu,
)
from ostraca_fabric.sockets.nvme_tcp.stream import PduStream

log = logging.getLogger(__name__)

HANDSHAKE_S = 5.0
"""Time from the connection to an accepted Connect command."""

_NO_DATA = memoryview(b"")
_FAREWELL_S = 1.0
_ENTRIES_MAX = 128
_ASYNC_EVENTS_MAX = 4
_CONTROLLER_AT, _ENTRIES_AT = 16, 44
_HANDSHAKE_BYTES_MAX = CONTROL_BYTES_MAX


class LateDataError(OSError):
    """Data of a write too late for writing."""


class TargetSession:
    """Connection of a host, served by the calling thread."""

    def __init__(self, subsystem: Subsystem, stream: PduStream, peer: str) -> None:
        """Serve *subsystem* on *stream*; *peer* is the host's address, for the log."""
        self._subsystem = subsystem
        self._stream = stream
        self._peer = peer
        self._controller: ServedController | None = None
        self._queue = 0
        self._entries = _ENTRIES_MAX
        self._head = 0
        self._tag = 0
        self._async_events = 0
        self._data_offset = 0
        self._waiting: deque[NvmeCommand] = deque()
        self._buffer = memoryview(b"")

    def run(self) -> None:
        """Serve until the connection ends; never raises for faults of the host."""
        try:
            self._handshake()
            while True:
                self._serve(self._next_command())
        except PduError as error:
            log.warning("%s broke NVMe/TCP, connection closed: %s", self._peer, error)
            self._say_farewell(error.status)
        except LateDataError as error:
            log.warning("%s: %s", self._peer, error)
        except (OSError, EOFError) as error:
            log.info("%s: connection ended: %s", self._peer, error)
        finally:
            if self._controller is not None:
                self._subsystem.end(self._controller, self._queue)
            self._stream.close()

    def _handshake(self) -> None:
        until_s = time.monotonic() + HANDSHAKE_S
        header = self._stream.receive_common(0, until_s)
        if header.type is not PduType.INIT_REQUEST:
            raise PduError(FatalStatus.SEQUENCE, f"{header.type.name} came before the handshake")
        wanted = InitRequest.parse(self._stream.receive(header.header_bytes - COMMON_BYTES, until_s))
        self._data_offset = aligned_offset(wanted.alignment)
        self._stream.send(InitResponse(h2c_bytes_max=TRANSFER_BYTES_MAX).encode(), until_s)
        while self._controller is None:
            header = self._stream.receive_common(_HANDSHAKE_BYTES_MAX, until_s)
            command, data = self._command(header, until_s)
            self._answer(command, *self._connect(command, data))
        if self._queue:
            self._buffer = memoryview(mmap.mmap(-1, TRANSFER_BYTES_MAX))

    def _connect(self, command: NvmeCommand, data: bytes) -> tuple[int, int]:
        """Return status and result of the first command."""
        if (command.opcode, command.fabrics_type) != (FABRICS, FabricsType.CONNECT):
            return NvmeStatus.SEQUENCE_ERROR, 0
        if len(data) != CONNECT_BYTES:
            return NvmeStatus.SGL_LENGTH, 0
        connect = Connect.parse(command, data)
        if (refusal := self._connect_refusal(connect)) is not None:
            return refusal
        enter = self._subsystem.join if connect.queue else self._subsystem.begin
        controller = enter(connect, self._stream)
        if controller is None:
            is_busy = not connect.queue
            place = 0 if is_busy else DATA_INVALID | _CONTROLLER_AT
            return NvmeStatus.CONTROLLER_BUSY if is_busy else NvmeStatus.CONNECT_PARAMETERS, place
        self._controller, self._queue, self._entries = controller, connect.queue, connect.queue_entries
        return NvmeStatus.SUCCESS, controller.id

    def _connect_refusal(self, connect: Connect) -> tuple[int, int] | None:
        """Return status and result of a refused Connect; None to accept."""
        if not connect.is_known_format:
            return NvmeStatus.CONNECT_FORMAT, 0
        if connect.subsystem != self._subsystem.nqn or not self._subsystem.exists:
            return NvmeStatus.CONNECT_PARAMETERS, DATA_INVALID | SUBSYSTEM_NQN_AT
        if not connect.queue and not self._subsystem.admits(connect.host):
            log.warning("%s is not admitted: %s", self._peer, shown(connect.host))
            return NvmeStatus.CONNECT_HOST, DATA_INVALID | HOST_NQN_AT
        if not 1 < connect.queue_entries <= _ENTRIES_MAX:
            return NvmeStatus.CONNECT_PARAMETERS, _ENTRIES_AT
        return None

    def _next_command(self) -> NvmeCommand:
        if self._waiting:
            return self._waiting.popleft()
        header = self._receive_header(None)
        if header.type is not PduType.COMMAND:
            raise PduError(FatalStatus.SEQUENCE, f"{header.type.name} came without a question")
        return self._command(header, self._until_s())[0]

    def _receive_header(self, until_s: float | None) -> PduHeader:
        assert self._controller is not None
        limit = CONTROL_BYTES_MAX if not self._queue else TRANSFER_BYTES_MAX
        header = self._stream.receive_common(limit, until_s)
        self._controller.heard_s = self._subsystem.clock()
        if header.type is PduType.HOST_TERMINATION:
            raise EOFError("the host ended the connection with an error")
        return header

    def _command(self, header: PduHeader, until_s: float) -> tuple[NvmeCommand, bytes]:
        """Return the command of *header*, with the data inside of its capsule."""
        if header.type is not PduType.COMMAND:
            raise PduError(FatalStatus.SEQUENCE, f"{header.type.name} is no command")
        if header.data_bytes > CONTROL_BYTES_MAX or (self._queue and header.data_bytes):
            raise PduError(FatalStatus.LIMIT, "a command has data inside, above the announced limit")
        entry = self._stream.receive(header.header_bytes - COMMON_BYTES, until_s)
        inside = self._stream.receive(header.pad_bytes + header.data_bytes, until_s)
        return NvmeCommand.parse(entry), bytes(inside[header.pad_bytes :])

    def _serve(self, command: NvmeCommand) -> None:
        assert self._controller is not None
        if self._queue:
            self._serve_io(command)
        elif command.opcode == FABRICS:
            self._answer(command, *answer_property(self._controller, command))
        elif command.opcode == AdminOpcode.ASYNC_EVENT and self._async_events < _ASYNC_EVENTS_MAX:
            self._async_events += 1  # never answered: hosts list drives again by themselves
        else:
            status, result, page = answer_admin(self._subsystem, self._controller, command)
            self._answer(command, status, result, memoryview(page))

    def _serve_io(self, command: NvmeCommand) -> None:
        file = self._subsystem.files.get(command.namespace)
        if command.opcode not in tuple(IoOpcode):
            self._answer(command, NvmeStatus.INVALID_OPCODE)
        elif file is None:
            self._answer(command, NvmeStatus.INVALID_NAMESPACE)
        elif command.opcode == IoOpcode.FLUSH:
            self._answer(command, self._flush(file))
        elif (status := _refusal(command, file)) != NvmeStatus.SUCCESS:
            self._answer(command, status)
        elif command.opcode == IoOpcode.READ:
            self._read(command, file)
        else:
            self._write(command, file)

    def _flush(self, file: ServedFile) -> NvmeStatus:
        try:
            with file.used() as descriptor:
                os.fdatasync(descriptor)
        except OSError as error:
            return self._failure("flush", file, error, NvmeStatus.WRITE_FAULT)
        return NvmeStatus.SUCCESS

    def _read(self, command: NvmeCommand, file: ServedFile) -> None:
        part = self._buffer[: command.sgl_bytes]
        try:
            with file.used() as descriptor:
                count = os.preadv(descriptor, [part], command.first_block * PAGE_BYTES)
        except OSError as error:
            self._answer(command, self._failure("read", file, error, NvmeStatus.READ_ERROR))
            return
        # A file cut short ends early.
        self._answer(command, NvmeStatus.SUCCESS if count == len(part) else NvmeStatus.READ_ERROR, 0, part)

    def _write(self, command: NvmeCommand, file: ServedFile) -> None:
        part = self._buffer[: command.sgl_bytes]
        self._tag = self._tag % 0xFFFF + 1
        asked_s, until_s = self._subsystem.clock(), self._until_s()
        self._stream.send(ready_pdu(DataPart(command.id, self._tag, 0, len(part))), until_s)
        self._receive_data(command, part, until_s)
        try:
            with file.used() as descriptor:
                self._check_age(asked_s)
                count = os.pwritev(descriptor, [part], command.first_block * PAGE_BYTES)
        except LateDataError:
            raise
        except OSError as error:
            self._answer(command, self._failure("write", file, error, NvmeStatus.WRITE_FAULT))
            return
        self._answer(command, NvmeStatus.SUCCESS if count == len(part) else NvmeStatus.WRITE_FAULT)

    def _check_age(self, asked_s: float) -> None:
        """Check the age of data, as the last step before a write. Raises LateDataError.

        A stop of this process may have lasted minutes.
        """
        assert self._controller is not None
        age_s = self._subsystem.clock() - asked_s
        if age_s > self._controller.silence_max_s:
            raise LateDataError(f"data of a write came {age_s:.1f} s after the question, and were dropped")

    def _receive_data(self, command: NvmeCommand, part: memoryview, until_s: float) -> None:
        """Receive the data of a write; queue commands that come meanwhile."""
        received = 0
        while received < len(part):
            header = self._receive_header(until_s)
            if header.type is PduType.COMMAND:
                if len(self._waiting) >= self._entries:
                    raise PduError(FatalStatus.LIMIT, f"more than {self._entries} commands are waiting")
                self._waiting.append(self._command(header, until_s)[0])
                continue
            if header.type is not PduType.HOST_DATA:
                raise PduError(FatalStatus.SEQUENCE, f"{header.type.name} came in place of data")
            sent = DataPart.parse(self._stream.receive(header.header_bytes - COMMON_BYTES, until_s))
            self._stream.receive(header.pad_bytes, until_s)
            end = received + sent.length
            if (
                (sent.command, sent.tag, sent.offset) != (command.id, self._tag, received)
                or sent.length != header.data_bytes
                or not received < end <= len(part)
                or header.is_last != (end == len(part))
            ):
                raise PduError(FatalStatus.DATA_RANGE, "data of a write are not as asked for")
            self._stream.receive_into([part[received:end]], until_s)
            received = end

    def _answer(
        self, command: NvmeCommand, status: int, result: int = 0, data: memoryview = _NO_DATA
    ) -> None:
        self._head = (self._head + 1) % self._entries
        done = NvmeCompletion(command.id, status, result, self._queue, self._head)
        response = memoryview(response_pdu(done.encode()))
        if not len(data) or status != NvmeStatus.SUCCESS:
            self._stream.send([response], self._until_s())
            return
        sent = DataPart(command.id, 0, 0, len(data))
        header = data_header(PduType.TARGET_DATA, sent, flags=LAST, data_offset=self._data_offset)
        self._stream.send([memoryview(header), data, response], self._until_s())

    def _until_s(self) -> float:
        """Return the deadline of a transfer in progress."""
        limit_s = HANDSHAKE_S if self._controller is None else self._controller.silence_max_s
        return time.monotonic() + limit_s

    def _failure(self, act: str, file: ServedFile, error: OSError, status: NvmeStatus) -> NvmeStatus:
        log.error("%s of %s failed: %s", act, file.export.device, error.strerror or error)
        return status

    def _say_farewell(self, status: FatalStatus) -> None:
        with suppress(OSError, EOFError):
            until_s = time.monotonic() + _FAREWELL_S
            self._stream.send(termination_pdu(PduType.TARGET_TERMINATION, status, b""), until_s)
            self._stream.finish(until_s)


def _refusal(command: NvmeCommand, file: ServedFile) -> NvmeStatus:
    """Return the reason against a read or write; SUCCESS without any."""
    if command.sgl_type != SglType.TRANSPORT:
        return NvmeStatus.SGL_TYPE
    size = command.blocks * PAGE_BYTES
    if size > TRANSFER_BYTES_MAX:
        return NvmeStatus.INVALID_FIELD
    if command.sgl_bytes != size:
        return NvmeStatus.SGL_LENGTH
    if command.first_block + command.blocks > file.identity.blocks:
        return NvmeStatus.LBA_RANGE
    return NvmeStatus.SUCCESS
