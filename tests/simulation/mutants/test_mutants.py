"""Some of ``make mutants``: those that are found at once."""

from __future__ import annotations

import subprocess
import sys

from tests.simulation.mutants.mutants import MUTANTS, all_hunted

SOON = (
    "no tag is checked at the reader",
    "tags are made by the agent",
    "slots are used again without quarantine",
    "pins are ignored",
    "the last commit wins, not the first",
    "a late write is not waited for before its grant is retired",
    "blocks are placed by revision",
    "slots come back under an own read",
    "the agent delivers what it has offered",
    "a frame lands in rows to its end",
    "blocks read from memory are not verified",
    "volumes are known by their names alone",
)


def test_mistakes_made_on_purpose_are_found() -> None:
    assert {name for name, found, _ in all_hunted(list(SOON), jobs=2) if not all(found)} == set()


PLANT_ALL = """
from tests.simulation.mutants.mutants import MUTANTS
for mutant in MUTANTS:
    mutant.plant()
"""


def test_all_mistakes_can_still_be_made() -> None:
    ended = subprocess.run([sys.executable, "-c", PLANT_ALL], check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
