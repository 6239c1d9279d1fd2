"""Recordings of executed modules, with traced processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from scripts.structure.get_path.recording import Recording
from scripts.structure.sources import ROOT

LOOPING = """
def loop(inbox, outbox):
    while (word := inbox.get()) is not None:
        outbox.put(word)
"""
CALLED = "def call():\n    return 1\n"
MAIN = """
import queue, sys, threading
from pathlib import Path
import called, looping
from scripts.structure.get_path.recording import Recording

recording = Recording(Path(sys.argv[1]))
inbox, outbox = queue.Queue(), queue.Queue()
thread = threading.Thread(target=looping.loop, args=(inbox, outbox))
thread.start()

def turn():
    inbox.put("a word")
    outbox.get()

turn()
recording.open_window(1)
turn()
recording.close_window()
called.call()
turn()
recording.open_window(2)
turn()
called.call()
recording.close_window()
inbox.put(None)
thread.join()
"""


def test_windows_hold_the_modules_that_ran_in_them_in_threads_that_began_before(tmp_path: Path) -> None:
    code, folder = tmp_path / "code", tmp_path / "recording"
    code.mkdir()
    folder.mkdir()
    for name, text in {"looping": LOOPING, "called": CALLED, "started": MAIN, "idle": ""}.items():
        (code / f"{name}.py").write_text(text)
    looping, called, idle = (code / f"{name}.py" for name in ("looping", "called", "idle"))
    recording = Recording.create(folder, [looping, called, idle])
    subprocess.run(
        [
            *(sys.executable, "-m", "scripts.structure.get_path.trace", str(folder)),
            *(sys.executable, "-m", "started", str(folder)),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(code)},
        check=True,
    )
    assert recording.executed(1) == {looping}
    assert recording.executed(2) == {looping, called}
    assert recording.executed_in_all((1, 2)) == {looping}
    assert recording.executed(3) == frozenset()
