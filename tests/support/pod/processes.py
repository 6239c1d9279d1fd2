"""A fabric as a pod has it: etcd, agents as processes of their own, and workers beside them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.fabric.membership.nodes import HERE, PATIENCE, Cluster, Place, free_ports
from tests.support.fabric.warm_process import StartedProcess, run_ostraca, started
from tests.support.pod.work import CHAINS, SMALL, missing

import ostraca
from ostraca_cli.commands.status import ask
from ostraca_fabric.errors import OstracaError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import TracebackType

    from ostraca.settings import ClientSettings
    from ostraca_fabric.telemetry.status import AgentStatus

UP_WITHIN_S = 40.0 * PATIENCE
TTL_S = 2.0
GRANT_S = 2.0
HOLD_S = 2.0
LATE_WRITE_S = 2.0
WITHIN_S = 30.0
EVEN_SHARE_MAX = 1.25
"""An agent keeps what it has up to so many times the even share, and a part of one shard."""

SHORT = (
    f"etcd.lease_ttl_s={TTL_S}",
    "etcd.operation_timeout_s=2",
    f"owner.grant_s={GRANT_S}",
    f"owner.hold_s={HOLD_S}",
    "owner.pin_max_s=1",
    f"owner.late_write_s={LATE_WRITE_S}",
    "owner.pause_max_s=1",
    "owner.adopt_every_s=0.5",
    "turn_s=0.25",
    "drain_s=5",
    "memory.cache_bytes=0",
    "memory.staging_bytes=32MiB",
    "memory.chunk_bytes=4MiB",
)
"""Settings with which waits are short."""


def cli_of(environment: Mapping[str, str] | None) -> str:
    """Return the module of ``ostraca`` in the release that an environment has."""
    folders = (environment or {}).get("PYTHONPATH", "").split(os.pathsep)
    return "ostraca.cli" if any(Path(each, "ostraca", "cli").is_dir() for each in folders) else "ostraca_cli"


def command(
    *words: str | Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``ostraca`` with these words, to its end."""
    if environment is None:
        return run_ostraca(*map(str, words))
    return subprocess.run(
        [sys.executable, "-m", cli_of(environment), *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60 * PATIENCE,
        env=environment,
    )


def until(
    shows: Callable[[], bool], what: str, *, within_s: float = WITHIN_S, every_s: float = 0.05
) -> float:
    """Look until something is so; return how long that took."""
    began_s = time.monotonic()
    while not shows():
        assert time.monotonic() - began_s < within_s, f"not within {within_s:.0f} s: {what}"
        time.sleep(every_s)
    return time.monotonic() - began_s


def await_hits(client: ostraca.Client, chains: Iterable[int] = CHAINS, *, deadline_s: float = 0.5) -> None:
    """Get chains until each is whole. A wrong byte fails the test."""
    wanted = list(chains)

    def are_whole() -> bool:
        try:
            return not missing(client, wanted, deadline_s=deadline_s)
        except ostraca.ConnectError:  # a busy agent did not welcome the client in time
            return False

    until(are_whole, "every block can be got")


class AgentProcess:
    """``ostraca serve agent`` as a process.

    It is started again under the same name and directory, and may be of another release then: that of
    its ``environment``, or this one where that is None.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        port: int,
        *options: str,
        scheme: str = "tcp",
        place: Place = HERE,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.environment = environment
        self.reached_at = f"{scheme}://{place.address}:{port}"
        self.address = f"unix://{folder}/{name}.sock"
        self.log = folder / f"{name}.log"
        self._interpreter = (*place.before, sys.executable, "-m")
        self._is_plain = not place.before
        self._is_warm = scheme == "tcp"  # a pod with secrets is searched for these
        self._words = [
            *("serve", "agent", "--id", name),
            *("--state-dir", str(folder / f"state-{name}"), "--listen", self.address),
            *("--listen", self.reached_at, *options),
        ]
        self.process: StartedProcess | None = None

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self, *more: str) -> None:
        """Begin to start; ``await_ready`` comes next, or ``ended``."""
        if self._is_plain and self.environment is None:
            self.process = started(*self._words, *more, log=self.log, is_warm=self._is_warm)
            return
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*self._interpreter, cli_of(self.environment), *self._words, *more],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                process_group=0,
                env=self.environment,
            )

    def await_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert re.match(r"ready: ostraca\.connect\(", said), f"{said!r}: {self.log.read_text()[-3000:]}"

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.ended()

    def stop(self) -> None:
        """End it in order."""
        self.signal(signal.SIGTERM)
        assert (code := self.ended()) == 0, f"{code}: {self.log.read_text()[-3000:]}"

    def ended(self) -> int:
        assert self.process is not None
        code = self.process.wait(UP_WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def connect(self) -> ostraca.Client:
        """Come as a worker of this agent's machine."""
        return ostraca.connect(self.address, settings=SMALL)

    def connect_from_elsewhere(self, token: str, ca: Path) -> ostraca.Client:
        """Come as a worker of another machine, over TLS."""
        return ostraca.connect(self.reached_at, credentials=token, settings=replace(SMALL, tls_ca=str(ca)))

    def status(self) -> AgentStatus | None:
        """Return what it believes, None where it does not answer."""
        try:
            return asyncio.run(ask(self.address))
        except (OstracaError, OSError):
            return None


class Pod:
    """One fabric, with the agents that are started in it. Use it as a context manager."""

    def __init__(
        self,
        folder: Path,
        etcd: Cluster,
        *,
        prefix: str = "/ostraca/default/",
        also: tuple[str, ...] = (),
        settings: tuple[str, ...] = SHORT,
    ) -> None:
        """Begin the fabric; no agent runs yet.

        *also* is how to reach etcd beside where it is, *settings* are those of all agents.
        """
        self.folder = folder
        self.etcd = etcd
        self.prefix = prefix
        self.files = folder / "files"
        self.where = ("--etcd", etcd.endpoints[0], "--prefix", prefix)
        self.also = also
        self._settings = settings
        self.agents: list[AgentProcess] = []

    def create(
        self,
        *,
        enclosures: int = 2,
        drives: int = 2,
        capacity: str = "260MiB",
        segment: str = "1MiB",
        environment: Mapping[str, str] | None = None,
    ) -> str:
        done = command(
            *("fabric", "create", *self.where, *self.also, "--files", str(self.files)),
            *("--enclosures", str(enclosures), "--drives", str(drives)),
            *("--capacity", capacity, "--segment", segment),
            environment=environment,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def agent(
        self,
        name: str,
        *more: str,
        transport: str = "inline",
        scheme: str = "tcp",
        place: Place = HERE,
        environment: Mapping[str, str] | None = None,
    ) -> AgentProcess:
        """Describe an agent; nothing is started."""
        (port,) = free_ports(1)
        short = [word for each in self._settings for word in ("--set", each)]
        secrets = ("--fabric-key", f"{self.files}/fabric.key", "--tokens", f"{self.files}/tokens.toml")
        made = AgentProcess(
            name,
            self.folder,
            port,
            *(*self.where, *self.also, *secrets, *short, "--transport", transport, *more),
            scheme=scheme,
            place=place,
            environment=environment,
        )
        self.agents.append(made)
        return made

    def start(self, *agents: AgentProcess) -> None:
        """Start those that do not run, and wait until every shard has one of them as its owner."""
        wanted = agents or tuple(self.agents)
        idle = [agent for agent in wanted if not agent.runs]
        for agent in idle:
            agent.launch()
        for agent in idle:
            agent.await_ready()
        self.await_settled()

    def connect(self, *first: AgentProcess, settings: ClientSettings = SMALL) -> ostraca.Client:
        """Come as a worker that knows all agents, and asks these *first*."""
        rest = [agent for agent in self.agents if agent not in first]
        return ostraca.connect([agent.address for agent in (*first, *rest)], settings=settings)

    def shards(self) -> int:
        return sum(len(each["shards"]) for each in self.listed("enclosures/"))

    def claims(self) -> dict[str, str]:
        """Return who owns each shard, as etcd has it."""
        return {each["shard"]: each["agent"] for each in self.listed("claims/")}

    def epochs(self) -> dict[str, int]:
        """Return the highest epoch that each shard was ever owned under."""
        return {shard: record["epoch"] for shard, record in self._grants().items()}

    def withheld(self) -> dict[str, frozenset[int]]:
        """Return which segments of each shard some owner may be writing, or an earlier one still."""
        return {
            shard: frozenset(number for grant in record["unretired"] for number in grant["segments"])
            for shard, record in self._grants().items()
        }

    def _grants(self) -> dict[str, Any]:
        begin = f"{self.prefix}grants/"
        lines = iter(self.etcd.ctl("get", "--prefix", begin).splitlines())
        return {key.removeprefix(begin): json.loads(next(lines)) for key in lines}

    def listed(self, below: str) -> list[dict[str, Any]]:
        """Return the records below a key, as an operator sees them."""
        lines = self.etcd.ctl("get", "--prefix", f"{self.prefix}{below}", "--print-value-only").splitlines()
        return [json.loads(line) for line in lines if line]

    def await_settled(self, *, within_s: float = WITHIN_S) -> None:
        """Wait until each shard is served by one agent that runs, and shards are about evenly spread."""
        shards = self.shards()

        def is_settled() -> bool:
            looks = [each.status() for each in self.agents if each.runs]
            if any(look is None for look in looks):
                return False
            held = [len(look.shards) for look in looks if look is not None]
            even = -(-shards // len(held))
            whole = all(shard.recovered == 1.0 for look in looks if look is not None for shard in look.shards)
            return (
                whole
                and sum(held) == shards
                and max(held) <= max(even + 1, math.ceil(EVEN_SHARE_MAX * shards / len(held)))
            )

        until(is_settled, "every shard served once", within_s=within_s)

    def owner(self) -> AgentProcess:
        """Return an agent that owns most shards."""
        owners = list(self.claims().values())
        return max((each for each in self.agents if each.runs), key=lambda each: owners.count(each.name))

    def await_retired(self, *, within_s: float = WITHIN_S) -> None:
        """Wait until no owner withholds what an earlier one was granted."""

        def is_retired() -> bool:
            return all(len(record["unretired"]) <= 1 for record in self._grants().values())

        until(is_retired, "no grant but each owner's own", within_s=within_s)

    def check_logs(self, *, known: re.Pattern[str] | None = None) -> None:
        """Assert that nothing crashed, apart from *known* tracebacks."""
        for agent in self.agents:
            words = agent.log.read_text() if agent.log.exists() else ""
            if known is not None:
                words = known.sub("", words)
            assert "Traceback" not in words, words

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for agent in self.agents:
            if agent.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    agent.signal(signal.SIGCONT)
                agent.kill()
