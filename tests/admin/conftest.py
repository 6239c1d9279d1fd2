"""The admin service is an extra of its own: where it is not installed, it is not tested."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore_glob = (
    [] if all(map(find_spec, ("fastapi", "rich", "uvicorn"))) else ["test_*.py", "*/test_*.py"]
)

if not collect_ignore_glob:
    from tests.admin.cli.commands import Commands
    from tests.admin.service import AdminService


@pytest.fixture
def service(tmp_path: Path) -> Iterator[AdminService]:
    with AdminService(tmp_path) as service:
        yield service


@pytest.fixture
def ostraca(
    service: AdminService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Commands:
    return Commands(service, monkeypatch, capsys)
