"""Goals and measured folders: the only place to change them."""

from __future__ import annotations

from typing import Final

CODE: Final = ("fabric", "dpu_agent", "enclosure", "sdk")
"""Folders of shipped packages. First-party modules are the Python files below these."""

SUPPORT: Final = ("tests", "benchmarks", "demo", "scripts", "helm")
"""Folders of code outside the packages."""

FOLDERS: Final = (*CODE, *SUPPORT, "docs")
"""Folders with a limit of entries."""

DATA_FOLDERS: Final = frozenset({"adr", "golden", "results"})
DATA_SUFFIXES: Final = frozenset({".bin", ".csv", ".json", ".png", ".svg", ".txt", ".z"})
NOT_ENTRIES: Final = frozenset({"__init__.py", "py.typed"})

ENTRIES_MAX: Final = 15
DUPLICATE_CLASSES_MAX: Final = 0
CYCLES_MAX: Final = 0
GET_MODULES_MAX: Final = 45
MODULE_LINES_MAX: Final = 400
BACKOFF_COPIES_MAX: Final = 1
SUBJECT_LENGTH_MAX: Final = 60
SUBJECTS: Final = 50
"""Measured commits, the newest first."""

DENSITY_MAX: Final = 4.0
"""Pronouns per 100 words, on average."""

FILE_DENSITY_MAX: Final = 6.0
"""Pronouns per 100 words in a single file."""

SAMPLE_WORDS_MIN: Final = 120
"""Words of a file with a density of its own; smaller files are summed per folder."""

SENTENCE_WORDS_MAX: Final = 25
LONG_SENTENCES_MAX: Final = 0
OPENERS_MAX: Final = 0
MESSAGE_WORDS_MIN: Final = 5
"""Words of a string literal for a reader; shorter literals are names and formats."""

DOCS_WORDS_MAX: Final = 55_000
GENERATED_MARK: Final = "<!-- From here on made by"
"""The start of the comment above the tables that a command writes to the end of a page."""

README_WORDS_MAX: Final = 900
