"""Transports of an agent's process, with one unavailable here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ostraca_cli.composition.transports import create_transports
from ostraca_fabric.errors import TransportError
from ostraca_fabric.nixl import runtime


def test_an_agent_goes_on_without_a_nixl_that_does_not_load_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package = f"nixl_of_{tmp_path.name}"
    (tmp_path / package).mkdir()
    (tmp_path / package / "_api.py").write_text("raise OSError('libcudart.so.99: cannot open')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(runtime, "PACKAGES", (package,))
    assert list(create_transports(("nixl", "inline"))) == ["inline"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "NIXL is unavailable; blocks use the slower inline transport: "
        f"{package} can't be loaded: OSError: libcudart.so.99: cannot open"
    )
    with pytest.raises(TransportError, match="libcudart"):
        create_transports(("nixl",))


def test_a_nixl_that_is_not_installed_is_no_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "PACKAGES", ("no_nixl",))
    with caplog.at_level(logging.INFO):
        assert list(create_transports(("nixl", "inline"))) == ["inline"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
