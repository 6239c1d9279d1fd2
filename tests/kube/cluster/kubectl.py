"""Requests to the API server by kubectl."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tests.kube.cluster.processes import ClusterError

_REQUEST_S = 60.0


class Kubectl:
    """kubectl as an administrator, in one namespace."""

    def __init__(self, kubeconfig: Path, namespace: str = "default") -> None:
        self.kubeconfig = kubeconfig
        self.namespace = namespace

    def within(self, namespace: str) -> Kubectl:
        """Return requests to another namespace."""
        return Kubectl(self.kubeconfig, namespace)

    def command(self, *words: str) -> list[str]:
        """Return the command line of a request."""
        return ["kubectl", f"--kubeconfig={self.kubeconfig}", f"--namespace={self.namespace}", *words]

    def run(self, *words: str, text: str | None = None, within_s: float = _REQUEST_S) -> str:
        """Run kubectl to its end and return its output. Raises ClusterError."""
        try:
            done = subprocess.run(
                self.command(*words),
                input=text,
                capture_output=True,
                text=True,
                check=False,
                timeout=within_s,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"`kubectl {' '.join(words)}`: not within {within_s:.0f} s") from error
        if done.returncode:
            raise ClusterError(f"`kubectl {' '.join(words)}`: {(done.stderr or done.stdout).strip()}")
        return done.stdout

    def list(
        self, kind: str, labels: Mapping[str, str] | None = None, *, is_anywhere: bool = False
    ) -> list[Any]:
        """Return the objects of a kind, those with some labels, or those of all namespaces."""
        words = ["--all-namespaces"] if is_anywhere else []
        if labels:
            words += ["--selector", ",".join(f"{name}={value}" for name, value in labels.items())]
        return list(json.loads(self.run("get", kind, "--output=json", *words))["items"])

    def apply(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Create or change objects."""
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        self.run("apply", "--filename=-", text=text)
