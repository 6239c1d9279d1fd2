"""The page on the install in Kubernetes: its values and commands suit the chart."""

from __future__ import annotations

import re
from pathlib import Path

import yaml
from tests.helm.rendering import ROOT, TRIAL, render

PAGE = (ROOT / "docs" / "howto" / "install-in-kubernetes.md").read_text()


def test_the_first_command_gives_the_values_of_the_trial() -> None:
    (command,) = re.findall(r"^\$ helm install kv helm/ostraca (--set .*)$", PAGE, re.MULTILINE)
    given = dict(re.findall(r"--set ([\w.]+)=(\w+)", command))
    expected = {
        f"{group}.{part}.{name}": str(value).lower()
        for group, parts in TRIAL.items()
        for part, names in parts.items()
        for name, value in names.items()
    }
    assert given == expected
    objects = {f"{each['kind'].lower()}/{each['metadata']['name']}" for each in render(TRIAL).objects}
    assert set(re.findall(r"rollout status (\S+)", PAGE)) <= objects
    assert {f"configmap/{name}" for name in re.findall(r"get configmap (\S+)", PAGE)} <= objects


def test_the_values_of_a_gpu_pod_render() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    manifest = render(yaml.safe_load(text))
    agent = manifest.get("DaemonSet", "agent")["spec"]["template"]["spec"]
    assert agent["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


def test_each_named_file_of_the_chart_exists() -> None:
    named = set(re.findall(r"`(helm/[\w./-]+)`", PAGE))
    assert named
    assert {name for name in named if not Path(ROOT, name).exists()} == set()
