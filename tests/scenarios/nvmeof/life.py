"""An enclosure's whole life over one transport, as the host's guest sees it. Every wait has an end."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.scenarios.nvmeof import box, guest
from tests.scenarios.nvmeof.guest import DATA, ENCLOSURE, HOST, say
from tests.support.pod.enclosures import dhchap_secret
from tests.support.pod.processes import until
from tests.support.pod.work import missing, put

from ostraca import Reason

if TYPE_CHECKING:
    from tests.support.pod.admin import Admin, Answer
    from tests.support.pod.processes import AgentProcess, Pod

    import ostraca

MIB = 1 << 20
SETTINGS = (
    "etcd.lease_ttl_s=30",
    "etcd.request_timeout_s=10",
    "etcd.operation_timeout_s=30",
    "memory.cache_bytes=0",
    "memory.staging_bytes=64MiB",
    "drain_s=5",
    # An emulated drive on a busy machine is slow, and well.
    "health.overdue_s=2",
    "health.write_overdue_s=4",
    # Draining ends when blocks are looked up no more: within this, as no other enclosure takes writes.
    "placement_ttl_s=15",
    "placement_turn_s=2",
)
"""Of the agent. What its paths are made of, ``late_write_s`` above all, is left as it is by default."""

CHAINS = range(12)
LOST_CHAINS = range(4)
"""Those that are asked for while the path is lost: each may take its whole deadline."""

DEADLINE_S = 3.0
SLACK_S = 1.5
"""What an emulated processor may take beyond a deadline to say that it is over."""

_STEPS = 7
_LONG_S = 200.0


class Life:
    """One enclosure, from its registration to its end."""

    def __init__(
        self, transport: str, drive: str, pod: Pod, agent: AgentProcess, admin: Admin, secrets: Path
    ) -> None:
        self._transport = transport
        self._drive = drive
        self._pod = pod
        self._agent = agent
        self._admin = admin
        self._name = f"shelf-{transport}"
        self._nqn = f"nqn.2025-01.io.ostraca:{self._name}"
        self._host = f"nqn.2025-01.io.ostraca:host:{agent.name}"
        self._controller = f"{transport}://{DATA}{ENCLOSURE}:{4420 if transport == 'tcp' else 4421}"
        self._secret = dhchap_secret()
        self._shown = secrets / self._name
        """The file with the secret that the agent shows."""

    def run(self) -> None:
        """Live it. Raises AssertionError where something is not as it should be."""
        said = box.ask(
            "serve",
            name=self._name,
            controller=self._controller,
            drive=self._drive,
            etcd=list(self._pod.where),
            hosts={self._host: self._secret},
        )
        self._say(said.strip())
        self._refused()
        self._onboarded()
        client = self._agent.connect()
        try:
            self._put_and_got(client)
        finally:
            client.close()
        self._agent_started_again()
        with self._agent.connect() as client:
            self._path_lost_and_back(client)
        self._drained_and_retired()
        left = box.ask("stop")
        assert left == [], f"nvmet still has {left}"
        self._say("the enclosure's daemon has ended, and left nothing in nvmet")

    def _say(self, words: str) -> None:
        say(f"{self._transport}: {words}")

    def _show(self, secret: str) -> None:
        self._shown.touch(mode=0o600)
        self._shown.write_text(secret)

    def _register(self) -> Answer:
        return self._admin.ask(
            "PUT",
            f"/v1/enclosures/{self._name}",
            {
                "nqn": self._nqn,
                "controllers": [self._controller],
                "secret": self._name,
                "segment_bytes": 4 * MIB,
            },
        )

    def _refused(self) -> None:
        self._show(dhchap_secret())
        self._fails("authenticated", "configure the enclosure's secret for this host")
        self._say("refused with another secret")
        box.ask("let in", hosts={f"{self._host}-or-not": self._secret})
        self._show(self._secret)
        self._fails("authenticated", f"rejects this host: add {self._host}")
        self._say("refused when its NQN is not on the allow-list")
        box.ask("let in", hosts={self._host: self._secret})

    def _fails(self, step: str, because: str) -> None:
        failed = self._admin.done(self._register(), state="failed", within_s=_LONG_S)
        (name,) = (each["name"] for each in failed["steps"] if each["state"] == "failed")
        assert name == step, failed
        assert because in failed["message"], failed["message"]
        took_s = until(
            lambda: controllers(self._nqn) == [],
            "a host that is refused leaves nothing behind",
            within_s=_LONG_S,
        )
        self._say(f"refused in {step}; its kernel has ended the controller {took_s:.0f} s later")

    def _onboarded(self) -> None:
        answer = self._register()
        seen: dict[str, Any] = {}
        told: set[str] = set()

        def has_ended() -> bool:
            seen.update(self._admin.operation(answer.headers["location"].rpartition("/")[2]))
            for step in seen["steps"]:
                if step["state"] == "done" and step["name"] not in told:
                    told.add(step["name"])
                    self._say(f"onboarding: {step['name']}")
            return bool(seen["state"] != "running")

        until(has_ended, f"{self._name} is onboarded", within_s=_LONG_S)
        assert seen["state"] == "done", seen
        assert len(told) == _STEPS, seen
        (rates,) = seen["steps"][5]["detail"]["drives"].values()
        self._say(
            f"the drive was probed: {rates['read_bytes_s'] / 1e6:.1f} MB/s read, "
            f"{rates['write_bytes_s'] / 1e6:.1f} MB/s written"
        )
        assert self._admin.enclosure(self._name)["status"]["phase"] == "ready"
        self._pod.await_settled(within_s=_LONG_S)
        assert any(name.startswith(f"{self._name}/") for name in self._pod.claims())

    def _put_and_got(self, client: ostraca.Client) -> None:
        assert put(client, CHAINS, deadline_s=30.0) == list(CHAINS)
        assert missing(client, CHAINS, deadline_s=30.0) == []
        self._say(f"{2 * len(CHAINS)} blocks put, got and verified")

    def _agent_started_again(self) -> None:
        self._agent.stop()
        self._agent.launch()
        self._agent.await_ready()
        self._pod.await_settled(within_s=_LONG_S)
        with self._agent.connect() as client:
            assert missing(client, CHAINS, deadline_s=30.0) == []
        self._say("the agent was started again, and found all blocks on flash")

    def _path_lost_and_back(self, client: ostraca.Client) -> None:
        assert self._is_live()
        box.ask("cut")
        guest.cut(HOST)
        cut_s = time.monotonic()
        reasons = self._lost_in_time(client)
        self._say(f"network cut: {2 * len(LOST_CHAINS)} misses by their deadline ({reasons})")
        took_s = until(lambda: not self._is_live(), "status says that the path is lost", within_s=60.0)
        self._say(f"status says so {time.monotonic() - cut_s:.0f} s after ({took_s:.0f} s of it waited)")
        began_s = time.monotonic()
        assert put(client, [1000], deadline_s=DEADLINE_S) == []
        assert time.monotonic() - began_s < DEADLINE_S + SLACK_S
        # Until I/O that was under way is failed, and not only its askers answered.
        until(lambda: time.monotonic() - cut_s > 40.0, "fast_io_fail_tmo is over", within_s=60.0)
        self._lost_in_time(client)
        box.ask("mend")
        guest.mend(HOST)
        took_s = until(self._is_live, "the path is back", within_s=60.0)
        self._say(f"network mended: the path is live {took_s:.0f} s later")
        took_s = until(
            lambda: missing(client, CHAINS, deadline_s=10.0) == [], "all blocks are got again", within_s=90.0
        )
        self._say(f"all blocks got again and verified {took_s:.0f} s after that")

    def _lost_in_time(self, client: ostraca.Client) -> dict[str, int]:
        """Get blocks of which nothing can arrive; return why they were missed."""
        reasons: Counter[Reason | None] = Counter()
        for chain in LOST_CHAINS:
            began_s = time.monotonic()
            assert missing(client, [chain], deadline_s=DEADLINE_S, reasons=reasons) == [chain]
            took_s = time.monotonic() - began_s
            assert took_s < DEADLINE_S + SLACK_S, f"a get of {DEADLINE_S} s took {took_s:.1f} s"
        return {"none" if each is None else each.name: count for each, count in reasons.items()}

    def _is_live(self) -> bool:
        status = self._agent.status()
        return status is not None and any(
            path.is_live for each in status.paths if each.enclosure == self._name for path in each.paths
        )

    def _drained_and_retired(self) -> None:
        # Forced, as no other enclosure takes what is put meanwhile.
        began = self._admin.ask("POST", f"/v1/enclosures/{self._name}:drain", {"force": True})
        self._admin.done(began, within_s=_LONG_S)
        self._say("drained")
        self._admin.done(self._admin.ask("POST", f"/v1/enclosures/{self._name}:retire", {}), within_s=_LONG_S)
        assert self._admin.ask("GET", f"/v1/enclosures/{self._name}").status == 404
        took_s = until(lambda: controllers(self._nqn) == [], "the agent has disconnected", within_s=60.0)
        self._say(f"retired; no controller is left {took_s:.0f} s later")


def controllers(nqn: str) -> list[str]:
    """Return the names of this host's controllers of a subsystem, as the kernel lists them.

    Controllers that still connect have no name yet, and count too.
    """
    found = {each.parent.name: _read(each) for each in Path("/sys/class/nvme").glob("nvme*/subsysnqn")}
    return [name for name, said in found.items() if said == nqn or (said and not said.startswith("nqn."))]


def _read(attribute: Path) -> str:
    try:
        return attribute.read_text().strip()
    except OSError:  # it has just gone
        return ""
