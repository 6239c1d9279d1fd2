"""The flash I/O engine without Python, under the compiler's sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ostraca_fabric import native

FOLDER = Path(native.__file__).parent
DRIVER = Path(__file__).parent / "io" / "driver.c"
COMPILER = shutil.which("gcc") or shutil.which("clang")


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
@pytest.mark.parametrize("mode", ["io_uring", "threads"])
def test_batches_of_several_threads_and_drives_race_nowhere(
    tmp_path: Path, sanitizer: str, mode: str
) -> None:
    if COMPILER is None:
        pytest.skip("no compiler is installed here")
    program = tmp_path / "driver"
    sources = [DRIVER, *sorted((FOLDER / "io").glob("*.c")), FOLDER / "tags.c"]
    flags = ["-g", "-O1", "-std=c11", "-D_GNU_SOURCE", "-pthread", f"-fsanitize={sanitizer}", f"-I{FOLDER}"]
    made = subprocess.run(
        [COMPILER, *flags, "-o", program, *sources], capture_output=True, text=True, check=False
    )
    if made.returncode and "cannot find" in made.stderr:
        pytest.skip(f"this compiler has no sanitizer for {sanitizer}")
    assert not made.returncode, made.stderr
    told = subprocess.run([program, mode, tmp_path], capture_output=True, text=True, check=False, timeout=100)
    assert not told.returncode, told.stderr
    assert told.stdout.strip() in {mode, "threads"}
