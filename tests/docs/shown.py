"""What the tutorial says will be shown, and whether it was. Numbers may differ, nothing else."""

import re
from dataclasses import dataclass
from pathlib import Path

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial" / "README.md"


@dataclass(frozen=True)
class Block:
    """A code block: its language, its lines, and the line of prose before it."""

    language: str
    lines: tuple[str, ...]
    before: str

    def commands(self) -> list[tuple[str, list[str]]]:
        """Return each command of a console, with what it shows."""
        found: list[tuple[str, list[str]]] = []
        for line in self.lines:
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            else:
                found[-1][1].append(line)
        return found


def blocks() -> list[Block]:
    text = TUTORIAL.read_text()
    fences = re.finditer(r"([^\n]*)\n\n```(\w+)\n(.*?)```\n", text, re.DOTALL)
    found = [Block(fence[2], tuple(fence[3].splitlines()), fence[1]) for fence in fences]
    assert text.count("```") == 2 * len(found), "a code block names its language, after a line of prose"
    return found


def masked(lines: list[str]) -> list[str]:
    """Return what does not change from run to run.

    Numbers, times and the width of columns do, and what one of two shards has got.
    """
    found = []
    for line in lines:
        timeless = re.sub(r"\d[\d,.]* m?s\b", "TIME", line)
        timeless = re.sub(r"\d[\d,.]* [KMG]iB\b", "SIZE", timeless)
        found.append(" ".join(re.sub(r"─+", "─", re.sub(r"\d[\d,.]*", "N", timeless)).split()))
    return [line for line in found if line]


def assert_shown(shown: str, documented: list[str]) -> None:
    """Assert that all documented lines are shown, in this order."""
    lines = iter(masked(shown.splitlines()))
    for line in masked(documented):
        assert line in lines, f"{line!r} is in the tutorial, and what was shown is:\n{shown}"


def assert_equal(shown: str, documented: list[str]) -> None:
    """Assert that the documented lines are all that was shown. A line ``...`` stands for omitted lines."""
    pattern = "".join(
        r"(?:.*\n)*" if line == "..." else re.escape(f"{line}\n") for line in masked(documented)
    )
    lines = masked(shown.splitlines())
    assert re.fullmatch(pattern, "".join(f"{line}\n" for line in lines)), lines
