"""Environments of the peers: Python packages from PyPI, programs and libraries from Debian, in a cache.

Nothing is installed into the system or into the project's environment: packages of Debian are unpacked only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ostraca_fabric.errors import OstracaError

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ostraca-peers"
MOONCAKE = ("mooncake-transfer-engine-non-cuda==0.3.13.post1",)
"""Build without CUDA: any other needs NVIDIA's driver at import."""

MOONCAKE_LIBRARIES = ("libibverbs1", "librdmacm1", "libnuma1", "liburing2")
REDIS = ("redis==8.1.0", "hiredis==3.5.0")
_LOOPBACK_ALONE = (
    *("unshare", "--map-root-user", "--net"),
    *("sh", "-c", 'ip link set lo up && exec "$@"', "sh"),
)
"""Start of a command: run the rest in a network namespace of its own."""

_INSTALL_S = 900
_MARK = "complete"


class PeerMissingError(OstracaError):
    """A peer can't be installed here."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Start of the command of a store's client, its environment variables, and the variant for its order."""

    command: tuple[str, ...] = (sys.executable,)
    variables: dict[str, str] = field(default_factory=dict)
    variant: str = ""


def mooncake(cache: Path, variant: str) -> Surroundings:
    """Install Mooncake; *variant* is ``checksum``, or empty. Raises PeerMissingError.

    Mooncake's clients listen on all interfaces, so they run where the loopback interface is the only one.
    """
    _run((*_LOOPBACK_ALONE, "true"))
    python = _environment(cache / "mooncake", MOONCAKE)
    variables = {"MOONCAKE_STORE_CHECKSUM": "1" if variant else "0", "GLOG_minloglevel": "2"}
    if not _imports(python, "mooncake.store", {}):
        variables |= _libraries(_unpacked(cache / "mooncake-debian", MOONCAKE_LIBRARIES))
        if not _imports(python, "mooncake.store", variables):
            raise PeerMissingError(f"Mooncake can't be imported: see `{python} -c 'import mooncake.store'`")
    return Surroundings((*_LOOPBACK_ALONE, str(python)), variables, variant)


def redis(cache: Path, _: str) -> Surroundings:
    """Install Redis, unless the system has the server. Raises PeerMissingError."""
    python = _environment(cache / "redis", REDIS)
    found = shutil.which("redis-server")
    if found:
        return Surroundings((str(python),), {}, found)
    root = _unpacked(cache / "redis-debian", ("redis-server",))
    return Surroundings((str(python),), _libraries(root), str(root / "usr" / "bin" / "redis-server"))


def own(_: Path, variant: str) -> Surroundings:
    """Use the project's environment."""
    return Surroundings(variant=variant)


def _environment(folder: Path, packages: Sequence[str]) -> Path:
    """Create a virtual environment with exactly these packages and NumPy, once; return its interpreter."""
    wanted = "\n".join((*packages, f"numpy=={np.__version__}"))
    python, mark = folder / "bin" / "python", folder / _MARK
    if not mark.exists() or mark.read_text() != wanted:
        print(f"installing {', '.join(packages)} into {folder}", file=sys.stderr)
        shutil.rmtree(folder, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(folder)])
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", *wanted.split("\n")])
        mark.write_text(wanted)
    return python


def _unpacked(folder: Path, packages: Sequence[str]) -> Path:
    """Download Debian packages, and those that they need and the system lacks; return their unpacked root."""
    if not (folder / _MARK).exists():
        if not shutil.which("apt-get"):
            raise PeerMissingError(f"{', '.join(packages)}: not installed, and there is no apt-get")
        shutil.rmtree(folder, ignore_errors=True)
        archives = folder / "archives"
        (archives / "partial").mkdir(parents=True)
        options = ("-o", "Debug::NoLocking=1", "-o", f"Dir::Cache::archives={archives}")
        command = ["apt-get", "install", "--download-only", "--no-install-recommends", "-qq", "-y"]
        _run([*command, *options, *packages])
        for archive in archives.glob("*.deb"):
            _run(["dpkg-deb", "--extract", str(archive), str(folder)])
        (folder / _MARK).touch()
    return folder


def _libraries(root: Path) -> dict[str, str]:
    return {
        "LD_LIBRARY_PATH": ":".join(
            map(str, (*root.glob("usr/lib/*-linux-gnu*"), *root.glob("lib/*-linux-gnu*")))
        )
    }


def _imports(python: Path, module: str, variables: dict[str, str]) -> bool:
    command = [str(python), "-c", f"import {module}"]
    return not subprocess.run(
        command, env=os.environ | variables, capture_output=True, check=False
    ).returncode


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_INSTALL_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissingError(f"`{command[0]}` failed: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise PeerMissingError(f"`{' '.join(command[:4])} …` failed: {last}")
