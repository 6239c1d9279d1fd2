"""What may be set of an enclosure's daemon, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ostraca_cli.commands.serve.enclosure.command import ENCLOSURE_PREFIX
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_cli.program import main
from ostraca_cli.settings import Sources, load
from ostraca_cli.settings.fields import group_of
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.target import Target, parse_controller


def test_each_setting_is_documented() -> None:
    assert all(setting.doc for setting in group_of(EnclosureDaemonSettings).all_settings())


def test_a_target_is_what_agents_connect_to() -> None:
    settings = EnclosureDaemonSettings(id="shelf-1", listen=("rdma://10.0.8.1", "tcp://[FD00:0::1]:4421"))
    assert settings.export_target() == Target(
        "nqn.2025-01.io.ostraca:shelf-1",
        (parse_controller("rdma://10.0.8.1:4420"), parse_controller("tcp://[fd00::1]:4421")),
    )
    assert settings.directory() is None


@pytest.mark.parametrize(
    "given", [{"files": "/srv/shelf"}, {"listen": ("files:///srv/shelf",)}, {"files": "/srv/shelf/"}]
)
def test_drives_that_are_files_are_reached_where_they_lie(given: dict[str, Any]) -> None:
    settings = EnclosureDaemonSettings(id="shelf-1", **given)
    assert settings.export_target().controllers == (parse_controller("files:///srv/shelf"),)
    assert settings.directory() == Path("/srv/shelf")


def test_files_can_be_exported_over_nvmeof() -> None:
    settings = EnclosureDaemonSettings(id="shelf-1", files="/srv/shelf", listen=("tcp://10.0.8.1",))
    assert not settings.export_target().is_files
    assert settings.directory() == Path("/srv/shelf")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the enclosure has no address"),
        ({"listen": ("tcp://shelf-1:4420",)}, "the kernel needs an address"),
        ({"listen": ("tcp://0.0.0.0:4420",)}, "give each reachable address"),
        ({"listen": ("rdma://[::]:4420",)}, "give each reachable address"),
        ({"listen": ("udp://10.0.8.1:4420",)}, "is no controller"),
        ({"listen": ("tcp://10.0.8.1", "tcp://10.0.8.1:4420")}, "named twice"),
        ({"listen": ("tcp://10.0.8.1", "files:///srv/shelf")}, "not both"),
        ({"listen": ("files:///a", "files:///b")}, "give --listen files:// once"),
        ({"listen": ("files:///a",), "files": "/b"}, "omit one of the two"),
        ({"listen": ("tcp://10.0.8.1",), "nqn": "shelf"}, "is no NVMe qualified name"),
        ({"target": "spdk"}, "set it to nvmet or userspace"),
        ({"target": "userspace", "files": "/a"}, "speaks TCP alone"),
        ({"target": "userspace", "files": "/a", "listen": ("rdma://10.0.8.1",)}, "speaks TCP alone"),
        ({"target": "userspace", "listen": ("tcp://10.0.8.1",)}, "exports files alone"),
        ({"target": "userspace", "files": "/a", "listen": ("tcp://[::]",)}, "give each reachable address"),
        (
            {"target": "userspace", "files": "/a", "listen": ("tcp://a",), "reservations": True},
            "has no reservations",
        ),
    ],
)
def test_what_nobody_could_connect_to_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        EnclosureDaemonSettings(**({"id": "shelf-1"} | given)).export_target()


def test_the_user_space_target_may_have_a_name_for_its_address() -> None:
    settings = EnclosureDaemonSettings(
        id="shelf-1", target="userspace", files="/srv/shelf", listen=("tcp://shelf-1.enclosures:4420",)
    )
    assert settings.export_target().controllers == (parse_controller("tcp://shelf-1.enclosures:4420"),)


def test_options_environment_and_flags_say_the_same(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OSTRACA_ENCLOSURE_FIT_USED_PERCENT_MAX", "50")
    given = ["--drive", "nvme0n1", "--drive", "SN7", "--force", "--drives", "3", "--drive-size", "2GiB"]
    assert main(["serve", "enclosure", *given, "--set", "turn_s=1", "--print-settings"]) == 0
    shown = capsys.readouterr().out
    for line in ('drives = ["nvme0n1", "SN7"]', "force = true", "file_drives = 3", "turn_s = 1.0"):
        assert f"\n{line}\n" in shown
    assert '\nfile_drive_bytes = "2GiB"\n' in shown
    assert "\nused_percent_max = 50\n" in shown
    loaded = load(EnclosureDaemonSettings, Sources(flags=("withdraw=true",)), prefix=ENCLOSURE_PREFIX)
    assert loaded.settings.withdraw


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the enclosure has no address"),
        (["--files", "/srv/shelf"], "the address of etcd is missing: give --etcd HOST:PORT"),
        (["--id", "Shelf 1", "--files", "/srv/shelf"], "is not a usable name"),
        (["--fabric", "12"], "fabric is '12': give 32 hex digits"),
        (["--drives", "-1"], "write a whole number of 0 or more"),
        (["--drive-size", "much"], "file_drive_bytes"),
        (["--set", "turn_s=0"], "turn_s is 0.0: make it more than 0"),
        (["--set", "fit.used_percent_max=101"], "used_percent_max is 1 to 100"),
        (["--set", "turns=1"], "there is no setting turns"),
    ],
)
def test_bad_usage_says_what_to_write(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "enclosure", *argv]) == 2
    assert said in capsys.readouterr().err


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "enclosure", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "$ ostraca serve enclosure --id shelf-1 --listen rdma://10.0.8.1:4420" in shown
