"""Compiles the C files of ``ostraca_fabric.native`` when the package is built, editable installs included.

The compiler is ``$CC``, else the machine's ``cc``; where there is none, the ``ziglang`` package from PyPI,
which is one, is asked for as a build requirement. No Python headers are needed. The result is put beside its
sources.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ZIG = "ziglang>=0.13"
FOLDER = Path("fabric", "ostraca_fabric", "native")
FLAGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=off",
    "-D_GNU_SOURCE",
    "-Wall",
    "-Wextra",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-shared",
    "-s",
]


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # its configuration has no type of ours
    """Makes ``libostraca.so``."""

    def dependencies(self) -> list[str]:
        """Ask for a compiler where the machine has none."""
        return [] if _machines_compiler() else [ZIG]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002 (hatchling's)
        """Compile, and say that the wheel is for this kind of machine."""
        folder = Path(self.root, FOLDER)
        made = folder / "libostraca.so"
        sources = sorted(folder.rglob("*.c"))
        fresh = made.with_suffix(f".{os.getpid()}")
        command = [*_compiler(), *FLAGS, "-o", str(fresh), *map(str, sources)]
        with tempfile.TemporaryDirectory() as cache:  # zig's would be in the home directory
            ended = subprocess.run(  # noqa: S603 (our own command)
                command,
                check=False,
                capture_output=True,
                text=True,
                env={**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
            )
        if ended.returncode:
            message = f"compiling Ostraca's C files failed: {shlex.join(command)}\n{ended.stderr}"
            raise RuntimeError(message)
        fresh.replace(made)  # a process that has the old one loaded keeps it
        build_data["pure_python"] = False
        build_data["artifacts"].append(str(FOLDER / made.name))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"py3-none-{platform}"


def _machines_compiler() -> list[str]:
    named = shlex.split(os.environ.get("CC", ""))
    found = next(filter(None, map(shutil.which, named[:1] or ("cc", "gcc", "clang"))), None)
    return [found, *named[1:]] if found else []


def _compiler() -> list[str]:
    if own := _machines_compiler():
        return own
    machine = os.uname().machine
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{machine}-linux-gnu.2.17"]
