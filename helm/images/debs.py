"""Layers of Debian packages, unpacked without a run of any maintainer script.

The result resembles an installed system: merged ``/usr``, a bundle of CA certificates, compiled modules of
Python, and a record of each package below ``/var/lib/dpkg/status.d`` for scanners.
"""

from __future__ import annotations

import io
import posixpath
import re
import subprocess
import tarfile
from collections.abc import Sequence
from typing import Any

from helm.images import sbom
from helm.images.apt import Package
from helm.images.bytecode import add_bytecode
from helm.images.layers import Entries, Entry
from helm.images.recipes import OWNED_FOLDERS, USER

_MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
_DROPPED = re.compile(
    r"usr/share/(?:doc/(?!.*/copyright$)|info/|lintian/|locale/|man/|bash-completion/|zsh/|bug/|doc-base/).+"
    r"|usr/lib/systemd/.+|lib/systemd/.+|etc/(?:init\.d|default|cron\.[a-z]+)/.+"
)
_CERTIFICATES = "usr/share/ca-certificates/"


def add_packages(entries: Entries, packages: Sequence[Package], python: str) -> list[dict[str, Any]]:
    """Add the content of packages; return their components. *python*: version of compiled modules."""
    components = []
    for package in packages:
        control = _output("dpkg-deb", "--field", package.file).decode()
        entries.add_file(f"var/lib/dpkg/status.d/{package.name}", control.encode())
        components.append(sbom.debian_component(sbom.control_fields(control)))
        _add_content(entries, _output("dpkg-deb", "--fsys-tarfile", package.file))
    bundle = b"".join(
        content for path, content in sorted(entries.files(".crt")) if path.startswith(_CERTIFICATES)
    )
    if bundle:
        entries.add_file("etc/ssl/certs/ca-certificates.crt", bundle)
    modules = [each for each in entries.files(".py") if each[0].startswith("usr/lib/python3")]
    add_bytecode(entries, modules, python)
    return components


def add_skeleton(entries: Entries) -> None:
    """Add what maintainer scripts would write: users, folders, links of a merged ``/usr``."""
    for name in _MERGED:
        entries.add_folder(f"usr/{name}")
        entries.add_link(name, f"usr/{name}")
    user = f"ostraca:x:{USER}:{USER}::/var/lib/ostraca:/usr/sbin/nologin\n"
    entries.add_file("etc/passwd", f"root:x:0:0:root:/root:/bin/sh\n{user}".encode())
    entries.add_file("etc/group", f"root:x:0:\nostraca:x:{USER}:\n".encode())
    entries.add_file("etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    for folder in OWNED_FOLDERS:
        entries.add_folder(folder, owner=USER)


def _add_content(entries: Entries, archive: bytes) -> None:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for info in tar:
            path = merged(info.name)
            if not path or _DROPPED.fullmatch(path) or (info.isdir() and path in _MERGED):
                continue
            content = b""
            if info.isreg():
                extracted = tar.extractfile(info)
                assert extracted is not None, "a regular file has content"
                content = extracted.read()
            elif info.islnk():
                info.linkname = merged(info.linkname)
            entries.add(path, Entry(info, content))


def merged(name: str) -> str:
    """Return a path of a package in a merged ``/usr``: ``./bin/sh`` is ``usr/bin/sh``."""
    path = posixpath.normpath(name).lstrip("/")
    if path == ".":
        return ""
    first, slash, _ = path.partition("/")
    return f"usr/{path}" if slash and first in _MERGED else path


def _output(*command: str) -> bytes:
    return subprocess.run(command, capture_output=True, check=True).stdout
