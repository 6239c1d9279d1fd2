"""An enclosure's life over REST: onboarded, drained, repaired and retired under load, by admins that die."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

import pytest
from tests.support.pod.admin import MIB, Admin, Shelf
from tests.support.pod.enclosures import EnclosureProcess
from tests.support.pod.processes import Pod, until
from tests.support.pod.work import missing, put, put_all

import ostraca
from ostraca_fabric.drives.file_exports import FileExports, write_exports
from ostraca_fabric.errors import OstracaError

pytestmark = pytest.mark.slow


@pytest.fixture
def busy(own: Pod) -> Iterator[Pod]:
    """Start a fabric of two agents and one enclosure, with an admin's files."""
    own.create(enclosures=1, capacity="132MiB")
    for number in range(2):
        own.agent(
            f"agent-{number}",
            "--set",
            "nvme.turn_s=0.2",
            "--set",
            "reopen_backoff_s=0.5",
            "--set",
            "nvme.reservations=true",
        )
    own.start()
    yield own
    own.check_logs()


class Load:
    """A worker that puts chains all the time, and gets each again at the other agent at once.

    That agent may hear of a change of the map a moment later.
    """

    def __init__(self, pod: Pod) -> None:
        self.may_lose = False
        """Blocks are being thrown away on purpose."""

        self.chains = 0
        self._pod = pod
        self._stop = threading.Event()
        self._worker = threading.Thread(target=self._work)
        self._trouble = ""

    def _work(self) -> None:
        try:
            with (
                self._pod.connect(self._pod.agents[0]) as writer,
                self._pod.connect(self._pod.agents[1]) as reader,
            ):
                for chain in itertools.count(10_000):
                    if self._stop.is_set():
                        return
                    if put(writer, [chain]):
                        until(lambda chain=chain: self._is_there(reader, chain), f"{chain}", within_s=5.0)  # type: ignore[misc]
                        self.chains += 1
        except (AssertionError, OstracaError) as error:
            self._trouble = repr(error)

    def _is_there(self, reader: ostraca.Client, chain: int) -> bool:
        return missing(reader, [chain]) == [] or self.may_lose

    def __enter__(self) -> Self:
        self._worker.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._worker.join()
        if error is None:
            assert not self._trouble, self._trouble
            assert self.chains, "some chains were put"


@pytest.fixture
def shelf_1(busy: Pod) -> Iterator[EnclosureProcess]:
    """Start an enclosure with a daemon."""
    shelf = EnclosureProcess(busy, "shelf-1", "--drive-size", "66MiB")
    shelf.start()
    yield shelf
    shelf.kill()


def test_the_whole_life_of_an_enclosure_under_load(busy: Pod, shelf_1: EnclosureProcess) -> None:
    form = {
        "nqn": "nqn.2025-01.io.ostraca:shelf-1",
        "controllers": [f"files://{shelf_1.files}"],
        "segment_bytes": MIB,
    }
    with Admin(busy) as admin, Load(busy) as load:
        # Onboarded: its drives come into the map, and take blocks.
        answer = admin.ask("PUT", "/v1/enclosures/shelf-1", form)
        assert answer.status == 201
        onboarded = admin.done(answer)
        assert [step["state"] for step in onboarded["steps"]] == ["done"] * 7
        assert all(each["read_bytes_s"] > 0 for each in onboarded["steps"][5]["detail"]["drives"].values())
        view = admin.enclosure("shelf-1")
        assert (view["status"]["phase"], len(view["status"]["drives"])) == ("ready", 2)
        assert "export" in view["status"]["report"]
        busy.await_settled()
        with busy.agents[0].connect() as client:
            put_all(client)
        assert any(name.startswith("shelf-1/") for name in busy.claims())

        # The same again changes nothing.
        again = admin.ask("PUT", "/v1/enclosures/shelf-1", form)
        assert (again.status, again.headers["location"]) == (200, answer.headers["location"])

        # Its daemon dies: what it exports outlives it, and nobody misses anything.
        shelf_1.kill()

        # Drained: nothing new goes there, and what is there is still got.
        began = admin.ask("POST", "/v1/enclosures/shelf-1:drain", {})
        assert began.status == 202
        until(lambda: admin.enclosure("shelf-1")["status"]["phase"] == "draining", "it drains")
        for agent in busy.agents:
            with agent.connect() as client:
                assert missing(client) == []
        refused = admin.ask("POST", "/v1/enclosures/shelf-1:retire", {})
        assert (refused.status, "drain it first" in refused.body["detail"]) == (409, True)

        # Used again.
        admin.done(admin.ask("POST", "/v1/enclosures/shelf-1:undrain", {}))
        assert admin.operation(began.headers["location"].rpartition("/")[2])["state"] == "cancelled"

        # A drive is added, and nothing is lost by it.
        _expand(admin, busy, shelf_1)

        # A drive is replaced by one that was put in.
        failed = admin.done(
            admin.ask("POST", "/v1/enclosures/shelf-1/drives/drive-0:replace", {}), state="failed"
        )
        assert "insert a drive" in failed["message"]
        shelf_1.start("--drives", "4")
        load.may_lose = True
        admin.done(admin.ask("POST", "/v1/enclosures/shelf-1/drives/drive-0:replace", {"force": True}))
        drives = admin.enclosure("shelf-1")["status"]["drives"]
        assert [(each["name"], each["is_in_map"]) for each in drives] == [
            ("drive-1", True),
            ("drive-2", True),
            ("drive-3", True),
        ]
        exported = shelf_1.exports()
        assert exported is not None
        assert {each["nguid"] for each in drives} < {each["nguid"] for each in exported["namespaces"]}
        busy.await_settled()

        # Files can't be reserved, and nothing hangs on it.
        until(lambda: _reserved(admin) == {"not supported"}, "agents have looked whether drives can be")

        # Retired: its drives are let go, and nobody asks for it any more.
        admin.done(admin.ask("POST", "/v1/enclosures/shelf-1:retire", {"force": True}))
        assert admin.ask("GET", "/v1/enclosures/shelf-1").status == 404
        until(lambda: not any(name.startswith("shelf-1/") for name in busy.claims()), "its claims end")
        busy.await_settled()
    actions = [each["action"] for each in _audit(busy)]
    assert [each.rpartition("/")[2] for each in actions] == [
        "shelf-1",
        "shelf-1:drain",
        "shelf-1:undrain",
        "shelf-1:expand",
        "drive-0:replace",
        "drive-0:replace",
        "shelf-1:retire",
    ]
    admin.check_log()


def test_an_admin_that_is_killed_in_any_step_leaves_it_to_the_next_one(busy: Pod) -> None:
    """Each step is begun by one admin that is killed then, and ended by another; the last ends all of it."""
    shelf = Shelf(busy.folder, "shelf-1", drives=6)
    admins = [Admin(busy, f"admin-{number}") for number in range(8)]
    admins[0].start()
    answer = admins[0].ask("PUT", "/v1/enclosures/shelf-1", shelf.form)
    operation = answer.headers["location"].rpartition("/")[2]
    for number, (dying, following) in enumerate(itertools.pairwise(admins)):
        until(
            lambda dying=dying, number=number: _has_begun(dying, operation, number),  # type: ignore[misc]
            f"step {number} was begun",
        )
        dying.kill()
        following.start()
    with contextlib.ExitStack() as stack:
        stack.callback(admins[-1].kill)
        ended = admins[-1].done(answer)
        assert [step["state"] for step in ended["steps"]] == ["done"] * 7
        assert len(admins[-1].enclosure("shelf-1")["status"]["drives"]) == 6
        assert len({each["nguid"] for each in admins[-1].enclosure("shelf-1")["status"]["drives"]}) == 6
        busy.await_settled()
        with busy.agents[1].connect() as client:
            put_all(client)


def test_of_two_admins_that_onboard_one_drive_one_wins(busy: Pod) -> None:
    shelf = Shelf(busy.folder, "shelf-1")
    form = {**shelf.form, "drives": list(shelf.nguids)}
    with Admin(busy, "admin-0") as first, Admin(busy, "admin-1") as second:
        answers = list[int]()
        callers = [
            threading.Thread(
                target=lambda admin=admin, name=name: answers.append(
                    admin.ask("PUT", f"/v1/enclosures/{name}", form).status
                )
            )
            for admin, name in ((first, "left"), (second, "right"))
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert sorted(answers) == [201, 409]
        won = next(
            name for name in ("left", "right") if first.ask("GET", f"/v1/enclosures/{name}").status == 200
        )
        until(lambda: first.enclosure(won)["status"]["phase"] == "ready", "the one that won is onboarded")


def test_a_drive_that_holds_something_is_not_formatted_unless_it_is_named(busy: Pod) -> None:
    shelf = Shelf(busy.folder, "shelf-1")
    foreign, path = next(iter(shelf.nguids.items()))
    with path.open("r+b") as file:
        file.seek(512)
        file.write(b"EFI PART")
    before = path.read_bytes()
    with Admin(busy) as admin:
        failed = admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", shelf.form), state="failed")
        assert "a partition table" in failed["message"]
        assert foreign in failed["message"]
        assert path.read_bytes() == before
        admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", {**shelf.form, "wipe": [foreign]}))
        assert admin.enclosure("shelf-1")["status"]["phase"] == "ready"


def test_a_host_that_is_not_let_in_is_told_who_must_let_it_in(busy: Pod) -> None:
    shelf = Shelf(busy.folder, "shelf-1")
    write_exports(shelf.directory, FileExports(shelf.nqn, shelf.nguids, {"nqn.2025-01.io.ostraca:else": ""}))
    with Admin(busy) as admin:
        failed = admin.done(admin.ask("PUT", "/v1/enclosures/shelf-1", shelf.form), state="failed")
        assert failed["steps"][0]["state"] == "done"
        assert failed["message"].startswith("authenticated: 2 of 2 agents ")
        assert "nqn.2025-01.io.ostraca:host:agent-0" in failed["message"]


def _has_begun(admin: Admin, operation: str, step: int) -> bool:
    steps = admin.operation(operation)["steps"]
    return bool(steps[min(step, len(steps) - 1)]["state"] != "waiting")


def _expand(admin: Admin, pod: Pod, shelf: EnclosureProcess) -> None:
    """Put a third drive into an enclosure, and see that it takes blocks and those of others are still got."""
    shelf.start("--drives", "3")
    done = admin.done(admin.ask("POST", "/v1/enclosures/shelf-1:expand", {"force": True}))
    assert done["message"] == "3 drives in the map, 1 new"
    shelf.kill()
    pod.await_settled()
    assert "shelf-1/drive-2/0" in pod.claims()
    for agent in pod.agents:
        with agent.connect() as client:
            assert missing(client) == []


def _reserved(admin: Admin) -> set[str]:
    """Return what agents say of reservations of the enclosure."""
    agents = admin.ask("GET", "/v1/agents").body["items"]
    return {path["reservations"] for agent in agents for path in agent["paths"]}


def _audit(pod: Pod) -> list[dict[str, str]]:
    return pod.listed("audit/")
