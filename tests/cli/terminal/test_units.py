import pytest

from ostraca_cli.terminal.units import parse_size, size_text
from ostraca_fabric.errors import UsageError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("17 B", 17),
        ("512MiB", 512 << 20),
        ("512M", 512 << 20),
        ("4gib", 4 << 30),
        ("1.5 GiB", 3 << 29),
        ("2TB", 2 * 10**12),
        ("0.1kB", 100),
    ],
)
def test_sizes_are_read_as_people_write_them(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "4 GiBs", "four", "-1", "1e9", "4GiB 2", "\u0664GiB", "1,5GiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UsageError, match="as in 512MiB or 4GiB"):
        parse_size(text)


def test_part_of_a_byte_is_refused() -> None:
    with pytest.raises(UsageError, match="no whole number of bytes"):
        parse_size("0.3KiB")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (4 << 30, "4.0 GiB"), (3 << 39, "1.5 TiB")],
)
def test_sizes_are_written_in_the_largest_unit_that_fits(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text
