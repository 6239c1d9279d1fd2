"""Secrets that are looked for wherever a fabric shows or keeps anything."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psutil

from ostraca_fabric.model.extent import PAGE_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping

_PEM_LINE = re.compile(rb"^[A-Za-z0-9+/=]{64}$", re.MULTILINE)


@dataclass
class Sought:
    """Secrets by what they are, and everything in which they must not be."""

    secrets: dict[str, bytes] = field(default_factory=dict)
    shown: dict[str, bytes] = field(default_factory=dict)
    """By where it was shown or is kept."""

    def add_pem(self, path: Path) -> None:
        """Seek a private key, by a whole line of it."""
        line = _PEM_LINE.search(path.read_bytes())
        assert line is not None
        self.secrets[path.name] = line.group()

    def look_at(self, where: str, text: str | bytes) -> None:
        self.shown[where] = text if isinstance(text, bytes) else text.encode()

    def look_below(self, folder: Path, *, but: Mapping[Path, str]) -> None:
        """Look at every file below a folder *but* those that are there to hold a secret.

        That they do is seen to, so that what is sought is what is used.
        """
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            if path in but:
                assert self.secrets[but[path]] in path.read_bytes(), path
            else:
                self.look_at(str(path), _written(path))

    def look_at_process(self, process: int) -> None:
        """Look at what ``ps`` shows of it and of its children."""
        for each in (root := psutil.Process(process), *root.children(recursive=True)):
            self.look_at(f"arguments of {each.pid}", "\n".join(each.cmdline()))
            self.look_at(f"environment of {each.pid}", str(each.environ()))

    def found(self) -> list[str]:
        """Return what was found where, in whichever form it is written."""
        return [
            f"{secret} in {where}"
            for secret, content in self.secrets.items()
            for form in _forms(content)
            for where, shown in self.shown.items()
            if form in shown
        ]


def _written(path: Path) -> bytes:
    """Return what was written to a file: all but empty pages, of which drives and etcd's logs are full."""
    content = np.fromfile(path, np.uint8)
    pages = np.pad(content, (0, -len(content) % PAGE_BYTES)).reshape(-1, PAGE_BYTES)
    return pages[pages.any(axis=1)].tobytes()


def _forms(secret: bytes) -> set[bytes]:
    """Return how a secret may be written.

    As it is, as Python shows bytes, in hexadecimal, and in base64 of either kind; there without its
    ends, as it may be a part of what was encoded.
    """
    parts = [bytes(before) + secret for before in range(3)]
    encoded = {
        encode(part)[4:-4] for part in parts for encode in (base64.b64encode, base64.urlsafe_b64encode)
    }
    return {
        secret,
        repr(secret)[2:-1].encode(),
        secret.hex().encode(),
        secret.hex().upper().encode(),
        *encoded,
    }
