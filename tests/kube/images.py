"""Images for the cluster: the sandbox of pods, this checkout, its successor, and the first version.

The successor is this checkout under the next version number, with other content, for an upgrade. The first
version is the first commit with a proven chart, with the chart of then.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from helm.images.archive import image_of, write_archive
from helm.images.layers import Entries, LayerCache
from helm.images.recipes import Recipe, project_version
from helm.images.wheels import PROJECT, source_digest
from tests.support.history import NoRevisionError, unpack
from tests.support.packages import NotHereError, find_program

FIRST_PASSED = "d656dde"
"""The first commit whose chart passed scenarios on three nodes."""

_ROOT = Path(__file__).parents[2]
_ARCHIVE = "ostraca-images.tar"
_VERSION = Path("fabric/ostraca_fabric/runtime/version.py")
_PARTS = (*PROJECT, "helm")
_FIRST_TAG = "first"
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
    first: ImageSet | None
    """None without the history of the repository."""


def provide_images(cache: Path) -> ClusterImages:
    """Return the images, built if missing. Raises NotHereError."""
    folder = cache / "images"
    current = _build(_ROOT, folder, project_version(_ROOT))
    with _source_folder(cache) as source:
        _copy_source(source)
        successor = _build(source, folder, project_version(source))
    with _source_folder(cache) as source:
        try:
            unpack(FIRST_PASSED, (*_PARTS, "helm"), source)
        except NoRevisionError as error:
            print(f"without images of the first version: {error}")
            first = None
        else:
            first = _build(source, folder, _FIRST_TAG)
    return ClusterImages(_sandbox(folder), current, successor, first)


@contextmanager
def _source_folder(cache: Path) -> Iterator[Path]:
    folder = cache / "source-of-images"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def _build(source: Path, folder: Path, tag: str) -> ImageSet:
    digest = source_digest(source)[:16]
    out = folder / f"{tag}-{digest}"
    if not (out / _ARCHIVE).exists():
        print(f"building images of version {tag}", flush=True)
        for other in folder.glob(f"{tag}-*"):
            shutil.rmtree(other)
        _run(
            *(sys.executable, "-m", "helm.images.debian", "--bundle", "--tag", tag),
            *("--out", str(out), "--cache", str(folder / "cache")),
            source=source,
        )
    return ImageSet(tag, out / _ARCHIVE)


def _copy_source(to: Path) -> None:
    for name in _PARTS:
        if (_ROOT / name).is_dir():
            shutil.copytree(_ROOT / name, to / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        else:
            shutil.copy(_ROOT / name, to / name)
    version = to / _VERSION
    major, minor, patch = project_version(_ROOT).split(".")
    text = version.read_text()
    version.write_text(text.replace(f"{major}.{minor}.{patch}", f"{major}.{minor}.{int(patch) + 1}"))


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


def _run(*words: str, source: Path) -> None:
    done = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()
        raise NotHereError(f"images cannot be built: {reason[-1] if reason else done.returncode}")
