"""Layers of Python packages: locked wheels for the image's Python, and the project's own wheel."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from helm.images import sbom
from helm.images.bytecode import compile_tree
from helm.images.errors import ImageError
from helm.images.layers import Entries

MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's names of architectures, and the kernel's."""

GLIBC: Final = "2_36"
"""The C library of Debian 12; later releases run the same wheels."""

PROJECT = (
    "fabric",
    "dpu_agent",
    "enclosure",
    "sdk",
    "hatch_build.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
_UNUSED = ("nixl_ep_cu12/",)
"""Part of NIXL's wheel for expert parallelism, which needs torch: 100 MB that Ostraca never imports."""

_ENTRY_POINT = """\
#!/usr/bin/python3
import sys

from ostraca_cli import main

sys.exit(main())
"""


def source_digest(source: Path) -> str:
    """Return a digest of the project's files that make up the wheel."""
    digest = hashlib.sha256()
    for name in PROJECT:
        for path in sorted((source / name).rglob("*")) if (source / name).is_dir() else [source / name]:
            if path.is_file() and path.suffix not in (".pyc", ".so"):
                digest.update(f"{path.relative_to(source)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def build_wheel(source: Path, architecture: str, cache: Path) -> Path:
    """Build the project's wheel from a copy of *source*; return the wheel in the cache."""
    folder = cache / f"{source_digest(source)[:32]}-{architecture}"
    if found := list(folder.glob("*.whl")):
        return found[0]
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name, "source")
        copy.mkdir()
        # A copy, since the build writes the compiled library beside the C sources.
        for part in PROJECT:
            if (source / part).is_dir():
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(source / part, copy / part, ignore=ignored)
            else:
                shutil.copy(source / part, copy / part)
        made = Path(name, "wheel")
        command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(made)]
        _run(command, cwd=copy, env={**os.environ, **_compiler_for(architecture)})
        folder.mkdir(parents=True, exist_ok=True)
        [wheel] = made.glob("*.whl")
        return Path(shutil.move(wheel, folder / wheel.name))


def add_locked(entries: Entries, lock: Path, architecture: str, python: str) -> list[dict[str, Any]]:
    """Add the wheels of a lock file, checked by hash."""
    return _add(entries, architecture, python, ["--require-hashes", "--requirements", str(lock)])


def add_project(entries: Entries, wheel: Path, architecture: str, python: str) -> list[dict[str, Any]]:
    """Add the project's wheel, and the command ``ostraca``."""
    name, version = wheel.name.split("-")[:2]
    words = ["--no-index", "--no-cache", "--find-links", str(wheel.parent), f"{name}=={version}"]
    entries.add_file("usr/local/bin/ostraca", _ENTRY_POINT.encode(), mode=0o755)
    return _add(entries, architecture, python, words)


def _add(entries: Entries, architecture: str, python: str, words: list[str]) -> list[dict[str, Any]]:
    prefix = f"usr/local/lib/python{python}/dist-packages"
    with tempfile.TemporaryDirectory(prefix="ostraca-image-") as name:
        folder = Path(name)
        _run(
            [
                *(sys.executable, "-m", "uv", "pip", "install", "--quiet", "--target", name),
                *("--python-version", python, "--only-binary", ":all:", "--no-deps"),
                *("--python-platform", f"{MACHINES[architecture]}-manylinux_{GLIBC}", *words),
            ]
        )
        for record in folder.glob("*.dist-info/RECORD"):
            record.write_text(kept_records(record.read_text("utf-8")), "utf-8")
        if python == f"{sys.version_info.major}.{sys.version_info.minor}":
            compile_tree(folder, f"/{prefix}")
        entries.add_tree(folder, prefix, drops=_is_dropped)
        # The temporary folder ends with this function, so the entries take the contents in.
        entries.hold()
        return [
            sbom.python_component(path.read_text("utf-8"))
            for path in sorted(folder.glob("*.dist-info/METADATA"))
        ]


def kept_records(text: str) -> str:
    """Return a distribution's list of files without the files that the image lacks."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not _is_dropped(line.partition(",")[0]))


def _is_dropped(path: str) -> bool:
    # Scripts of other packages name this machine's Python, and uv notes the time of the wheel.
    return path.startswith((".lock", "bin/", *_UNUSED)) or path.endswith("/uv_cache.json")


def _compiler_for(architecture: str) -> dict[str, str]:
    machine = MACHINES[architecture]
    if machine == os.uname().machine:
        return {}
    compiler = f"{machine}-linux-gnu-gcc"
    if not shutil.which(compiler):
        package = f"gcc-{machine}-linux-gnu"
        raise ImageError(f"{compiler} is missing: install Debian's package {package}")
    return {"CC": compiler, "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}


def _run(command: list[str], *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ImageError(f"{' '.join(command[1:4])} failed: {(done.stderr or done.stdout).strip()}")
