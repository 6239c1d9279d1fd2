"""Tier with the classes of every supported release of vLLM, and the matrix of releases in the docs.

``scripts/setup-vllm-releases`` unpacks the releases. No engine runs here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.sdk.connectors.vllm.release_facts import COLUMNS

ROOT = Path(__file__).parents[4]
RELEASES = ROOT / ".venv-vllm" / "releases"
REFERENCE = (ROOT / "docs" / "reference" / "vllm.md").read_text()
ROWS = dict(re.findall(r"^\| (0\.\d+) \|(.*)\|$", REFERENCE, re.MULTILINE))

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def run(release: str, *arguments: str) -> str:
    """Run Python with the release in place of the installed vLLM; return its output."""
    code = RELEASES / release
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed here; make test-vllm makes an environment that has it")
    if not code.is_dir():
        pytest.skip("the release is not unpacked; scripts/setup-vllm-releases does so")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(code)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr[-4000:]}"
    return done.stdout


def test_the_matrix_has_all_releases_and_columns() -> None:
    assert list(ROWS) == ["0.28", "0.29", "0.30", "0.31", "0.32", "0.33"]
    assert f"| release | {' | '.join(COLUMNS)} |" in REFERENCE


@pytest.mark.parametrize("release", ROWS)
def test_the_matrix_is_true(release: str) -> None:
    facts = json.loads(run(release, "-m", "tests.sdk.connectors.vllm.release_facts").splitlines()[-1])
    assert Path(facts["source"]).is_relative_to(RELEASES / release)
    assert facts["missing"] == []
    told = [cell.strip() == "yes" for cell in ROWS[release].split("|")]
    assert dict(zip(COLUMNS, told, strict=True)) == facts["offers"]


@pytest.mark.parametrize("release", ROWS)
def test_the_tier_works_with_the_classes_of_the_release(release: str) -> None:
    tests = "tests/sdk/connectors/vllm/test_adapter.py"
    output = run(release, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests)
    assert re.search(r"\b\d+ passed", output), output
