"""Where things lie, what lies there, and the page that says so."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import pytest
from tests.fabric.membership import sample_fabric as sample

from ostraca_fabric.errors import MembershipError, WrongStoreError
from ostraca_fabric.membership.etcd.schema import records
from ostraca_fabric.membership.etcd.schema.keys import PREFIX_DEFAULT, EtcdKeys, RecordKind
from ostraca_fabric.membership.etcd.store import check_none_below
from ostraca_fabric.membership.rules import GRANTS_LOST
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import FabricId

PAGE = Path(__file__).parents[4] / "docs/reference/formats/etcd-keys.md"


def test_the_reference_page_shows_a_fabric_as_it_lies_in_etcd() -> None:
    listed, *_ = re.findall(r"```\n(.*?)\n```", PAGE.read_text().partition("etcdctl get")[2], re.DOTALL)
    assert listed.splitlines() == sample.shown()
    assert f"`{PREFIX_DEFAULT}`" in PAGE.read_text()


def test_the_reference_page_says_of_each_key_what_the_code_says() -> None:
    """A row each: the key below the prefix with its names in angle brackets, and the docstring."""
    rows = dict(re.findall(r"^\| `([^`]+)` \| (.*?) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {
        "meta": _doc("meta"),
        "agents/<agent>": _doc("agent"),
        "enclosures/<enclosure>": _doc("enclosure"),
        "placement": _doc("placement"),
        "placements/<epoch>": _doc("earlier_placement"),
        "claims/<shard>": _doc("claim"),
        "grants/<shard>": _doc("grants"),
        "volumes/<tenant>/<name>": _doc("volume"),
        "reports/<enclosure>": _doc_of(record_keys.report),
        "specs/<enclosure>": _doc_of(record_keys.spec),
        "statuses/<enclosure>": _doc_of(record_keys.status),
        "operations/<operation>": _doc_of(record_keys.operation),
        "work/<operation>": _doc_of(record_keys.work),
        "nguids/<nguid>": _doc_of(record_keys.nguid),
        "retired/<enclosure>": _doc_of(record_keys.retired),
        "audit/<entry>": _doc_of(record_keys.audit),
        "tenants/<tenant>": _doc_of(record_keys.tenant),
        "switches/<tenant>/<volume>": _doc_of(record_keys.switch),
        "live": _doc_of(record_keys.live),
        "ruled": _doc("overrides_marker"),
        "rebuild": _doc("rebuild"),
    }
    assert {row.partition("/")[0] for row in rows} == {kind.value for kind in RecordKind}


def _doc(function: str) -> str:
    return _doc_of(getattr(EtcdKeys, function))


def _doc_of(function: object) -> str:
    return " ".join((inspect.getdoc(function) or "").split())


def test_every_key_lies_under_the_prefix_and_is_known_by_its_kind() -> None:
    keys = EtcdKeys("/a/b")
    kinds = [keys.kind(key) for key, _ in sample.lines(keys)]
    assert set(kinds) == set(RecordKind) - {RecordKind.REBUILD}, "a fabric that is there has all but one"
    assert keys.kind(keys.rebuild()) is RecordKind.REBUILD
    assert all(key.startswith(b"/a/b/") for key, _ in sample.lines(keys))
    assert keys.kind(b"/a/b/later/thing") is None
    assert EtcdKeys("/a/b/").prefix == keys.prefix


def test_a_key_of_a_fabric_further_down_is_of_no_kind() -> None:
    keys, lower = EtcdKeys("/a"), EtcdKeys("/a/b")
    assert {keys.kind(key) for key, _ in sample.lines(lower)} == {None}
    of_live = {keys.kind(key) for key, _ in sample.lines(EtcdKeys("/a/live"))}
    assert of_live == {None}, "a name that is a kind of key, which has another number of words"
    assert [above.text for above in EtcdKeys("/a/b/c").above()] == ["/a/", "/a/b/"]
    assert keys.above() == []
    told = {key: below for key, _ in sample.lines(lower) if (below := keys.below(key)) is not None}
    assert told == {lower.meta(): "/a/b/"}
    assert keys.below(lower.rebuild()) == "/a/b/"
    assert keys.below(keys.meta()) is None


def test_a_volume_that_is_called_as_a_fabric_s_record_is_none() -> None:
    keys = EtcdKeys("/a")
    volume = keys.volume(sample.VOLUME.tenant, "meta")
    check_none_below({volume: records.encode_volume(sample.VOLUME)}, keys)
    with pytest.raises(WrongStoreError, match="another fabric lies under /a/volumes/acme/, below /a/"):
        check_none_below({volume: records.encode_meta(sample.FABRIC)}, keys)


def test_records_come_back_as_they_were() -> None:
    assert records.decode_meta(records.encode_meta(sample.FABRIC)) == sample.FABRIC
    assert records.decode_agent(records.encode_agent(sample.AGENT)) == sample.AGENT
    assert records.decode_enclosure(records.encode_enclosure(sample.ENCLOSURE)) == sample.ENCLOSURE
    assert records.decode_placement(records.encode_placement(sample.EPOCH)) == sample.EPOCH
    assert (
        records.decode_earlier_placement(records.encode_earlier_placement(sample.EARLIER)) == sample.EARLIER
    )
    assert records.decode_claim(records.encode_claim(sample.SHARD, sample.CLAIM)) == (
        sample.SHARD,
        sample.CLAIM,
    )
    assert records.decode_grants(records.encode_grants(sample.GRANTS)) == sample.GRANTS
    assert records.decode_report(records.encode_report(sample.REPORT)) == sample.REPORT
    assert records.decode_volume(records.encode_volume(sample.VOLUME)) == sample.VOLUME
    rebuild = records.encode_rebuild(sample.FABRIC, sample.NOW)
    assert records.decode_rebuild(rebuild) == (sample.FABRIC, sample.NOW)


def test_every_record_says_its_version_and_ignores_what_a_later_release_added() -> None:
    for value in (
        *dict(sample.lines(EtcdKeys())).values(),
        records.encode_rebuild(sample.FABRIC, sample.NOW),
    ):
        assert json.loads(value)["version"] == records.VERSION
    meta = {**json.loads(records.encode_meta(sample.FABRIC)), "added": "later"}
    assert records.decode_meta(json.dumps(meta).encode()) == sample.FABRIC


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "can't be read"),
        (b"not json", "can't be read"),
        (b"{}", "can't be read"),
        (b'{"version":1}', "can't be read"),
        (b'{"version":1,"fabric":"0011"}', "ids have 16"),
        (b'{"version":2,"something":"else"}', "start a release"),
    ],
)
def test_a_record_that_can_not_be_read_says_why(data: bytes, says: str) -> None:
    with pytest.raises(MembershipError, match=says):
        records.decode_meta(data)


def test_a_grant_of_a_whole_shard_is_refused_by_who_would_take_it_for_one_of_nothing() -> None:
    lost = records.encode_grants(GRANTS_LOST)
    assert records.decode_grants(lost) == GRANTS_LOST
    assert json.loads(lost)["version"] == records.GRANTS_VERSION > records.VERSION
    assert len(lost) < 200, "however many segments the shard has"


def test_a_layout_with_more_than_is_known_here_is_not_taken_for_another() -> None:
    """A release that adds a field to layouts gives their blocks other tags."""
    volume = json.loads(records.encode_volume(sample.VOLUME))
    volume["layout_digest"] = "00" * 16
    with pytest.raises(MembershipError, match="start a release"):
        records.decode_volume(json.dumps(volume).encode())


def test_a_fabric_id_is_written_as_people_write_it() -> None:
    meta = records.encode_meta(FabricId(b"\xab" * 16), "c0de")
    assert json.loads(meta) == {"version": 1, "fabric": "ab" * 16, "key_check": "c0de"}
    assert records.decode_key_check(meta) == "c0de"
    assert records.decode_key_check(records.encode_meta(sample.FABRIC)) == "", "it was not said"


def test_a_fabric_s_record_says_of_a_rebuild_only_where_there_was_one() -> None:
    rebuilt = records.encode_meta(sample.FABRIC, "c0de", rebuilt_unix_s=1767225600.5)
    assert json.loads(rebuilt)["rebuilt_unix_s"] == records.decode_rebuilt(rebuilt) == 1767225600.5
    assert records.decode_rebuilt(records.encode_meta(sample.FABRIC, "c0de")) == 0.0
