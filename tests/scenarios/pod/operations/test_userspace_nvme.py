"""A fabric whose enclosure is reached by NVMe/TCP without the kernel: agents and daemons as processes."""

from __future__ import annotations

import socket
import tomllib
import urllib.request
from collections.abc import Iterator

import pytest
from tests.fabric.membership.nodes import Place, free_ports
from tests.support.pod.admin import MIB, Admin
from tests.support.pod.enclosures import EnclosureProcess
from tests.support.pod.processes import Pod, until
from tests.support.pod.work import SMALL, await_puts, missing, not_found, put_all

import ostraca

pytestmark = pytest.mark.slow


USERSPACE = (
    *("--set", "nvme.initiator=userspace", "--set", "nvme.turn_s=0.2"),
    *("--set", "reopen_backoff_s=0.5", "--set", "nvme.keep_alive_s=2"),
    *("--set", "nvme.io_timeout_s=5", "--set", "owner.late_write_s=15"),
)


@pytest.fixture
def trial(own: Pod) -> Iterator[Pod]:
    """Start a fabric of two agents with the user-space initiator."""
    own.create(enclosures=1, capacity="132MiB")
    for number in range(2):
        own.agent(f"agent-{number}", *USERSPACE)
    own.start()
    yield own
    own.check_logs()


class UserspaceShelf(EnclosureProcess):
    """An enclosure's daemon with the user-space target."""

    def __init__(self, pod: Pod, host: str = "127.0.0.1") -> None:
        self.port, self.http = free_ports(2)
        super().__init__(
            pod,
            "shelf-1",
            *("--drive-size", "66MiB", "--target", "userspace", "--listen", f"tcp://{host}:{self.port}"),
            *("--http", f"{host}:{self.http}"),
        )


@pytest.fixture
def shelf(trial: Pod) -> Iterator[UserspaceShelf]:
    made = UserspaceShelf(trial)
    made.start()
    yield made
    made.kill()
    assert "Traceback" not in made.said


def test_blocks_cross_to_drives_of_another_process_and_outlive_it(trial: Pod, shelf: UserspaceShelf) -> None:
    form = {
        "nqn": "nqn.2025-01.io.ostraca:shelf-1",
        "controllers": [f"tcp://localhost:{shelf.port}"],  # by name, as a headless Service has one
        "segment_bytes": MIB,
    }
    with Admin(trial) as admin:
        onboarded = admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", form))
        assert [step["state"] for step in onboarded["steps"]] == ["done"] * 7
    trial.await_settled()
    assert any(name.startswith("shelf-1/") for name in trial.claims())
    first, second = trial.agents
    with first.connect() as client:
        put_all(client)
    with second.connect() as client:
        assert missing(client) == []

    # The daemon is killed: its drives are away, and come back with it, without a wrong or a lost block.
    shelf.kill()
    until(lambda: not _is_live(trial), "both agents see that the path is lost")
    shelf.start()
    until(lambda: _is_live(trial), "both agents are connected again")
    with second.connect() as client:
        until(lambda: not_found(client) == [], "every chain is found again")
        until(lambda: missing(client) == [], "every chain is got again")
    with first.connect() as client:
        await_puts(client)

    # Both ends say which path this is.
    for agent in trial.agents:
        status = agent.status()
        assert status is not None
        assert [(path.enclosure, path.initiator) for path in status.paths] == [("shelf-1", "userspace")]
    with urllib.request.urlopen(f"http://127.0.0.1:{shelf.http}/metrics", timeout=5) as page:
        assert b'target="userspace"' in page.read()
    shelf.stop()
    assert "All exports have ended." in shelf.said


def test_a_daemon_that_nobody_registers_is_found_and_followed_to_its_new_address(
    trial: Pod, shelf: UserspaceShelf
) -> None:
    with Admin(trial, "admin-0", "--set", "follows_reports=true") as admin:
        until(lambda: any(each.startswith("shelf-1/") for each in trial.claims()), "the enclosure is in use")
        trial.await_settled()
        first, second = trial.agents
        with first.connect() as client:
            put_all(client)

        # The pod of the daemon is replaced: the same drives, another address.
        shelf.kill()
        moved = UserspaceShelf(trial)
        assert moved.port != shelf.port
        moved.start()
        with second.connect() as client:
            until(lambda: not_found(client) == [], "every chain is found again")
            until(lambda: missing(client) == [], "every chain is got again")
        with first.connect() as client:
            await_puts(client)
        registered = admin.ask("GET", "/v1/enclosures/shelf-1").body
        assert registered["spec"]["controllers"] == [f"tcp://127.0.0.1:{moved.port}"]
        assert registered["status"]["phase"] == "ready"
    moved.stop()
    admin.check_log()


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_all_daemons_serve_over_ipv6(own: Pod) -> None:
    host = "[::1]"
    own.create(enclosures=1, capacity="132MiB")
    pages = free_ports(2)
    for number, port in enumerate(pages):
        http = ("--http", f"{host}:{port}")
        own.agent(f"agent-{number}", *USERSPACE, *http, place=Place(host))
    own.start()
    shelf = UserspaceShelf(own, host)
    shelf.start()
    with Admin(own, "admin-0", "--set", "follows_reports=true", host=host) as admin:
        until(lambda: any(each.startswith("shelf-1/") for each in own.claims()), "the enclosure is in use")
        own.await_settled()
        registered = admin.ask("GET", "/v1/enclosures/shelf-1").body
        assert registered["spec"]["controllers"] == [f"tcp://{host}:{shelf.port}"]
        token = tomllib.loads((own.files / "tokens.toml").read_text())["tokens"]["default"][0]
        first, second = own.agents
        with first.connect() as client:
            put_all(client)
        with ostraca.connect(second.reached_at, credentials=token, settings=SMALL) as client:
            assert missing(client) == []
        for port in (shelf.http, *pages):
            with urllib.request.urlopen(f"http://{host}:{port}/readyz", timeout=5) as page:
                assert page.status == 200
        admin.stop()
    for agent in own.agents:
        status = agent.status()
        assert status is not None
        assert any(peer.is_connected for peer in status.peers)
    shelf.stop()
    admin.check_log()
    own.check_logs()


def _is_live(pod: Pod) -> bool:
    statuses = [agent.status() for agent in pod.agents]
    return all(
        status is not None and all(each.is_live for path in status.paths for each in path.paths)
        for status in statuses
    )
