"""``ostraca serve enclosure`` as a process, on drives that are files."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import zlib
from pathlib import Path
from typing import Any

from tests.support.fabric.warm_process import StartedProcess, started
from tests.support.pod.processes import TTL_S, UP_WITHIN_S, Pod

SHORT = (f"etcd.lease_ttl_s={TTL_S}", "etcd.operation_timeout_s=2", "turn_s=0.2", "secrets_check_s=0.1")


class EnclosureProcess:
    """One enclosure's daemon. It is started again under the same name and directories."""

    def __init__(self, pod: Pod, name: str = "shelf-1", *options: str, folder: Path | None = None) -> None:
        self.name = name
        self.folder = folder or pod.folder / name
        self.folder.mkdir(exist_ok=True)
        self.files = self.folder / "drives"
        self.log = self.folder / "log"
        short = [word for each in SHORT for word in ("--set", each)]
        self._words = [
            *("serve", "enclosure", "--id", name, *pod.where, *pod.also),
            *("--state-dir", str(self.folder / "state"), "--files", str(self.files)),
            *("--drives", "2", "--drive-size", "3MiB", *short, *options),
        ]
        self.process: StartedProcess | None = None
        self._is_warm = not pod.also  # a pod with secrets is searched for these

    @property
    def said(self) -> str:
        return self.log.read_text()

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def launch(self, *more: str) -> None:
        self.process = started(*self._words, *more, log=self.log, is_warm=self._is_warm)

    def await_ready(self) -> str:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert re.match(rf"ready: enclosure {self.name} exports [0-9]+ drives? as nqn\.", line), self.said
        return line

    def start(self, *more: str) -> str:
        self.launch(*more)
        return self.await_ready()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self) -> int:
        assert self.process is not None
        code = self.process.wait(UP_WITHIN_S)
        assert self.process.stdout is not None
        assert self.process.stdout.read() == "", "one line goes to stdout"
        self.process.stdout.close()
        self.process = None
        return code

    def stop(self) -> None:
        self.signal(signal.SIGTERM)
        assert (code := self.ended()) == 0, f"{code}: {self.said}"

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(UP_WITHIN_S)
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def exports(self) -> dict[str, Any] | None:
        """Return what is exported, None where nothing is."""
        try:
            found: dict[str, Any] = json.loads((self.files / "exports.json").read_text())
        except FileNotFoundError:
            return None
        return found


def dhchap_secret() -> str:
    """Make a secret: NVMe base specification, "Secret Representation"; 32 bytes, not transformed."""
    key = os.urandom(32)
    return f"DHHC-1:00:{base64.b64encode(key + zlib.crc32(key).to_bytes(4, 'little')).decode()}:"
