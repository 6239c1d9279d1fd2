"""`python -m demo.run --quick`: the whole demo with a toy model."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.docs.shown import assert_shown, blocks
from tests.scenarios.demo.whole_demo import whole_demo

REPOSITORY = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "demo.run", "--quick"]

pytestmark = pytest.mark.slow


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a short path: a socket's path has at most 107 bytes."""
    return tmp_path_factory.mktemp("d")


def started(directory: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, "--out", str(directory / "out"), *options],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(directory), "COLUMNS": "80"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.fixture
def running(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a demo whose worker A is at work, and so its fabric too."""
    with started(directory) as demo:
        assert demo.stdout is not None
        try:
            for line in demo.stdout:
                if "worker A has" in line:
                    break
            yield demo
        finally:
            demo.kill()


@pytest.mark.nixl
def test_every_check_passes_and_is_shown_as_the_tutorial_shows_it_and_nothing_is_left_behind() -> None:
    demo = whole_demo()
    shown = demo.shown
    assert (demo.returncode, demo.errors) == (0, ""), shown
    for claim in (
        "✓ all 64 blocks are committed",
        "✓ worker B, a fresh process, loaded all 64 blocks for each of 4 questions",
        "✓ half of the flash is destroyed",
        "✓ after that, worker B loaded all 64 blocks for each of 3 questions",
        "✓ worker B again loaded all 64 blocks for each of 4 questions",
        "✓ no block came from the agent's DRAM, so all came from flash",
        "Every check passed.",
    ):
        assert claim in shown
    equal = r"✓ 17 MB of KV cache and 4 answers with their logits equal the recomputed ones, bit for bit"
    assert len(re.findall(equal, shown)) == 3
    counts = re.findall(r"✓ (\d+) (?:of 64 blocks are lost|blocks are computed again)", shown)
    lost, put_back = map(int, counts)
    assert 64 >= put_back >= lost >= 32, "the half that holds more of the document was destroyed"
    assert blocks()[0].commands() == [("make demo", [])]
    assert_shown(shown, [line for block in blocks() if block.language == "text" for line in block.lines])
    assert demo.left == ("out", "out/demo.png", "out/demo.svg")


def test_a_terminated_demo_ends_all_its_processes_and_removes_its_directory(
    running: subprocess.Popen[str], directory: Path
) -> None:
    children = psutil.Process(running.pid).children(recursive=True)
    assert len(children) == 2, "the fabric and worker A"
    running.send_signal(signal.SIGTERM)
    _, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "Interrupted; every process has ended.\n")
    assert psutil.wait_procs(children, timeout=10)[1] == []
    assert left_in(directory) == []


def test_a_demo_whose_fabric_dies_fails_and_says_so(running: subprocess.Popen[str], directory: Path) -> None:
    children = psutil.Process(running.pid).children(recursive=True)
    fabric = next(child for child in children if "ostraca_cli" in child.cmdline())
    fabric.kill()
    shown, errors = running.communicate(timeout=100)
    assert (running.returncode, errors) == (1, "")
    assert re.search(r"✗ (worker A failed|The fabric ended|not so)", shown), shown
    assert left_in(directory) == []


def test_what_an_interrupted_demo_keeps_is_the_fabric_and_the_logs_and_no_process(directory: Path) -> None:
    with started(directory, "--keep") as demo:
        assert demo.stdout is not None
        while "worker A has" not in demo.stdout.readline():
            assert demo.poll() is None
        children = psutil.Process(demo.pid).children(recursive=True)
        demo.send_signal(signal.SIGINT)
        shown, errors = demo.communicate(timeout=60)
    assert errors == "Interrupted; every process has ended.\n"
    assert psutil.wait_procs(children, timeout=10)[1] == []
    kept = Path(shown.rpartition("Kept: ")[2].strip())
    assert (demo.returncode, kept.parent) == (130, directory)
    assert {"fabric", "fabric.log", "worker-a.log"} <= set(left_in(kept))
    assert len(list(kept.glob("fabric/enclosure-*/drive-*.img"))) == 4
