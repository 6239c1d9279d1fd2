"""A Helm release of the chart, and what its users see of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python
from tests.kube.cluster.kubectl import Kubectl
from tests.kube.cluster.processes import wait_until

_WAIT_S = 240
_GONE_S = 120.0
_FINISHED = {"Succeeded", "Failed"}


class HelmRelease:
    """A release in a namespace of its own."""

    def __init__(self, chart: Path, kubectl: Kubectl, name: str) -> None:
        """Name the release; the namespace has the same name."""
        self.name = name
        self.kubectl = kubectl.within(name)
        self.labels: Mapping[str, str] = {"app.kubernetes.io/instance": name}
        """Labels of all objects of the release."""

        self._chart = chart
        self._helm = helm_python.Config(kubeconfig_path=str(kubectl.kubeconfig), namespace=name)

    def install(self, values: Mapping[str, Any], *, waits: bool = True) -> None:
        """Install the chart, and wait until all of its pods are ready, or for hooks alone."""
        self._helm.install(
            str(self._chart),
            self.name,
            dict(values),
            wait="watcher" if waits else "hookOnly",
            timeout=_WAIT_S,
            create_namespace=True,
        )

    def validate(self, values: Mapping[str, Any]) -> None:
        """Let the API server validate what an installation would create."""
        self._helm.install(str(self._chart), self.name, dict(values), dry_run="server")

    def upgrade(
        self, values: Mapping[str, Any], *, chart: Path | None = None, reuses_values: bool = False
    ) -> None:
        """Change values or the chart, and wait until all pods have changed."""
        self._chart = chart or self._chart
        self._helm.upgrade(
            str(self._chart),
            self.name,
            dict(values),
            wait="watcher",
            timeout=_WAIT_S,
            reuse_values=reuses_values,
        )

    def rollback(self) -> None:
        """Return to the revision before, and wait until all pods have changed."""
        self._helm.rollback(self.name, wait="watcher", timeout=_WAIT_S)

    def test(self) -> None:
        """Run the tests of the chart."""
        self._helm.test(self.name, timeout=_WAIT_S)

    def uninstall(self) -> None:
        """Uninstall the release, and wait until its pods are gone; finished tests of Helm stay."""
        self._helm.uninstall(self.name, wait="watcher", timeout=_WAIT_S)
        wait_until(lambda: all(map(_is_finished, self.pods())), _GONE_S, f"end of the pods of {self.name}")

    def discard(self) -> None:
        """Uninstall the release, without the time that Kubernetes takes to remove ended pods."""
        self._helm.uninstall(self.name, wait="hookOnly", timeout=_WAIT_S)

        def is_gone() -> bool:
            self.kubectl.run("delete", "pods", "--all", "--force", "--grace-period=0", "--wait=false")
            return not self.pods()

        wait_until(is_gone, _GONE_S, f"end of the pods of {self.name}")

    def wait_ready(self) -> None:
        """Wait until all pods with a readiness probe are ready."""
        wait_until(lambda: all(map(_is_ready, self.pods())), _WAIT_S, f"pods of {self.name} Ready")

    def pods(self, component: str | None = None) -> list[Any]:
        """Return the pods of the release, or those of a component."""
        labels = dict(self.labels)
        if component is not None:
            labels["app.kubernetes.io/component"] = component
        return self.kubectl.list("pods", labels)


def _is_finished(pod: Any) -> bool:
    return pod["status"].get("phase") in _FINISHED


def _is_ready(pod: Any) -> bool:
    if _is_finished(pod):
        return True
    statuses = pod["status"].get("containerStatuses", [])
    return bool(statuses) and all(status["ready"] for status in statuses)
