"""Rows for prose: docs, docstrings, messages and the README."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePosixPath

from scripts.structure.config import (
    CODE,
    DENSITY_MAX,
    DOCS_WORDS_MAX,
    FILE_DENSITY_MAX,
    GENERATED_MARK,
    LONG_SENTENCES_MAX,
    OPENERS_MAX,
    README_WORDS_MAX,
    SENTENCE_WORDS_MAX,
)
from scripts.structure.prose import Count, count, samples, total
from scripts.structure.sources import Source
from scripts.structure.table import Row, informative, limited, number_text
from scripts.structure.texts import docstrings, messages, other_texts


def docs_rows(documents: Sequence[Source]) -> list[Row]:
    """Measure all tracked Markdown files, and the words of ``docs/`` and the README.

    Tables that a command writes to the end of a page do not count: they repeat texts of the code.
    """
    lengths = {document.path: len(document.text.split(GENERATED_MARK)[0].split()) for document in documents}
    docs = {path: words for path, words in lengths.items() if path.parts[0] == "docs"}
    longest = sorted(docs.items(), key=lambda item: -item[1])
    return [
        *prose_rows("docs", counts_of(documents, lambda document: document.text)),
        limited(
            "words in docs/, written by hand",
            sum(docs.values()),
            DOCS_WORDS_MAX,
            [f"{words:6} {path}" for path, words in longest],
        ),
        limited("words in README.md", lengths.get(PurePosixPath("README.md"), 0), README_WORDS_MAX),
    ]


def code_prose_rows(sources: Iterable[Source]) -> list[Row]:
    """Measure docstrings and messages: shipped packages against the goals, other code for information."""
    judged = list(sources)
    shipped = [source for source in judged if source.path.parts[0] in CODE]
    support = total(counts_of([each for each in judged if each not in shipped], docstrings).values())
    texts = total(counts_of(shipped, other_texts).values())
    return [
        *prose_rows("docstrings", counts_of(shipped, docstrings)),
        informative("docstrings of tests etc.: pronouns per 100 words", number_text(support.density)),
        *prose_rows("messages", counts_of(shipped, messages)),
        informative("all string literals: pronouns per 100 words", number_text(texts.density)),
    ]


def counts_of(sources: Iterable[Source], extract: Callable[[Source], str]) -> dict[PurePosixPath, Count]:
    """Measure a kind of text in each file."""
    return {source.path: count(extract(source)) for source in sources}


def prose_rows(kind: str, counts: Mapping[PurePosixPath, Count]) -> list[Row]:
    """Judge a kind of text: density, density per file, long sentences and openers."""
    every = total(counts.values())
    by_density = sorted(samples(counts).items(), key=lambda item: -item[1].density)
    dense = [f"{each.density:5.1f} {name}" for name, each in by_density if each.density > FILE_DENSITY_MAX]
    highest = by_density[0][1].density if by_density else 0.0
    return [
        limited(
            f"{kind}: pronouns per 100 words", every.density, DENSITY_MAX, note=f" (in {every.words:,} words)"
        ),
        limited(
            f"{kind}: highest density of a file",
            highest,
            FILE_DENSITY_MAX,
            dense,
            note=f" ({len(dense)} files over)",
        ),
        limited(
            f"{kind}: sentences of more than {SENTENCE_WORDS_MAX} words",
            every.long_sentences,
            LONG_SENTENCES_MAX,
            _most(counts, lambda each: each.long_sentences),
            note=f" (of {every.sentences:,})",
        ),
        limited(
            f"{kind}: sentences with a banned opener",
            every.openers,
            OPENERS_MAX,
            _most(counts, lambda each: each.openers),
        ),
    ]


def _most(counts: Mapping[PurePosixPath, Count], key: Callable[[Count], int]) -> list[str]:
    """List files by their share of a count, the largest first."""
    ordered = sorted(counts.items(), key=lambda item: -key(item[1]))
    return [f"{key(each):5} {path}" for path, each in ordered if key(each)]
