"""Connectors' link to the fabric, with a client that opens nothing."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

import ostraca
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca_fabric.model.volume import Layout

FIRST = Layout(model="test/first", dtype="bf16", page_tokens=16)
SECOND = replace(FIRST, model="test/second")


class HeldClient:
    """Client whose first opening of a volume waits for ``go_on``; a volume is its layout."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.go_on = threading.Event()

    def volume(self, _name: str, layout: Layout, **_: object) -> object:
        self.asked.set()
        assert self.go_on.wait(5.0)
        return layout

    def close(self) -> None:
        self.go_on.set()


def test_a_layout_switched_to_during_an_attempt_is_opened_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    client = HeldClient()
    monkeypatch.setattr(ostraca, "connect", lambda *_, **__: client)
    link = FabricLink(ConnectorSettings(connect_retry_s=60.0), block_bytes=4096, layout=FIRST)
    try:
        assert client.asked.wait(5.0)
        link.switch_layout(SECOND)
        client.go_on.set()
        until_s = time.monotonic() + 5.0
        while link.volume() is None and time.monotonic() < until_s:
            time.sleep(0.01)
        opened: object = link.volume()
        assert opened == SECOND
    finally:
        link.close()
