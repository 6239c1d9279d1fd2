"""docs/reference/formats/wire.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ostraca_fabric.model.chain import Span
from ostraca_fabric.wire import messages
from ostraca_fabric.wire.codec import MESSAGE_TYPES
from ostraca_fabric.wire.frames import BULK, BULK_BLOCKS_MAX, BULK_BYTES_MAX, MESSAGE, SCRATCH_BYTES
from ostraca_fabric.wire.handshake import DEFAULT_LIMITS

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "formats" / "wire.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ")
]


def fields(struct: type[msgspec.Struct]) -> str:
    return " ".join(f"`{name}`" for name in struct.__struct_fields__)


def test_every_message_is_listed_with_its_tag_and_fields_and_no_other() -> None:
    listed = [row[:3] for row in ROWS if len(row) == 5 and row[0].isdigit()]
    assert listed == [
        [str(tag), f"`{each.__name__}`", fields(each)] for tag, each in sorted(MESSAGE_TYPES.items())
    ]


def test_every_part_of_a_message_is_listed_with_its_fields() -> None:
    parts = [
        each
        for each in vars(messages).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and not issubclass(each, messages.Message)
    ]
    assert Span in parts
    for part in parts:
        assert [f"`{part.__name__}`", fields(part)] in ROWS


def test_the_versions_are_those_of_the_code() -> None:
    assert ["spoken by this release", str(messages.WIRE_VERSION)] in ROWS
    assert ["oldest it still speaks", str(messages.WIRE_VERSION_OLDEST)] in ROWS


def test_the_kinds_of_frames_are_those_of_the_code() -> None:
    assert [row[0] for row in ROWS if len(row) == 2 and row[0].isdigit()][-2:] == [str(MESSAGE), str(BULK)]


def test_every_agreed_limit_is_listed_with_its_default() -> None:
    """Each end's own limits are in the settings pages, which are made from the code."""
    listed = {row[0]: row[1] for row in ROWS if len(row) == 3}
    for name, default in msgspec.structs.asdict(DEFAULT_LIMITS).items():
        assert listed[f"`{name}`"] == str(default)


def test_the_fixed_sizes_are_those_of_the_code() -> None:
    assert f"at most {BULK_BYTES_MAX} bytes" in PAGE
    assert f"carry 1 to {BULK_BLOCKS_MAX} blocks" in PAGE
    assert f"holds {SCRATCH_BYTES} bytes" in PAGE


def test_every_code_that_the_wire_itself_gives_is_listed() -> None:
    source = Path(messages.__file__).parents[1]
    given = set()
    for path in [*source.glob("connection/*.py"), *source.glob("wire/*.py"), source / "errors.py"]:
        text = path.read_text()
        given.update(re.findall(r'(?:refuse\(|_RefusalError\(|code = )\s*"([a-z_]+)"', text))
        given.update(re.findall(r'Failure\(\s*request\.request,\s*"([a-z_]+)"', text))
    assert {"limit", "protocol", "malformed", "overloaded", "internal"} <= given
    assert given <= {row[0].strip("`") for row in ROWS}
