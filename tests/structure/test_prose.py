"""Counts of prose."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from scripts.structure.prose import Count, count, samples, sentences
from scripts.structure.prose_rows import docs_rows, prose_rows
from scripts.structure.table import Verdict
from tests.structure.written import written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Start the agent. Then wait: it answers",
            [["start", "the", "agent"], ["then", "wait"], ["it", "answers"]],
        ),
        ("a list\n- first item\n- second item", [["a", "list"], ["first", "item"], ["second", "item"]]),
        ("| name | use |\n|---|---|\n| a | b |", [["name"], ["use"], ["a"], ["b"]]),
        ("Run `which one` now, or ``it``.", [["run", "x", "now", "or", "x"]]),
        ("See [the page](what/it.md).", [["see", "the", "page"]]),
        ("Before\n```\nit that which\n```\nafter", [["before"], ["after"]]),
        ("Run:\n\n    it that which\n\nDone", [["run"], ["done"]]),
    ],
)
def test_sentences_are_split_and_code_is_left_out(text: str, expected: list[list[str]]) -> None:
    assert sentences(text) == expected


def test_pronouns_openers_and_long_sentences_are_counted() -> None:
    long = " ".join(["word"] * 25)
    text = f"What is gone is not told. The agent keeps it. {long}. And {long}."
    assert count(text) == Count(words=61, pronouns=2, sentences=4, long_sentences=1, openers=1)


def test_density_is_pronouns_per_hundred_words() -> None:
    assert count("It works and nobody knows").density == 40.0
    assert count("").density == 0.0


def _words(number: int) -> Count:
    return Count(words=number)


def test_small_files_are_summed_per_folder_and_small_sums_join_the_folder_above() -> None:
    counts = {
        PurePosixPath("sdk/large.py"): _words(120),
        PurePosixPath("sdk/small.py"): _words(100),
        PurePosixPath("sdk/core/a.py"): _words(60),
        PurePosixPath("sdk/core/b.py"): _words(59),
        PurePosixPath("sdk/full/a.py"): _words(119),
        PurePosixPath("sdk/full/b.py"): _words(1),
        PurePosixPath("alone/a.py"): _words(119),
    }
    assert samples(counts) == {
        "sdk/large.py": _words(120),
        "sdk/full/ (small files)": _words(120),
        "sdk/ (small files)": _words(219),
    }


def test_a_dense_file_is_over_though_the_average_is_not() -> None:
    counts = {
        PurePosixPath("docs/dense.md"): Count(words=200, pronouns=13, sentences=20),
        PurePosixPath("docs/plain.md"): Count(words=800, pronouns=0, sentences=80, openers=1),
    }
    rows = {row.measure: row for row in prose_rows("docs", counts)}
    assert rows["docs: pronouns per 100 words"].value == "1.30 (in 1,000 words)"
    assert [row.verdict for row in rows.values()] == [Verdict.OK, Verdict.OVER, Verdict.OK, Verdict.OVER]
    assert rows["docs: highest density of a file"].offenders == ("  6.5 docs/dense.md",)
    assert rows["docs: sentences with a banned opener"].offenders == ("    1 docs/plain.md",)


def test_words_of_the_docs_folder_are_counted_without_the_readme() -> None:
    rows = {
        row.measure: row
        for row in docs_rows(
            [
                written(
                    "docs/a.md",
                    "four words are here\n<!-- From here on made by `a command`. -->\nnot counted",
                ),
                written("docs/b/c.md", "three more words"),
                written("README.md", "word " * 901),
            ]
        )
    }
    assert (
        rows["words in docs/, written by hand"].value,
        rows["words in docs/, written by hand"].verdict,
    ) == ("7", Verdict.OK)
    assert (rows["words in README.md"].value, rows["words in README.md"].verdict) == ("901", Verdict.OVER)
