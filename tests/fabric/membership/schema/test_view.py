"""What becomes of overrides that are written, deleted, or can't be read."""

from __future__ import annotations

import pytest
from tests.fabric.membership import sample_fabric as sample

from ostraca_fabric.membership.etcd.client.watch_events import DeletedEntry, Entry, EntryChanges, EntryList
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.view import View
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.overrides import OVERRIDES_MARKER, VERSION, Switch, VolumeOverride, encode

KEYS = EtcdKeys()
SWITCH = KEYS.record("switches/acme/v")
OFF = encode(VolumeOverride(VERSION, "acme", "v", Switch.OFF))


def entry(key: bytes, value: bytes, revision: int) -> Entry:
    return Entry(key, value, created=1, modified=revision, lease=0)


@pytest.fixture
def view() -> View:
    view = View(sample.FABRIC, KEYS)
    listed = [
        (KEYS.meta(), dict(sample.lines(KEYS))[KEYS.meta()]),
        (SWITCH, OFF),
        (KEYS.overrides_marker(), OVERRIDES_MARKER),
    ]
    view.take(EntryList(tuple(entry(key, value, 3) for key, value in listed), 3))
    assert view.overrides.switches.get((TenantId("acme"), "v"), Switch.ON) is Switch.OFF
    assert view.overrides.revision == 3
    return view


def test_a_switch_that_can_not_be_read_any_more_stays_as_it_was(view: View) -> None:
    view.take(EntryChanges((entry(SWITCH, b'{"version":99}', 4),), 4))
    assert view.overrides.switches.get((TenantId("acme"), "v"), Switch.ON) is Switch.OFF
    assert "start a release" in view.unreadable[SWITCH]


def test_a_switch_that_is_deleted_is_on(view: View) -> None:
    view.take(EntryChanges((DeletedEntry(SWITCH, 4), entry(KEYS.overrides_marker(), OVERRIDES_MARKER, 4)), 4))
    assert view.overrides.switches.get((TenantId("acme"), "v"), Switch.ON) is Switch.ON
    assert view.overrides.revision == 4
