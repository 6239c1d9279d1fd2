"""Comments, long modules and copies of backoff."""

from __future__ import annotations

from scripts.structure.lines import backoff_copies, commented_lines, line_rows
from tests.structure.written import written


def test_a_line_with_a_comment_counts_once_and_a_string_with_a_hash_does_not() -> None:
    assert commented_lines(written("sdk/a.py", 'a = 1  # one # two\nb = "# no"\n# whole line\n')) == 2


def test_delays_that_double_up_to_a_limit_are_copies_of_backoff() -> None:
    source = written(
        "sdk/a.py",
        """
        delay_s = min(delay_s * 2, most_s)
        self.pause_s = min(2 * self.pause_s, most_s)
        pause_s = first_s * 2.0 ** min(failures, 32)
        size = min(2 * other, most)
        power = 2 ** bits
        """,
    )
    assert list(backoff_copies([source])) == ["sdk/a.py:2", "sdk/a.py:3", "sdk/a.py:4"]


def test_long_modules_are_listed() -> None:
    comments, long, _ = line_rows(
        [
            written("sdk/long.py", "# why\n" + "a = 1\n" * 400),
            written("sdk/fits.py", "a = 1\n" * 400),
        ]
    )
    assert (long.value, long.offenders) == ("1", ("  401 sdk/long.py",))
    assert comments.value == "0.1 %"
