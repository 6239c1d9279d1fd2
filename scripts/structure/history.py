"""Measures of git's history: the lengths of commit subjects."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Sequence

from scripts.structure.config import SUBJECT_LENGTH_MAX, SUBJECTS
from scripts.structure.sources import output_of
from scripts.structure.table import Row, Verdict, informative


def subject_row() -> Row:
    """Measure the newest commits; absent where the sources come without a repository."""
    try:
        listed = output_of("git", "log", "--no-merges", f"--max-count={SUBJECTS}", "--format=%s").splitlines()
    except subprocess.CalledProcessError:
        listed = []
    return subject_lengths_row(listed)


def subject_lengths_row(subjects: Sequence[str]) -> Row:
    """Describe the lengths of commit *subjects*."""
    measure = f"commit subjects: median and longest of {len(subjects)}"
    if not subjects:
        return Row(measure, "no commits", "", Verdict.ABSENT)
    lengths = [len(subject) for subject in subjects]
    over = sorted((each for each in subjects if len(each) > SUBJECT_LENGTH_MAX), key=len, reverse=True)
    return informative(
        measure,
        f"{statistics.median(lengths):.0f}, {max(lengths)} ({len(over)} over {SUBJECT_LENGTH_MAX})",
        [f"{len(subject):4} {subject}" for subject in over],
    )
