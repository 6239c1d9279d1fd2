"""What becomes of rulings that are written, deleted, or can't be read."""

from __future__ import annotations

import pytest
from tests.etcd import sample_fabric as sample

from ostraca_fabric.adapters.etcd.keys import Keys
from ostraca_fabric.adapters.etcd.told import Changed, Deleted, Entry, Listed
from ostraca_fabric.adapters.etcd.view import View
from ostraca_fabric.ids import TenantId
from ostraca_fabric.rulings import RULED, VERSION, Switch, VolumeRuling, encode

KEYS = Keys()
SWITCH = KEYS.record("switches/acme/v")
OFF = encode(VolumeRuling(VERSION, "acme", "v", Switch.OFF))


def entry(key: bytes, value: bytes, revision: int) -> Entry:
    return Entry(key, value, created=1, modified=revision, lease=0)


@pytest.fixture
def view() -> View:
    view = View(sample.FABRIC, KEYS)
    listed = [(KEYS.meta(), dict(sample.lines(KEYS))[KEYS.meta()]), (SWITCH, OFF), (KEYS.ruled(), RULED)]
    view.take(Listed(tuple(entry(key, value, 3) for key, value in listed), 3))
    assert view.rulings.switch(TenantId("acme"), "v") is Switch.OFF
    assert view.rulings.revision == 3
    return view


def test_a_switch_that_can_not_be_read_any_more_stays_as_it_was(view: View) -> None:
    view.take(Changed((entry(SWITCH, b'{"version":99}', 4),), 4))
    assert view.rulings.switch(TenantId("acme"), "v") is Switch.OFF
    assert "start a release" in view.unreadable[SWITCH]


def test_a_switch_that_is_deleted_is_on(view: View) -> None:
    view.take(Changed((Deleted(SWITCH, 4), entry(KEYS.ruled(), RULED, 4)), 4))
    assert view.rulings.switch(TenantId("acme"), "v") is Switch.ON
    assert view.rulings.revision == 4
