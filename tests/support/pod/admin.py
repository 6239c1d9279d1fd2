"""The admin service as a process, asked over REST as anybody would."""

from __future__ import annotations

import contextlib
import json
import re
import secrets
import signal
import ssl
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.fabric.membership.nodes import PATIENCE, free_ports
from tests.support.fabric.warm_process import StartedProcess, run_ostraca, started
from tests.support.pod.processes import UP_WITHIN_S, until

from ostraca_fabric.drives.file_exports import FileExports, write_exports

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from tests.support.pod.processes import Pod

MIB = 1 << 20
PEOPLE = {"admin": "alice", "operator": "oscar", "viewer": "victor"}


def token_of(name: str) -> str:
    return f"{name}-" * 5


def write_people(file: Path, people: Mapping[str, Mapping[str, str]]) -> None:
    """Say whose tokens these are, by role."""
    text = "".join(
        f"[{role}]\n" + "".join(f'{who} = ["{token}"]\n' for who, token in tokens.items())
        for role, tokens in people.items()
    )
    file.write_text(text)
    file.chmod(0o600)


@dataclass(frozen=True)
class Answer:
    """What came back."""

    status: int
    body: Any
    headers: dict[str, str] = field(default_factory=dict)


class Admin:
    """``ostraca serve admin`` as a process. Use it as a context manager."""

    def __init__(
        self,
        pod: Pod,
        name: str = "admin-0",
        *options: str,
        ca: Path | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        """With *ca* it is asked over TLS, and its certificate is signed by that."""
        (port,) = free_ports(1)
        self.url = f"http{'s' if ca else ''}://{host}:{port}"
        self._ca = ca
        self.log = pod.folder / f"{name}.log"
        self.people = people = pod.folder / "people.toml"
        write_people(people, {role: {who: token_of(who)} for role, who in PEOPLE.items()})
        self._words = [
            *("serve", "admin", "--id", name, *pod.where, *pod.also),
            *("--tokens", f"{pod.files}/tokens.toml"),
            *("--people", str(people), "--listen", f"{host}:{port}"),
            *("--set", "etcd.lease_ttl_s=2", "--set", "etcd.operation_timeout_s=2"),
            *("--set", "secrets_check_s=0.1", *options),
        ]
        self.process: StartedProcess | None = None
        self._is_warm = not pod.also  # a pod with secrets is searched for these

    def refused(self) -> str:
        """Start it, which it does not; return what it says."""
        done = run_ostraca(*self._words)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        return done.stderr

    def start(self) -> None:
        self.launch()
        self.await_ready()

    def launch(self) -> None:
        """Start the process, without a wait for its service."""
        self.process = started(*self._words, log=self.log, is_warm=self._is_warm)

    def await_ready(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert re.match(r"ready: http", said), f"{said!r}: {self.log.read_text()[-3000:]}"

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it in order."""
        assert self._end(signal.SIGTERM) == 0, self.log.read_text()[-3000:]

    def _end(self, number: signal.Signals) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        code = self.process.wait(UP_WITHIN_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return code

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        who: str = "alice",
        token: str = "",
        **headers: str,
    ) -> Answer:
        """Ask for something, as *who* or with a *token*; refusals are answers."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {
                "Authorization": f"Bearer {token or token_of(who)}",
                "Content-Type": "application/json",
                **{name.replace("_", "-"): value for name, value in headers.items()},
            },
            method=method,
        )
        try:
            context = ssl.create_default_context(cafile=self._ca) if self._ca else None
            with urllib.request.urlopen(request, timeout=20 * PATIENCE, context=context) as answer:
                return Answer(answer.status, json.load(answer), dict(answer.headers))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, json.load(error), dict(error.headers))

    def probe(self, path: str) -> tuple[int, str]:
        """Fetch a health page, without a token; code 0 if the service does not listen."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=20 * PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            return 0, ""

    def ask_as(self, ca: Path) -> None:
        """Believe another CA from now on."""
        self._ca = ca

    def enclosure(self, name: str) -> dict[str, Any]:
        answer = self.ask("GET", f"/v1/enclosures/{name}")
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.body
        return found

    def operation(self, number: str) -> dict[str, Any]:
        answer = self.ask("GET", f"/v1/operations/{number}")
        assert answer.status == 200, answer
        found: dict[str, Any] = answer.body
        return found

    def done(self, answer: Answer, *, state: str = "done", within_s: float = 60.0) -> dict[str, Any]:
        """Wait for the end of the long work that was begun; it must end like this."""
        assert answer.status in (200, 201, 202), answer
        operation = answer.headers["location"].rpartition("/")[2]
        seen: dict[str, Any] = {}

        def has_ended() -> bool:
            seen.update(self.operation(operation))
            return bool(seen["state"] != "running")

        until(has_ended, f"the end of {operation}", within_s=within_s)
        assert seen["state"] == state, f"{seen}\n{self.log.read_text()[-3000:]}"
        return seen

    def check_log(self) -> None:
        """Assert that nothing crashed."""
        words = self.log.read_text()
        assert "Traceback" not in words, words

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.kill()


class Shelf:
    """An enclosure on files."""

    def __init__(self, folder: Path, name: str, drives: int = 2) -> None:
        self.name = name
        self.nqn = f"nqn.2025-01.io.ostraca:{name}"
        self.directory = folder / name
        self.directory.mkdir()
        self.nguids: dict[str, Path] = {}
        for _ in range(drives):
            self.add_drive()

    def add_drive(self, size_bytes: int = 66 * MIB) -> str:
        """Put another drive in; return its NGUID."""
        nguid = secrets.token_hex(16)
        path = self.directory / f"drive-{len(self.nguids)}.img"
        with path.open("wb") as file:
            file.truncate(size_bytes)
        self.nguids[nguid] = path
        write_exports(self.directory, FileExports(self.nqn, self.nguids))
        return nguid

    @property
    def form(self) -> dict[str, Any]:
        """What registers it."""
        return {"nqn": self.nqn, "controllers": [f"files://{self.directory}"], "segment_bytes": MIB}
