"""Answers to admin commands and properties of a controller."""

from __future__ import annotations

from ostraca_enclosure.adapters.nvme_tcp.subsystem import (
    QUEUES_MAX,
    TRANSFER_BYTES_MAX,
    ServedController,
    Subsystem,
)
from ostraca_fabric.sockets.nvme_tcp.commands import (
    AdminOpcode,
    FabricsType,
    Feature,
    NvmeCommand,
    NvmeStatus,
    Property,
    SglType,
)
from ostraca_fabric.sockets.nvme_tcp.identities import (
    CAPABILITIES,
    IDENTIFY_BYTES,
    LISTED_MAX,
    VERSION,
    IdentifyKind,
    encode_namespaces,
)

Answer = tuple[int, int, bytes]
"""Status, result and data."""

_NO_DATA = b""
_ENABLE, _SHUTDOWN = 1, 0b11 << 14
_READY, _SHUTDOWN_DONE = 1, 0b10 << 2
_PAGES = {1: 64, 2: 512, 3: 512}
"""Log pages by number: errors, health and firmware, with nothing to tell."""

_LONG = 1


def answer_property(controller: ServedController, command: NvmeCommand) -> tuple[int, int]:
    """Return status and result of a fabrics command behind the handshake."""
    size, offset, value = command.words[0] & 0b111, command.words[1], command.words[2]
    if command.fabrics_type == FabricsType.PROPERTY_SET:
        if offset != Property.CONFIGURATION or size == _LONG:
            return NvmeStatus.INVALID_FIELD, 0
        controller.configuration = value
        return NvmeStatus.SUCCESS, 0
    if command.fabrics_type != FabricsType.PROPERTY_GET:
        return NvmeStatus.INVALID_OPCODE, 0
    configuration = controller.configuration
    values: dict[int, int] = {
        Property.CAPABILITIES: CAPABILITIES,
        Property.VERSION: VERSION,
        Property.CONFIGURATION: configuration,
        Property.STATUS: (_READY if configuration & _ENABLE else 0)
        | (_SHUTDOWN_DONE if configuration & _SHUTDOWN else 0),
    }
    if offset not in values or (size == _LONG) != (offset == Property.CAPABILITIES):
        return NvmeStatus.INVALID_FIELD, 0
    return NvmeStatus.SUCCESS, values[offset]


def answer_admin(subsystem: Subsystem, controller: ServedController, command: NvmeCommand) -> Answer:
    """Return the answer to an admin command."""
    match command.opcode:
        case AdminOpcode.IDENTIFY:
            answer = _identify(subsystem, controller, command)
        case AdminOpcode.SET_FEATURES | AdminOpcode.GET_FEATURES:
            answer = _feature(controller, command)
        case AdminOpcode.GET_LOG_PAGE:
            answer = _log_page(command)
        case AdminOpcode.KEEP_ALIVE:
            answer = NvmeStatus.SUCCESS, 0, _NO_DATA
        case AdminOpcode.ASYNC_EVENT:
            answer = NvmeStatus.ASYNC_LIMIT, 0, _NO_DATA
        case _:
            answer = NvmeStatus.INVALID_OPCODE, 0, _NO_DATA
    if answer[2] and (command.sgl_type, command.sgl_bytes) != (SglType.TRANSPORT, len(answer[2])):
        return NvmeStatus.SGL_LENGTH, 0, _NO_DATA
    return answer


def _identify(subsystem: Subsystem, controller: ServedController, command: NvmeCommand) -> Answer:
    files, number = subsystem.files, command.namespace
    kind = command.words[0] & 0xFF
    if kind == IdentifyKind.CONTROLLER:
        return NvmeStatus.SUCCESS, 0, subsystem.identity(controller).encode()
    if kind == IdentifyKind.ACTIVE_NAMESPACES:
        listed = [each for each in sorted(files) if each > number][:LISTED_MAX]
        return NvmeStatus.SUCCESS, 0, encode_namespaces(listed)
    if kind not in (IdentifyKind.NAMESPACE, IdentifyKind.DESCRIPTORS):
        return NvmeStatus.INVALID_FIELD, 0, _NO_DATA
    if number in files:
        file = files[number]
        page = file.identity.encode() if kind == IdentifyKind.NAMESPACE else file.descriptors
        return NvmeStatus.SUCCESS, 0, page
    if kind == IdentifyKind.NAMESPACE and 1 <= number <= subsystem.identity(controller).namespaces_max:
        return NvmeStatus.SUCCESS, 0, bytes(IDENTIFY_BYTES)  # zeroes: an inactive namespace
    return NvmeStatus.INVALID_NAMESPACE, 0, _NO_DATA


def _feature(controller: ServedController, command: NvmeCommand) -> Answer:
    is_set, value = command.opcode == AdminOpcode.SET_FEATURES, command.words[1]
    match command.words[0] & 0xFF:
        case Feature.QUEUES:
            most = QUEUES_MAX - 1
            pair = (value & 0xFFFF, value >> 16) if is_set else (most, most)
            result = min(pair[0], most) | min(pair[1], most) << 16
        case Feature.KEEP_ALIVE if not is_set:
            result = int(controller.silence_max_s * 500) if controller.is_watched else 0
        case Feature.ASYNC_EVENTS:
            result = 0
        case _:
            return NvmeStatus.INVALID_FIELD, 0, _NO_DATA
    return NvmeStatus.SUCCESS, result, _NO_DATA


def _log_page(command: NvmeCommand) -> Answer:
    size = ((command.words[0] >> 16 | (command.words[1] & 0xFFFF) << 16) + 1) * 4
    if command.words[0] & 0xFF not in _PAGES:
        return NvmeStatus.INVALID_LOG_PAGE, 0, _NO_DATA
    if size > TRANSFER_BYTES_MAX:
        return NvmeStatus.INVALID_FIELD, 0, _NO_DATA
    return NvmeStatus.SUCCESS, 0, bytes(size)
