"""A warm process behaves like a cold one in all that tests look at."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.support.fabric.warm_process import WarmProcess, run_ostraca, started

pytestmark = pytest.mark.slow


def test_a_command_s_output_errors_and_code_are_those_of_a_cold_process(tmp_path: Path) -> None:
    for words, code in ((("--version",), 0), (("status", "unix:///nowhere"), 1), (("none",), 2)):
        warm, log = run_ostraca(*words), tmp_path / "cold"
        cold = started(*words, log=log, is_warm=False)
        assert cold.stdout is not None
        with cold.stdout as said:
            assert (warm.returncode, warm.stdout) == (code, said.read())
        assert cold.wait(60) == code
        assert warm.stderr == log.read_text()
        log.unlink()


def test_a_process_has_its_own_group_environment_and_folder_and_ends_by_its_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRACA_AGENT_MEMORY_STAGING_BYTES", "64MiB")
    monkeypatch.chdir(tmp_path)
    words = ("up", "--dir", "here", "--capacity", "256MiB", "--transport", "inline")
    process = WarmProcess(*words, log=tmp_path / "log")
    try:
        assert "ostraca.connect(" in process.stdout.readline()
        assert os.getpgid(process.pid) == process.pid
        assert (tmp_path / "here").is_dir()
        process.send_signal(signal.SIGSTOP)
        assert process.poll() is None
        process.kill()
        assert process.wait(60) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL
    finally:
        process.kill()
        process.stdout.close()
