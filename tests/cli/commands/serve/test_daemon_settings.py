"""What may be set of an agent's process, and what is refused before anything starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from ostraca_cli.command import add_options
from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import DaemonSettings, TlsPlace
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_cli.composition.etcd_options import ETCD_OPTIONS, EtcdPlace, etcd_options, etcd_settings
from ostraca_cli.program import main
from ostraca_cli.settings import SettingsError, Sources, as_toml, load
from ostraca_cli.settings.fields import group_of
from ostraca_cli.settings.load import AGENT_PREFIX
from ostraca_dpu_agent.settings import AgentSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import FabricId

CERTIFIED = TlsPlace(cert="c", key="k", ca="a")


def test_a_daemon_takes_all_settings_of_an_agent_and_each_is_documented() -> None:
    of_daemon = {setting.name: setting for setting in group_of(DaemonSettings).all_settings()}
    for setting in group_of(AgentSettings).all_settings():
        assert of_daemon[setting.name] == setting
        assert of_daemon[setting.name].doc == setting.doc
    assert all(setting.doc for setting in of_daemon.values())


def test_options_win_over_environment_and_flags_and_the_outcome_can_be_read_back(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRACA_AGENT_ETCD_ENDPOINTS", "a:1,b:2")
    monkeypatch.setenv("OSTRACA_AGENT_ID", "from-environment")
    given = ["--id", "host-7", "--listen", "tcp://h:1", "--listen", "unix:///s", "--set", "owner.hold_s=20"]
    assert main(["serve", "agent", *given, "--print-settings"]) == 0
    shown = capsys.readouterr().out
    assert "# From --id; the default is" in shown
    sources = Sources(None, {"OSTRACA_AGENT_ID": "x"}, ("id=y",), (("--id", "id", "host-7"),))
    loaded = load(DaemonSettings, sources, prefix=AGENT_PREFIX)
    assert (loaded.settings.id, loaded.origins["id"]) == ("host-7", "--id")
    assert as_toml(loaded.settings, loaded.origins).count('id = "host-7"') == 1
    assert 'endpoints = ["a:1", "b:2"]' in shown
    assert 'listen = ["tcp://h:1", "unix:///s"]' in shown


@pytest.mark.parametrize(
    ("settings", "reached_at"),
    [
        (DaemonSettings(listen=("unix:///a.sock", "tcp://h:7400")), ("tcp://h:7400",)),
        (DaemonSettings(listen=("tcp://0.0.0.0:7400",), advertise=("tcp://h:7400",)), ("tcp://h:7400",)),
        (DaemonSettings(listen=("tls://h:7400",), tls=CERTIFIED), ("tls://h:7400",)),
    ],
)
def test_others_are_told_where_they_reach_it(settings: DaemonSettings, reached_at: tuple[str, ...]) -> None:
    assert settings.reached_at() == reached_at


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (DaemonSettings(), "other agents cannot reach this agent"),
        (DaemonSettings(advertise=("tcp://h:1",)), "other agents cannot reach this agent"),
        (
            DaemonSettings(listen=("tcp://0.0.0.0:7400",)),
            "cannot reach tcp://0.0.0.0:7400: advertise",
        ),
        (DaemonSettings(listen=("tcp://[::]:7400",)), "advertise a reachable address"),
        (DaemonSettings(listen=("tcp://h:0",)), "cannot reach tcp://h:0"),
        (DaemonSettings(listen=("tcp://h:1",), advertise=("unix:///a",)), "cannot reach unix:///a"),
        (DaemonSettings(listen=("tls://h:1",)), "needs a certificate"),
    ],
)
def test_addresses_that_others_cannot_reach_are_refused(settings: DaemonSettings, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        settings.reached_at()


def test_a_fabric_is_named_by_its_hex_digits() -> None:
    assert DaemonSettings(fabric="ab" * 16).wanted_fabric() == FabricId(b"\xab" * 16)
    assert DaemonSettings().wanted_fabric() is None
    with pytest.raises(UsageError, match="give 32 hex digits"):
        DaemonSettings(fabric="a pod")


def test_an_agent_is_called_as_its_machine_is_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Host-7.pod.example")
    assert DaemonSettings().agent_id() == "host-7"
    assert DaemonSettings(id="other").agent_id() == "other"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"cert": "c", "ca": "a"}, "etcd.cert and etcd.key go together"),
        ({"key": "k", "ca": "a"}, "etcd.cert and etcd.key go together"),
        ({"cert": "c", "key": "k"}, "give etcd.ca as well"),
        ({"user": "u"}, "etcd.user and etcd.password_file go together"),
    ],
)
def test_halves_of_what_etcd_is_shown_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EtcdPlace(**given)


def test_members_of_etcd_may_be_named_with_commas_between() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, *ETCD_OPTIONS)
    given = etcd_options(parser.parse_args(["--etcd", "a:1, b:2,", "--etcd", "[::1]:3"]))
    assert ("--etcd", "endpoints", ["a:1", "b:2", "[::1]:3"]) in given


@pytest.mark.parametrize("endpoint", ["a:1,b:1", "a:1 b:1", " a:1", ""])
def test_several_members_of_etcd_in_one_text_of_a_settings_file_are_refused(endpoint: str) -> None:
    with pytest.raises(
        UsageError, match=f"'{endpoint}' is not an endpoint of etcd: give each member by itself"
    ):
        etcd_settings(EtcdPlace(endpoints=(endpoint,)))


def test_how_to_reach_etcd_can_be_copied_as_options_for_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = EtcdPlace(endpoints=("a:1", "b:2"), ca="my ca", user="u", password_file="/p")
    assert place.options() == (
        f"--etcd a:1 --etcd b:2 --prefix /ostraca/default/ --etcd-ca '{tmp_path}/my ca' --etcd-user u "
        "--etcd-password /p"
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ("owner.late_write_s=1",),
            "owner: late_write_s is 1.0 and pause_max_s 60.0: set late_write_s above",
        ),
        (("owner.pause_max_s=600",), "owner: late_write_s is 120.0 and pause_max_s 600.0: set late_write_s"),
        (("owner.grant_s=600",), "owner.grant_s is 600.0, above etcd.lease_ttl_s 5.0: lower"),
        (("etcd.lease_ttl_s=3",), "owner.grant_s is 5.0, above etcd.lease_ttl_s 3.0: lower"),
        (("etcd.lease_ttl_s=0.1",), "etcd: lease_ttl_s is 0.1: make it 1 to 300 seconds"),
        (("etcd.lease_ttl_s=100000",), "etcd: lease_ttl_s is 100000.0: make it 1 to 300 seconds"),
        (
            ("etcd.lease_ttl_s=2.5", "owner.grant_s=2.5"),
            "etcd: lease_ttl_s is 2.5: etcd counts whole seconds",
        ),
        (("flow.requests_max=0",), "flow: requests_max is 0: make it 1 or more"),
        (("flow.deadline_max_s=0",), "flow: deadline_max_s is 0.0: set it above answer_margin_s"),
        (("connections.send_buffer_bytes=2GiB",), "connections: send_buffer_bytes is 2147483648 and"),
        (("connections.keepalive_s=1d",), "connections: send_buffer_bytes is 1048576 and keepalive_s 86400"),
        (("events_max=1000000000000000000",), "events_max is 1000000000000000000: keep 1 to 1073741824"),
        (("flow.write_behind_s=16",), "flow.write_behind_s is 16.0: keep it at half of owner.hold_s (30.0)"),
        (("turn_s=0",), "turn_s is 0.0: set it to 0.01 or more"),
        (("owner.hold_s=nan",), "--set: owner.hold_s: the value 'nan' is invalid"),
        (("owner.hold_s=1e999",), "--set: owner.hold_s: the value '1e999' is invalid"),
        (("turn_s=-1",), "--set: turn_s: the value '-1' is invalid"),
        (("http_listen=foo",), "'foo' is no address for HTTP: write host:port"),
        (("http_listen=0.0.0.0:99999",), "'0.0.0.0:99999' is no address for HTTP: write host:port"),
    ],
)
def test_what_would_make_an_agent_useless_or_unsafe_is_refused(given: tuple[str, ...], said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(DaemonSettings, Sources(flags=given), prefix=AGENT_PREFIX)
    (problem,) = caught.value.problems
    assert problem.startswith(said)


OFF_OR_NONE = {
    *("memory.reserve_bytes", "memory.cache_bytes", "memory.cache_protected_share"),
    *("flow.exists_within_s", "flow.answer_margin_s", "flow.write_behind_s"),
    "flow.waiting_puts_max",
    *("owner.group_commit_s", "owner.recovery_wait_s", "owner.opening_wait_s", "owner.reinsertion_share"),
    *("owner.endurance.rated_dwpd", "owner.endurance.first_touch_reserve", "owner.endurance.retry_s"),
    *("owner.scrub.bytes_s", "owner.scrub.idle_s"),
    *("connections.refusing_max", "connections.close_s", "connections.drain_s", "drain_s"),
    *("health.clean_s", "http.fresh_s"),
    *("fit.size_bytes_min", "fit.dwpd_min", "fit.media_errors_max", "file_drives"),
}
"""Where 0 means that there is none of it, or that nothing is waited for."""


@pytest.mark.parametrize("cls", [DaemonSettings, AdminSettings, EnclosureDaemonSettings])
def test_zero_is_refused_by_every_setting_that_it_makes_no_sense_for(cls: type) -> None:
    taken = set()
    for setting in group_of(cls).all_settings():
        if setting.type in (int, float):
            try:
                load(cls, Sources(flags=[f"{setting.name}=0"]), prefix="X_")
            except SettingsError:
                continue
            taken.add(setting.name)
    assert taken <= OFF_OR_NONE


def test_times_may_be_short_as_long_as_they_fit_each_other() -> None:
    given = ("owner.late_write_s=2", "owner.pause_max_s=1", "owner.grant_s=2", "etcd.lease_ttl_s=2")
    assert load(DaemonSettings, Sources(flags=given), prefix=AGENT_PREFIX).settings.owner.late_write_s == 2.0
