"""Layers of an image: tar files with sorted entries, fixed times and numeric owners."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

EPOCH_S = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
"""Time of every file and of the images, so that equal content has an equal digest."""


@dataclass(frozen=True)
class Entry:
    """File, folder or link of a layer; *info* holds type, mode, owner and link target."""

    info: tarfile.TarInfo
    content: bytes | Path = b""


@dataclass(frozen=True)
class Layer:
    """Layer in the cache."""

    path: Path
    digest: str
    """SHA-256 of the tar file, in hexadecimal."""

    comment: str
    components: list[dict[str, Any]]
    """Packages in the layer, as CycloneDX components."""


class Entries:
    """Entries of a layer under construction, by path; a later entry replaces an earlier entry."""

    def __init__(self) -> None:
        """Begin with no entry."""
        self._by_path: dict[str, Entry] = {}

    def add(self, path: str, entry: Entry) -> None:
        """Add an entry under a relative path."""
        info = entry.info
        info.name, info.mtime, info.uname, info.gname = path, EPOCH_S, "", ""
        info.pax_headers = {}
        self._by_path[path] = entry

    def add_file(self, path: str, content: bytes | Path, *, mode: int = 0o644, owner: int = 0) -> None:
        """Add a regular file."""
        info = tarfile.TarInfo()
        info.mode, info.uid, info.gid = mode, owner, owner
        info.size = len(content) if isinstance(content, bytes) else content.stat().st_size
        self.add(path, Entry(info, content))

    def add_folder(self, path: str, *, mode: int = 0o755, owner: int = 0) -> None:
        """Add a folder."""
        info = tarfile.TarInfo()
        info.type, info.mode, info.uid, info.gid = tarfile.DIRTYPE, mode, owner, owner
        self.add(path, Entry(info))

    def add_link(self, path: str, target: str) -> None:
        """Add a symbolic link."""
        info = tarfile.TarInfo()
        info.type, info.mode, info.linkname = tarfile.SYMTYPE, 0o777, target
        self.add(path, Entry(info))

    def add_tree(self, folder: Path, prefix: str, *, drops: Callable[[str], bool]) -> None:
        """Add the files below *folder* under *prefix*, unless *drops* accepts the relative path."""
        for path in sorted(folder.rglob("*")):
            name = path.relative_to(folder).as_posix()
            if drops(name):
                continue
            if path.is_symlink():
                self.add_link(f"{prefix}/{name}", str(path.readlink()))
            elif path.is_file():
                self.add_file(f"{prefix}/{name}", path, mode=0o755 if os.access(path, os.X_OK) else 0o644)

    def hold(self) -> None:
        """Read all contents into memory, so that their files may go."""
        for path, entry in self._by_path.items():
            self._by_path[path] = Entry(entry.info, _bytes_of(entry.content))

    def files(self, suffix: str) -> Iterable[tuple[str, bytes]]:
        """Return paths and contents of regular files with this suffix."""
        for path, entry in self._by_path.items():
            if path.endswith(suffix) and entry.info.isreg():
                yield path, _bytes_of(entry.content)

    def write(self, to: Path) -> str:
        """Write the tar file; return the digest."""
        # A hard link follows the file that it names.
        ordered = sorted(self._by_path.items(), key=lambda item: (item[1].info.islnk(), item[0]))
        with tarfile.open(to, "w", format=tarfile.GNU_FORMAT) as tar:
            for _, entry in ordered:
                if entry.info.isreg():
                    with _opened(entry.content) as content:
                        tar.addfile(entry.info, content)
                else:
                    tar.addfile(entry.info)
        with to.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class LayerCache:
    """Folder of finished layers, by a key of everything that a layer is made of."""

    def __init__(self, folder: Path) -> None:
        """Use *folder*, and create the folder if missing."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder

    def layer(
        self,
        comment: str,
        inputs: Mapping[str, object],
        make: Callable[[Entries], list[dict[str, Any]]],
    ) -> Layer:
        """Return the layer for *inputs*; *make* adds the entries of a missing layer."""
        text = json.dumps([_SOURCES, EPOCH_S, comment, inputs], sort_keys=True, default=str)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        record, path = self._folder / f"{key}.json", self._folder / f"{key}.tar"
        if record.exists() and path.exists():
            return Layer(**{**json.loads(record.read_text("utf-8")), "path": path})
        entries = Entries()
        components = make(entries)
        part = path.with_suffix(f".{os.getpid()}")
        layer = Layer(path, entries.write(part), comment, components)
        part.replace(path)
        part.write_text(json.dumps(asdict(layer), default=str), "utf-8")
        part.replace(record)
        return layer


def _sources_digest() -> str:
    modules = ("apt", "bytecode", "debs", "layers", "sbom", "wheels")
    texts = (Path(__file__).with_name(f"{name}.py").read_bytes() for name in modules)
    return hashlib.sha256(b"".join(texts)).hexdigest()


_SOURCES = _sources_digest()
"""Digest of the modules that write layers: after a change, every layer is made anew."""


def _bytes_of(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _opened(content: bytes | Path) -> io.BytesIO | io.BufferedReader:
    return io.BytesIO(content) if isinstance(content, bytes) else content.open("rb")
