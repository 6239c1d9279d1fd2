"""The chart, rendered by real Helm without a cluster."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from ostraca_cli.commands.serve.admin_settings import AdminSettings
from ostraca_cli.commands.serve.daemon_settings import DaemonSettings
from ostraca_cli.commands.serve.enclosure.settings import EnclosureDaemonSettings
from ostraca_cli.settings.load import Sources, load

helm = pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this machine")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "ostraca"
RELEASE, NAMESPACE = "kv", "ml"

Object = dict[str, Any]

PREFIXES = {DaemonSettings: "AGENT", EnclosureDaemonSettings: "ENCLOSURE", AdminSettings: "ADMIN"}

EXAMPLES: Mapping[str, Mapping[str, Any]] = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / "helm" / "examples" / "values").iterdir())
}
"""Files of values for users."""

TRIAL = EXAMPLES["trial"]


@dataclass(frozen=True)
class Manifest:
    """Rendered objects of a release."""

    objects: tuple[Object, ...]
    notes: str

    def of_kind(self, kind: str) -> list[Object]:
        return [each for each in self.objects if each["kind"] == kind]

    def get(self, kind: str, name: str) -> Object:
        (found,) = (each for each in self.of_kind(kind) if each["metadata"]["name"] == f"{RELEASE}-{name}")
        return found

    def settings(self, daemon: str) -> str:
        """Return the settings file of a daemon, as TOML."""
        text: str = self.get("ConfigMap", daemon)["data"][f"{daemon}.toml"]
        tomllib.loads(text)
        return text

    def pods(self) -> Iterator[tuple[str, Object]]:
        """Yield each pod specification with the name of its object."""
        for each in self.objects:
            name = f"{each['kind']}/{each['metadata']['name']}"
            if each["kind"] == "Pod":
                yield name, each["spec"]
            elif "template" in each.get("spec", {}):
                yield name, each["spec"]["template"]["spec"]

    def pods_by_component(self) -> Iterator[tuple[str, Object]]:
        """Yield each pod specification with the name of its component."""
        for each in self.objects:
            component = each["metadata"]["labels"]["app.kubernetes.io/component"]
            if each["kind"] == "Pod":
                yield component, each["spec"]
            elif "template" in each.get("spec", {}):
                yield component, each["spec"]["template"]["spec"]


@cache
def chart() -> Any:
    return helm.Chart.load(CHART)


def render(values: Mapping[str, Any], *, revision: int = 1) -> Manifest:
    """Render the chart as release ``kv`` in namespace ``ml``; raises HelmRenderError."""
    files = chart().render(dict(values), name=RELEASE, namespace=NAMESPACE, revision=revision)
    notes = next(text for name, text in files.items() if name.endswith("NOTES.txt"))
    texts = [text for name, text in files.items() if not name.endswith("NOTES.txt")]
    objects = [each for text in texts for each in yaml.safe_load_all(text) if each]
    return Manifest(tuple(objects), notes)


def merged(*tables: Mapping[str, Any]) -> dict[str, Any]:
    """Merge nested values; later tables win."""
    result: dict[str, Any] = {}
    for table in tables:
        for name, value in table.items():
            before = result.get(name)
            is_nested = isinstance(value, Mapping) and isinstance(before, Mapping)
            result[name] = merged(before, value) if is_nested else value  # type: ignore[arg-type]
    return result


def read_settings(kind: Any, text: str, folder: Path, environment: Mapping[str, str] | None = None) -> Any:
    """Read a file of settings, and variables, as the daemon with settings of this *kind* does."""
    file = folder / "settings.toml"
    file.write_text(text)
    prefix = f"OSTRACA_{PREFIXES[kind]}_"
    return load(kind, Sources(file=file, environment=environment), prefix=prefix).settings


def containers(pod: Object) -> list[Object]:
    """Return all containers of a pod, init containers included."""
    return [*pod.get("initContainers", []), *pod["containers"]]
