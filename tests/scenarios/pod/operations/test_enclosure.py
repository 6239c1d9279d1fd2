"""An enclosure's daemon as a process, on files, over a real etcd."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.fabric.membership.nodes import free_ports
from tests.support.pod.enclosures import EnclosureProcess
from tests.support.pod.processes import Pod, command, until

from ostraca_dpu_agent.adapters.nvme_of.file_paths import FilePaths
from ostraca_fabric.model.target import Controller, Target, TargetTransport
from ostraca_fabric.ports.paths import Namespace, PathError

pytestmark = pytest.mark.slow

NQN = "nqn.2025-01.io.ostraca:shelf-1"
ALICE, BOB = "nqn.2025-01.io.ostraca:alice", "nqn.2025-01.io.ostraca:bob"


@pytest.fixture
def begun(own: Pod) -> Pod:
    own.create(enclosures=1, drives=1, capacity="17MiB")
    return own


@pytest.fixture
def shelf(begun: Pod) -> Iterator[EnclosureProcess]:
    shelf = EnclosureProcess(begun)
    yield shelf
    shelf.kill()
    assert "Traceback" not in shelf.said


def reports(pod: Pod) -> list[dict[str, Any]]:
    return pod.listed("reports/")


def seen(shelf: EnclosureProcess, host: str, secret: str = "") -> list[Namespace] | str:
    """Return what a host finds that connects; or why it finds nothing."""
    target = Target(NQN, (Controller(TargetTransport.FILES, str(shelf.files)),))
    try:
        return list(asyncio.run(FilePaths(host).connect(target, secret)))
    except PathError as error:
        return error.stage.value


def hosts(path: Path, **secrets: str) -> None:
    tables = (
        f'[hosts."nqn.2025-01.io.ostraca:{host}"]\nsecret = "{each}"\n' for host, each in secrets.items()
    )
    path.write_text("".join(tables))
    path.chmod(0o600)


def test_it_exports_its_drives_reports_them_and_leaves_them_exported_when_it_ends(
    begun: Pod, shelf: EnclosureProcess
) -> None:
    said = shelf.start()
    assert said == f"ready: enclosure shelf-1 exports 2 drives as {NQN} at files://{shelf.files}\n"
    until(lambda: len(reports(begun)) == 1, "it reports")
    (report,) = reports(begun)
    found = seen(shelf, ALICE)
    assert isinstance(found, list)
    assert sorted(each.nguid for each in found) == sorted(each["nguid"] for each in report["drives"])
    assert [(each["name"], each["is_exported"]) for each in report["drives"]] == [
        ("drive-0", True),
        ("drive-1", True),
    ]
    exported = shelf.exports()
    shelf.stop()
    assert reports(begun) == [], "a report is there while its daemon is"
    assert shelf.exports() == exported
    shelf.start()
    assert shelf.exports() == exported, "the next start finds what is exported, and changes nothing"


def test_killed_and_started_again_it_takes_its_own_place_at_once(begun: Pod, shelf: EnclosureProcess) -> None:
    shelf.start()
    until(lambda: len(reports(begun)) == 1, "it reports")
    first, exported = reports(begun)[0]["start"], shelf.exports()
    shelf.kill()
    assert shelf.exports() == exported
    shelf.start()
    until(lambda: [each["start"] for each in reports(begun)] not in ([], [first]), "it reports again")
    assert shelf.exports() == exported


def test_a_state_directory_of_another_fabric_is_refused_by_its_name(shelf: EnclosureProcess) -> None:
    state, other = shelf.folder / "state", "0" * 31 + "1"
    state.mkdir(mode=0o700)
    record = {"version": 1, "daemon": f"enclosure {shelf.name}", "fabric": other}
    (state / "daemon.json").write_text(json.dumps(record))
    shelf.launch()
    assert shelf.ended() != 0
    assert f"{state} belongs to enclosure {shelf.name} in fabric {other}, not in " in shelf.said


def test_exports_go_on_while_etcd_is_away_and_come_back_without_it(
    begun: Pod, shelf: EnclosureProcess
) -> None:
    shelf.start()
    until(lambda: len(reports(begun)) == 1, "it reports")
    begun.etcd.kill()
    try:
        (shelf.files / "drive-1.img").unlink()
        until(lambda: len((shelf.exports() or {})["namespaces"]) == 1, "a drive that has gone is taken back")
        until(lambda: "exports continue" in shelf.said, "it says that etcd is away")
        shelf.kill()
        (shelf.files / "exports.json").unlink()
        assert "exports 1 drive" in shelf.start(), "after a boot, with etcd away"
        assert not (shelf.files / "drive-1.img").exists(), "a recorded drive is not made again"
    finally:
        begun.etcd.start()
    until(
        lambda: [each["nguid"] != "" for r in reports(begun) for each in r["drives"]] == [True, True], "told"
    )


def test_a_first_start_waits_for_etcd(begun: Pod, shelf: EnclosureProcess) -> None:
    begun.etcd.kill()
    try:
        shelf.launch()
        until(lambda: "Cannot join the fabric yet, retrying" in shelf.said, "it says so")
        assert shelf.runs
        assert shelf.exports() is None, "another daemon may be this enclosure"
    finally:
        begun.etcd.start()
    shelf.await_ready()


def test_a_second_daemon_of_its_name_is_refused(begun: Pod, shelf: EnclosureProcess) -> None:
    shelf.start()
    until(lambda: len(reports(begun)) == 1, "it reports")
    elsewhere = begun.folder / "elsewhere"
    second = EnclosureProcess(begun, folder=elsewhere)
    same_drives = EnclosureProcess(begun, "shelf-2", "--files", str(shelf.files))
    same_state = EnclosureProcess(
        begun, "shelf-1", "--state-dir", str(shelf.folder / "state"), folder=elsewhere
    )
    for refused, said in (
        (second, f"enclosure shelf-1 already has a daemon, at files://{shelf.files}: give each"),
        (same_drives, f"another process uses {shelf.files}"),
        (same_state, "another daemon uses"),
    ):
        refused.launch()
        assert refused.ended() == 1
        assert said in refused.said
        assert "Traceback" not in refused.said
        if refused is not same_drives:
            assert refused.exports() is None
    assert shelf.runs
    assert len(reports(begun)) == 1


def test_hosts_are_let_in_with_their_secrets_and_changes_count_at_once(
    begun: Pod, shelf: EnclosureProcess, tmp_path: Path
) -> None:
    file = tmp_path / "hosts.toml"
    hosts(file, alice="first secret")
    shelf.start("--hosts", str(file))
    assert isinstance(seen(shelf, ALICE, "first secret"), list)
    assert seen(shelf, ALICE, "another") == "authenticate"
    assert seen(shelf, BOB, "first secret") == "authenticate"
    hosts(file, bob="second secret")
    shelf.signal(signal.SIGHUP)
    until(lambda: isinstance(seen(shelf, BOB, "second secret"), list), "the other host is let in")
    until(lambda: seen(shelf, ALICE, "first secret") == "authenticate", "the first is let in no more")
    file.write_text("[hosts]\n")
    until(lambda: "the previous content stays in use" in shelf.said, "a file that lists nobody is refused")
    assert isinstance(seen(shelf, BOB, "second secret"), list)
    assert seen(shelf, ALICE, "") == "authenticate"
    assert "second secret" not in shelf.said + str(reports(begun))
    shelf.stop()


def test_it_withdraws_what_it_exports_where_it_is_told_to(shelf: EnclosureProcess) -> None:
    shelf.start("--withdraw")
    assert shelf.exports() is not None
    shelf.stop()
    assert shelf.exports() is None
    assert (shelf.files / "drive-0.img").exists()


def test_its_pages_say_how_it_is(shelf: EnclosureProcess) -> None:
    (port,) = free_ports(1)
    shelf.start("--http", f"127.0.0.1:{port}", "--drive", "drive-1", "--drive", "gone")

    def page(path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return str(answer.read().decode())

    assert page("/healthz") == "ok\n"
    assert '"is_ready":true' in page("/readyz")
    metrics = page("/metrics")
    assert "ostraca_enclosure_exported_drives 1\n" in metrics
    assert 'ostraca_enclosure_condition{condition="drives_found"} 0\n' in metrics
    assert "not named: name the drive with --drive" in page("/status")
    shelf.stop()


def test_what_can_not_work_is_refused_with_what_to_do(begun: Pod, tmp_path: Path) -> None:
    base = ("serve", "enclosure", "--id", "shelf-9", *begun.where, "--state-dir", str(tmp_path / "state"))
    drives = ("--files", str(tmp_path / "drives"))
    open_file = tmp_path / "hosts.toml"
    hosts(open_file, alice="x")
    open_file.chmod(0o644)
    for words, said in (
        ((*drives, "--drives", "1", "--drive-size", "1"), "have 1 bytes: choose a multiple of 4096"),
        ((*drives, "--drives", "2", "--drive-size", "900TiB"), "free: choose a smaller --drive-size"),
        ((*drives, "--hosts", str(open_file)), "is open to other users (mode 644): chmod 600"),
        ((*drives, "--hosts", str(tmp_path / "none")), "a secret can't be read"),
        ((*drives, "--prefix", "/ostraca/nobody/"), "no fabric exists under /ostraca/nobody/"),
        ((*drives, "--fabric", "0" * 32), f"and not {'0' * 32}: check the endpoints"),
    ):
        done = command(*base, *words)
        assert done.returncode in (1, 2), done.stderr
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""
