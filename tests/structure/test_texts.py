"""Prose taken out of Python sources."""

from __future__ import annotations

import pytest
from scripts.structure.prose_rows import code_prose_rows
from scripts.structure.texts import docstrings, messages, other_texts
from tests.structure.written import written


def test_docstrings_are_those_of_modules_classes_functions_and_fields() -> None:
    source = written(
        "sdk/ostraca/a.py",
        '''
        """Module."""

        LIMIT = 3
        """Field."""

        class A:
            """Class."""

            size: int = 1
            """Attribute."""

            def b(self):
                """Function."""
                c = 1
                """No docstring."""
        ''',
    )
    assert sorted(docstrings(source).split("\n\n")) == [
        "Attribute.",
        "Class.",
        "Field.",
        "Function.",
        "Module.",
    ]


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ('raise UsageError("drive is full")', "drive is full"),
        ('raise UsageError(f"drive {name} is full: {more!r}")', "drive X is full: X"),
        ('raise UsageError("%s of %d is full, %.1f s late" % x)', "X of X is full, X s late"),
        ('log.warning("drive %s left", drive)', "drive X left"),
        ('self._log.info("drive left")', "drive left"),
        ('super().__init__("lease lost")', "lease lost"),
        ('print("ready", flush=True)', "ready"),
        ('parser.add_argument("--set", help="set a value")', "set a value"),
        ('raise UsageError("first") from Other("second")', "first"),
        ('raise Outer(print("both kinds"))', "both kinds"),
        ('table.info("no log")', ""),
        ('name = "no message"', ""),
        ("raise", ""),
    ],
)
def test_messages_are_strings_that_are_raised_logged_printed_or_shown_as_help(
    statement: str, expected: str
) -> None:
    assert messages(written("sdk/ostraca/a.py", statement)) == expected


def test_other_texts_are_string_literals_of_several_words_except_docstrings() -> None:
    source = written(
        "sdk/ostraca/a.py",
        '''
        """A docstring of more than five words."""

        SHORT = "only four words here"
        LONG = "a text of five words"
        print(f"drive {name} is full now")
        ''',
    )
    assert other_texts(source) == "a text of five words\n\ndrive X is full now"


def test_code_that_is_not_shipped_is_not_judged() -> None:
    dense = '"""It is that which nobody told."""'
    rows = {
        row.measure: row.value
        for row in code_prose_rows(
            [
                written("tests/test_a.py", dense),
                written("sdk/ostraca/client.py", '"""Connect to an agent."""'),
            ]
        )
    }
    assert rows["docstrings: pronouns per 100 words"] == "0.00 (in 4 words)"
    assert rows["docstrings of tests etc.: pronouns per 100 words"] == "66.67"
