"""An enclosure on files, for tests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from pathlib import Path

from ostraca_fabric.drives.file_exports import EXPORTS_FILE, FileExports, write_exports
from ostraca_fabric.model.ids import ID_BYTES
from ostraca_fabric.model.target import NQN_PREFIX

DRIVE_BYTES = 64 << 20


class Shelf:
    """An enclosure on files: drives of which nothing was ever written."""

    def __init__(self, directory: Path, name: str, *, drives: int, drive_bytes: int = DRIVE_BYTES) -> None:
        self.directory = directory
        self.name = name
        self.nqn = f"{NQN_PREFIX}{name}"
        self.drives: dict[str, Path] = {}
        self.hosts: Mapping[str, str] = {}
        """By NQN: hosts that are let in, with their secrets; none: every host."""

        self._drive_bytes = drive_bytes
        directory.mkdir(parents=True)
        for _ in range(drives):
            self.plug_in()

    @property
    def controller(self) -> str:
        """Its path, as it is registered."""
        return f"files://{self.directory}"

    def form(self, **more: object) -> dict[str, object]:
        """Return the body that registers it."""
        return {"nqn": self.nqn, "controllers": [self.controller], **more}

    def plug_in(self, content: bytes = b"") -> str:
        """Export one more drive, which begins with *content*; return its NGUID."""
        nguid = secrets.token_hex(ID_BYTES)
        path = self.directory / f"drive-{len(self.drives)}.img"
        with path.open("wb") as file:
            file.truncate(self._drive_bytes)
            file.write(content)
        self.drives[nguid] = path
        self.export()
        return nguid

    def take_out(self, nguid: str) -> None:
        """Export a drive no more."""
        del self.drives[nguid]
        self.export()

    def export(self) -> None:
        """Export what ``drives`` and ``hosts`` say."""
        write_exports(self.directory, FileExports(self.nqn, self.drives, self.hosts))

    def leave(self) -> None:
        """Answer no more, until ``export``."""
        (self.directory / EXPORTS_FILE).unlink()
