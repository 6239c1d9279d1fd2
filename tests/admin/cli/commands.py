"""``ostraca`` run against an admin service, in this process and in one of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.admin.service import TOKENS, AdminService

from ostraca_cli import main
from ostraca_fabric.sockets.default_paths import ADMIN_TOKEN_VARIABLE, ADMIN_URL_VARIABLE


@dataclass(frozen=True)
class Ran:
    """What a command came to."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Its one line."""
        return json.loads(self.out)

    @property
    def lines(self) -> list[Any]:
        """Its lines, each of JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


class Commands:
    """Runs commands for an admin, or for who ``becomes`` another."""

    def __init__(
        self, service: AdminService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv(ADMIN_URL_VARIABLE, service.url)
        self._monkeypatch = monkeypatch
        self._capsys = capsys
        self.become("admin")

    def become(self, role: str) -> None:
        """Show the token of another role from now on."""
        self._monkeypatch.setenv(ADMIN_TOKEN_VARIABLE, TOKENS[role])

    def __call__(self, *argv: str) -> Ran:
        self._capsys.readouterr()
        code = main(argv)
        out, err = self._capsys.readouterr()
        return Ran(code, out, err)


@contextmanager
def started(service: AdminService, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a process of its own, which is killed in the end."""
    environment = {**os.environ, ADMIN_URL_VARIABLE: service.url, ADMIN_TOKEN_VARIABLE: service.token}
    with subprocess.Popen(
        [sys.executable, "-m", "ostraca_cli", *argv],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        try:
            yield process
        finally:
            process.kill()
