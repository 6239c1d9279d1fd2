"""Images for the cluster: the sandbox of pods, this checkout, and its successor.

The successor is this checkout under the next version number, with images of other content, for an upgrade.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from helm.images.archive import image_of, write_archive
from helm.images.layers import Entries, LayerCache
from helm.images.recipes import Recipe
from helm.images.wheels import source_digest
from tests.support.packages import NotHereError, find_program

_ROOT = Path(__file__).parents[2]
_ARCHIVE = "ostraca-images.tar"
_VERSION = Path("fabric/ostraca_fabric/runtime/version.py")
_NEXT_SUFFIX = ".post1"
_BUSYBOX = "busybox"
_FOREVER_S = "2147483647"


@dataclass(frozen=True)
class ImageSet:
    """Images of one version: agent, enclosure, admin, worker and etcd."""

    tag: str
    archive: Path


@dataclass(frozen=True)
class ClusterImages:
    """All images of a run."""

    sandbox: Path
    current: ImageSet
    successor: ImageSet


def provide_images(cache: Path) -> ClusterImages:
    """Return the images, built if missing. Raises NotHereError."""
    folder = cache / "images"
    current = _build(_ROOT, folder)
    with_successor = cache / "successor"
    shutil.rmtree(with_successor, ignore_errors=True)
    try:
        _copy_source(with_successor)
        successor = _build(with_successor, folder)
    finally:
        shutil.rmtree(with_successor, ignore_errors=True)
    return ClusterImages(_sandbox(folder), current, successor)


def _build(source: Path, folder: Path) -> ImageSet:
    match = re.search(r'^VERSION = "(.+)"$', (source / _VERSION).read_text(), re.MULTILINE)
    assert match, f"{_VERSION} holds the version"
    tag = match[1]
    digest = source_digest(source)[:16]
    out = folder / f"{tag}-{digest}"
    if not (out / _ARCHIVE).exists():
        print(f"building images of version {tag}", flush=True)
        for other in folder.glob(f"{tag}-*"):
            shutil.rmtree(other)
        _run(
            *(sys.executable, "-m", "helm.images.debian", "--bundle", "--tag", tag),
            *("--source", str(source), "--out", str(out), "--cache", str(folder / "cache")),
        )
    return ImageSet(tag, out / _ARCHIVE)


def _copy_source(to: Path) -> None:
    to.mkdir(parents=True)
    names = [
        "fabric",
        "dpu_agent",
        "enclosure",
        "sdk",
        "hatch_build.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
    ]
    for name in names:
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, to / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(_ROOT / name, to / name)
    version = to / _VERSION
    version.write_text(
        re.sub(r'^(VERSION = ".+)"$', rf'\1{_NEXT_SUFFIX}"', version.read_text(), flags=re.MULTILINE)
    )


def _sandbox(folder: Path) -> Path:
    """Write the image of a pod's first container, which only sleeps."""
    busybox = find_program(_BUSYBOX)
    assert busybox is not None, "busybox is installed first"
    content = Path(busybox).read_bytes()

    def add(entries: Entries) -> list[dict[str, object]]:
        entries.add_file(_BUSYBOX, content, mode=0o755)
        return []

    digest = hashlib.sha256(content).hexdigest()
    layer = LayerCache(folder / "cache/layers").layer("sandbox", {"busybox": digest}, add)
    recipe = Recipe("pause", "sandbox of a pod", (), "", (f"/{_BUSYBOX}", "sleep", _FOREVER_S))
    archive = folder / "pause.tar"
    write_archive([image_of(recipe, "1", "amd64", "1", [layer])], archive)
    return archive


def _run(*words: str) -> None:
    done = subprocess.run(words, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise NotHereError(f"images cannot be built: {reason[-1] if reason else done.returncode}")
