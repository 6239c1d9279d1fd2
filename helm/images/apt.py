"""Debian packages without an installation: resolved and downloaded by apt, in a folder of its own."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from helm.images.errors import ImageError

ABSENT = (
    "adduser",
    "debconf",
    "dpkg",
    "init-system-helpers",
    "lsb-base",
    "mawk",
    "openssl",
    "passwd",
    "perl",
    "perl-base",
    "readline-common",
    "sysvinit-utils",
    "tar",
    "uuid-runtime",
)
"""Packages that only maintainer scripts need. apt takes these for installed, since no such script runs."""

_STANZA = """\
Package: {name}
Status: install ok installed
Version: 999
Architecture: {architecture}
Multi-Arch: foreign
Maintainer: none
Description: not in the image
{provides}
"""
_INSTALLED = re.compile(r"^Inst (?P<name>\S+) (?:\[\S+\] )?\((?P<version>\S+) .*\[(?P<architecture>\w+)\]\)")


@dataclass(frozen=True)
class Package:
    """Downloaded package."""

    name: str
    version: str
    file: str


class Apt:
    """apt with its own lists, status and archives; the host's packages stay untouched."""

    def __init__(self, folder: Path, architecture: str, sources: Path) -> None:
        """Use the package sources of the file *sources*."""
        if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
            raise ImageError("apt-get and dpkg-deb are missing: build on Debian, or use the Containerfile")
        if not sources.exists():
            raise ImageError(f"{sources} is missing: name a file of Debian package sources by --sources")
        text = sources.read_bytes()
        self.key = f"{architecture}-{hashlib.sha256(text).hexdigest()[:16]}"
        self._folder = folder / self.key
        self._archives = self._folder / "cache" / "archives"
        for needed in (self._archives / "partial", self._folder / "state" / "lists" / "partial"):
            needed.mkdir(parents=True, exist_ok=True)
        status = self._folder / "status"
        status.write_text("\n".join(_stanza(name, architecture) for name in ABSENT), "utf-8")
        settings = {
            "Dir::State": self._folder / "state",
            "Dir::State::status": status,
            "Dir::Cache": self._folder / "cache",
            "Dir::Etc::SourceList": sources,
            "Dir::Etc::SourceParts": "-",
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "",
            "Acquire::Languages": "none",
        }
        self._options = [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]

    def packages(self, names: Sequence[str], *, refreshes: bool) -> list[Package]:
        """Return *names* with all dependencies, downloaded. The answer is kept until *refreshes*."""
        record = self._folder / f"closure-{hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}.json"
        if record.exists() and not refreshes:
            found = [Package(**each) for each in json.loads(record.read_text("utf-8"))]
            if all(Path(each.file).exists() for each in found):
                return found
        if refreshes or not any((self._folder / "state" / "lists").glob("*Packages*")):
            self._run("update", "-qq")
        simulated = self._run("install", "--simulate", *names)
        found = [
            Package(match["name"], match["version"], str(self._archives / _file_name(match)))
            for match in map(_INSTALLED.match, simulated.splitlines())
            if match
        ]
        self._run("install", "--download-only", "--yes", "-qq", *names)
        record.write_text(json.dumps([asdict(each) for each in found], indent=1), "utf-8")
        return found

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            ["apt-get", *self._options, *words], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise ImageError(f"apt-get {' '.join(words)} failed: {done.stderr.strip()}")
        return done.stdout


def _stanza(name: str, architecture: str) -> str:
    provides = "Provides: awk\n" if name == "mawk" else ""
    return _STANZA.format(name=name, architecture=architecture, provides=provides)


def _file_name(match: re.Match[str]) -> str:
    version = match["version"].replace(":", "%3a")
    return f"{match['name']}_{version}_{match['architecture']}.deb"
