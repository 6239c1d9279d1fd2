"""Run a Python command under a recording's tracer.

Usage: ``python -m scripts.structure.get_path.trace FOLDER PYTHON -m MODULE ARGUMENT...``

The command's interpreter is ignored: the module runs in this process. So the first two words can precede any
command that starts with ``sys.executable``, like ``strace`` does.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from scripts.structure.get_path.recording import Recording


def main() -> None:
    """Trace, then run the module as ``__main__``."""
    _, folder, _interpreter, flag, module, *arguments = sys.argv
    assert flag == "-m", sys.argv
    sys.argv = [module, *arguments]
    Recording(Path(folder)).trace()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
