"""Bytes of NVMe/TCP, as the specifications print them, and every refusal of a wrong header."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostraca_fabric.errors import ProtocolError
from ostraca_fabric.sockets.nvme_tcp.commands import (
    Connect,
    IoOpcode,
    NvmeCommand,
    NvmeCompletion,
    NvmeStatus,
    block_command,
)
from ostraca_fabric.sockets.nvme_tcp.identities import (
    ControllerIdentity,
    NamespaceIdentity,
    encode_descriptors,
    encode_namespaces,
    parse_identity,
    parse_namespaces,
)
from ostraca_fabric.sockets.nvme_tcp.pdus import (
    COMMON_BYTES,
    LAST,
    DataPart,
    FatalStatus,
    InitRequest,
    InitResponse,
    PduError,
    PduType,
    aligned_offset,
    command_pdu,
    data_header,
    parse_common,
    ready_pdu,
    response_pdu,
    termination_pdu,
)

NGUID = "00112233445566778899aabbccddeeff"


def test_handshake_is_as_the_transport_specification_prints_it() -> None:
    assert InitRequest().encode() == bytes.fromhex("0000800080000000") + bytes(120)
    assert InitRequest(alignment=3, ready_max=7).encode()[:16].hex() == "00008000800000000000030007000000"
    assert InitResponse(h2c_bytes_max=1 << 20).encode()[:16].hex() == "01008000800000000000000000001000"


def test_a_write_has_its_place_and_length_where_the_base_specification_says() -> None:
    entry = NvmeCommand(
        IoOpcode.WRITE, 0x1234, 7, 0x5A, 0, 8192, words=(0x11223344, 0x1, 1, 0, 0, 0)
    ).encode()
    assert entry.hex() == (
        "0140341207000000" + "00" * 16  # opcode, SGLs, identifier; namespace; reserved, metadata
        + "0000000000000000002000000000005a"  # SGL: address, length, type
        + "443322110100000001000000" + "00" * 12  # dwords 10 to 15: block, count less one
    )  # fmt: skip
    assert NvmeCommand.parse(entry).first_block == 0x1_11223344
    assert NvmeCommand.parse(entry).blocks == 2
    assert block_command(IoOpcode.WRITE, 7, 0x1_11223344, 2, 8192).encode()[4:] == entry[4:]


def test_a_capsule_says_where_its_data_begin() -> None:
    assert command_pdu(bytes(64))[:8].hex() == "0400480048000000"
    assert command_pdu(bytes(64), bytes(1024))[:8].hex() == "0400484848040000"
    assert response_pdu(NvmeCompletion(5, result=3, queue=1, head=2).encode()).hex() == (
        "050018001800000003000000000000000200010005000000"
    )  # fmt: skip
    assert NvmeCompletion(5, NvmeStatus.CONNECT_HOST).encode()[14:].hex() == "0883", "final: do not retry"


def test_data_and_questions_for_data_have_one_form() -> None:
    part = DataPart(0x0102, 0x0304, 4096, 8192)
    assert ready_pdu(part).hex() == "090018001800000002010403001000000020000000000000"
    header = data_header(PduType.HOST_DATA, part, flags=LAST)
    assert header.hex() == "060418181820000002010403001000000020000000000000"
    assert DataPart.parse(header[8:]) == part
    padded = data_header(PduType.TARGET_DATA, part, data_offset=aligned_offset(31))
    assert (aligned_offset(0), aligned_offset(31), len(padded), padded[3]) == (24, 128, 128, 128)
    assert parse_common(padded[:8], 8192).pad_bytes == 104


def test_a_connection_ends_with_a_reason() -> None:
    ended = termination_pdu(PduType.TARGET_TERMINATION, FatalStatus.DATA_RANGE, bytes(500))
    assert len(ended) == 152
    assert ended[:14].hex() == "0300180098000000040000000000"


def test_a_connect_survives_its_form() -> None:
    wanted = Connect("nqn.x:a", "nqn.x:b", bytes(range(16)), 2, 7, 32, 5000)
    entry = wanted.command(9).encode()
    assert entry[:8].hex() == "7f40090001000000"
    assert entry[40:52].hex() == "000002001f00000088130000"
    assert len(wanted.data()) == 1024
    assert Connect.parse(NvmeCommand.parse(entry), wanted.data()) == wanted


@pytest.mark.parametrize("lba_bytes", [256, 8192, 16384])
def test_blocks_that_pieces_of_4096_bytes_do_not_fill_are_refused(lba_bytes: int) -> None:
    with pytest.raises(ProtocolError, match="format it with 512 or 4096 bytes"):
        NamespaceIdentity.parse(NamespaceIdentity(NGUID, 1000, lba_bytes).encode())


def test_identities_survive_their_form() -> None:
    controller = ControllerIdentity("nqn.x:a", 3, "SN", "model", "1.0", 1 << 20, has_volatile_cache=True)
    data = controller.encode()
    assert ControllerIdentity.parse(data) == controller
    assert (data[77], data[512], data[513], data[525], data[1792]) == (8, 0x66, 0x44, 1, 4)
    namespace = NamespaceIdentity(NGUID, 1000, 4096)
    assert NamespaceIdentity.parse(namespace.encode()) == namespace
    assert namespace.encode()[104:120].hex() == NGUID
    assert parse_namespaces(encode_namespaces([1, 5])) == [1, 5]
    assert parse_identity(encode_descriptors(NGUID, NGUID[::-1])) == NGUID
    assert parse_identity(bytes(4096)) == ""


@pytest.mark.parametrize(
    ("common", "status"),
    [
        ("0a00180018000000", FatalStatus.HEADER_FIELD),  # an unknown type
        ("0500170018000000", FatalStatus.HEADER_FIELD),  # a header of another length
        ("0500180019000000", FatalStatus.HEADER_FIELD),  # data where there are none
        ("0501180018000000", FatalStatus.HEADER_FIELD),  # a digest
        ("0600181017000000", FatalStatus.HEADER_FIELD),  # shorter than its header
        ("0600182019000000", FatalStatus.HEADER_FIELD),  # data behind the end
        ("06001818ffffffff", FatalStatus.LIMIT),  # four gigabytes
        ("0300180099000000", FatalStatus.HEADER_FIELD),  # a long farewell
    ],
)
def test_a_wrong_header_is_refused_before_anything_is_read(common: str, status: FatalStatus) -> None:
    with pytest.raises(PduError) as caught:
        parse_common(bytes.fromhex(common), 1 << 20)
    assert caught.value.status is status


@given(st.binary(min_size=COMMON_BYTES, max_size=COMMON_BYTES), st.integers(0, 1 << 20))
def test_no_header_promises_more_than_is_allowed(common: bytes, most: int) -> None:
    try:
        header = parse_common(common, most)
    except PduError:
        return
    total = struct.unpack_from("<I", common, 4)[0]
    assert header.header_bytes + header.pad_bytes + header.data_bytes == total
    assert header.data_bytes <= max(most, 128)
    assert header.pad_bytes <= 255


@given(st.binary(min_size=4096, max_size=4096))
def test_no_identify_data_crash_the_reader(data: bytes) -> None:
    ControllerIdentity.parse(data)
    parse_namespaces(data)
    parse_identity(data)
