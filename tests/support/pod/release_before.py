"""The release before this one, in a tree of its own from which processes are run.

Releases N and N-1 work together in one fabric, so tests run agents, commands and workers of both. The tree
comes from this repository's own history, and its C files are compiled as that release compiles them when it
is installed; the packages that it imports are those of this Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.history import unpack

REVISION = "c264cccfe791"
"""The release before, as git knows it: of a release, its tag.

There has been no release yet. This is the first commit at which the scenarios of this folder ran, with agents
as processes of their own in a fabric that etcd keeps. So whatever was changed since in what goes over the
wire, to etcd and to flash lies between it and today. The first release's tag takes its place
(CONTRIBUTING.md).
"""

VARIABLE = "OSTRACA_RELEASE_BEFORE"
"""Names another one in the environment: a git revision, or a directory with its sources."""

ROOT = Path(__file__).resolve().parents[3]
KNOWN_TRACEBACK = re.compile(
    r"Exception in callback [^\n]*PollerCompletionQueue.*?RuntimeError: Event loop is closed\n",
    re.DOTALL,
)
"""Written by the release before, which closes the event loop of its lease's thread at the end. gRPC may still
have an event for that loop."""

_FOLDERS = ("fabric", "dpu_agent", "enclosure", "sdk")
_PARTS = (*_FOLDERS, "hatch_build.py")
_PACKAGES = ("ostraca", "ostraca_dpu_agent", "ostraca_enclosure", "ostraca_fabric")

_COMPILE = """
from hatch_build import NativeBuildHook
NativeBuildHook(".", {}, None, None, "", "wheel").initialize("editable", {"artifacts": []})
"""
_WHERE = f"""
from importlib import import_module
print(*(import_module(each).__file__ for each in {_PACKAGES}), sep="\\n")
"""


@dataclass(frozen=True)
class Release:
    """A release whose sources lie in a tree and are compiled."""

    tree: Path

    @property
    def environment(self) -> dict[str, str]:
        """That of processes which are to be of this release; they find today's ``tests``, too."""
        also = filter(None, [os.environ.get("PYTHONPATH")])
        paths = [*(str(self.tree / folder) for folder in _FOLDERS), str(ROOT), *also]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def release_before(folder: Path) -> Release:
    """Put the release before into an empty folder, and compile it. Raises NoRevisionError."""
    named = os.environ.get(VARIABLE) or REVISION
    if Path(named).is_dir():
        _copy(Path(named), folder)
    else:
        unpack(named, _PARTS, folder)
    release = Release(folder)
    _run(sys.executable, "-c", _COMPILE, at=folder)
    # This Python has today's packages installed: a release before that were them would prove nothing.
    for found in _run(sys.executable, "-c", _WHERE, at=ROOT, environment=release.environment).splitlines():
        assert Path(found).is_relative_to(folder), f"{found} is not of {folder}"
    return release


def _copy(source: Path, folder: Path) -> None:
    for part in _PARTS:
        if (source / part).is_dir():
            shutil.copytree(
                source / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "*.so")
            )
        else:
            shutil.copy(source / part, folder)


def _run(*command: str, at: Path, environment: dict[str, str] | None = None) -> str:
    ended = subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{command}: {ended.stderr}"
    return ended.stdout
