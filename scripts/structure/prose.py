"""Difficulty of English prose: pronouns per 100 words, long sentences, and openers without a subject.

The text is Markdown or reStructuredText. Code blocks, inline code, targets of links and rules of tables are
no prose.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath

from scripts.structure.config import SAMPLE_WORDS_MIN, SENTENCE_WORDS_MAX

_PERSONS = {
    "who",
    "whom",
    "whose",
    "whoever",
    "nobody",
    "somebody",
    "anybody",
    "everybody",
    "he",
    "him",
    "his",
}
_THINGS = {"what", "whatever", "it", "its", "itself", "nothing", "something", "anything"}
_EITHER = {"that", "which", "whichever", "one", "ones", "those", "these", "they", "them", "their"}
PRONOUNS = frozenset(_PERSONS | _THINGS | _EITHER)
OPENERS = frozenset({"what", "who", "whoever", "whatever", "that", "one", "nobody", "of"})

_WORD = re.compile(r"[A-Za-z][A-Za-z'’-]*")
_FENCED = re.compile(r"```.*?```", re.DOTALL)
_INDENTED = re.compile(r"^ {4,}.*$", re.MULTILINE)
_INLINE_CODE = re.compile(r"``[^`]*``|`[^`]*`")
_LINK_TARGET = re.compile(r"\]\([^)]*\)")
_TABLE_RULE = re.compile(r"^[|:\s-]+$", re.MULTILINE)
_PARAGRAPH_END = re.compile(r"\n\s*\n|\n(?=[-*#|])")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\|")


@dataclass(frozen=True, slots=True)
class Count:
    """Counts of one or several texts. Counts add up."""

    words: int = 0
    pronouns: int = 0
    sentences: int = 0
    long_sentences: int = 0
    openers: int = 0

    def __add__(self, other: Count) -> Count:
        return Count(
            self.words + other.words,
            self.pronouns + other.pronouns,
            self.sentences + other.sentences,
            self.long_sentences + other.long_sentences,
            self.openers + other.openers,
        )

    @property
    def density(self) -> float:
        """Pronouns per 100 words."""
        return 100 * self.pronouns / self.words if self.words else 0.0


def sentences(text: str) -> list[list[str]]:
    """Split *text* into sentences of lower-case words. Colons, semicolons and table cells end a sentence."""
    text = _FENCED.sub(" ", text)
    text = _INDENTED.sub(" ", text)
    text = _INLINE_CODE.sub("X", text)
    text = _LINK_TARGET.sub("]", text)
    text = _TABLE_RULE.sub(" ", text)
    parts = (part for paragraph in _PARAGRAPH_END.split(text) for part in _SENTENCE_END.split(paragraph))
    split = ([word.lower() for word in _WORD.findall(part)] for part in parts)
    return [words for words in split if words]


def count(text: str) -> Count:
    """Measure one text."""
    found = sentences(text)
    return Count(
        words=sum(map(len, found)),
        pronouns=sum(word in PRONOUNS for words in found for word in words),
        sentences=len(found),
        long_sentences=sum(len(words) > SENTENCE_WORDS_MAX for words in found),
        openers=sum(words[0] in OPENERS for words in found),
    )


def total(counts: Iterable[Count]) -> Count:
    """Add counts up."""
    return sum(counts, start=Count())


def samples(counts: Mapping[PurePosixPath, Count]) -> dict[str, Count]:
    """Group files into samples that are large enough for a density of their own.

    A file of ``SAMPLE_WORDS_MIN`` words is a sample. Smaller files are summed per folder; the sum joins the
    folder above while the sum is too small. A rest at the top stands in no sample.
    """
    found = {str(path): each for path, each in counts.items() if each.words >= SAMPLE_WORDS_MIN}
    small: defaultdict[PurePosixPath, Count] = defaultdict(Count)
    for path, each in counts.items():
        if each.words < SAMPLE_WORDS_MIN:
            small[path.parent] += each
    for depth in range(max((len(folder.parts) for folder in small), default=0), 0, -1):
        for folder in [each for each in small if len(each.parts) == depth]:
            if small[folder].words >= SAMPLE_WORDS_MIN:
                found[f"{folder}/ (small files)"] = small[folder]
            else:
                small[folder.parent] += small[folder]
    return found
