"""The install page: its commands run word for word, apart from the build and push of images."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import helm_python
from tests.kube.release import HelmRelease
from tests.kube.stage import CHART, Stage
from tests.support.pod.work import CHAINS

_PAGE = Path(__file__).parents[3] / "docs/howto/install-in-kubernetes.md"
_RELEASE, _CHART = "kv", "helm/ostraca"
_ELSEWHERE = ("make", "kind", "docker")
"""Programs of the page that build, load and push images: the cluster has the images already."""

_GPU_VALUES = "gpu-pod.yaml"
"""Values of a GPU pod need its etcd, RDMA and kernel modules; here the API server validates the objects."""

_ROLLOUT_S = 240.0


def word_for_word(stage: Stage) -> None:
    """Run each command of the page in its order, and use the fabric in between."""
    stage.want_nodes(1)
    stage.cluster.load_images([stage.images.successor.archive])
    release = HelmRelease(CHART, stage.cluster.kubectl, _RELEASE)
    first, last = stage.cluster.nodes[0], stage.cluster.nodes[-1]
    for command in _commands():
        words = shlex.split(command)
        if words[0] in _ELSEWHERE:
            continue
        stage.say(f"$ {command}")
        output = _run(release, words)
        if words[:3] == ["kubectl", "get", "configmap"]:
            assert json.loads(output)["kv_connector"] == "OffloadingConnector", output
        if words[:2] == ["helm", "test"]:
            with stage.worker(release, first) as worker:
                worker.put_all(CHAINS)
        if words[:2] in (["helm", "upgrade"], ["helm", "rollback"]):
            release.wait_ready()
            with stage.worker(release, last) as worker:
                worker.wait_hits(CHAINS)
    assert not [pod for pod in release.pods() if pod["status"].get("phase") == "Running"]


def _commands() -> Iterator[str]:
    for block in re.findall(r"```console\n(.*?)```", _PAGE.read_text(), re.DOTALL):
        yield from re.findall(r"^\$ (.*)$", block, re.MULTILINE)


def _run(release: HelmRelease, words: list[str]) -> str:
    if words[0] == "kubectl":
        return release.kubectl.run(*words[1:], within_s=_ROLLOUT_S)
    assert words[0] == "helm", words
    _run_helm(release, words[1:])
    return ""


def _run_helm(release: HelmRelease, words: list[str]) -> None:
    """Do as the program `helm` would: a library takes the program's place here."""
    match words:
        case ["install", name, chart, "--values", file]:
            assert (name, chart, file) == (_RELEASE, _CHART, _GPU_VALUES), words
            (text,) = re.findall(r"```yaml\n(.*?)```", _PAGE.read_text(), re.DOTALL)
            release.validate(helm_python.values_from_yaml(text))
        case ["install", name, chart, *settings]:
            assert (name, chart) == (_RELEASE, _CHART), words
            release.install(_values(settings), waits=False)
        case ["upgrade", name, chart, "--reuse-values", *settings]:
            assert (name, chart) == (_RELEASE, _CHART), words
            release.upgrade(_values(settings), reuses_values=True)
        case ["rollback", name]:
            assert name == _RELEASE, words
            release.rollback()
        case ["test", name]:
            assert name == _RELEASE, words
            release.test()
        case ["uninstall", name]:
            assert name == _RELEASE, words
            release.uninstall()
        case _:
            raise AssertionError(f"the page has a command of helm that this test does not know: {words}")


def _values(words: list[str]) -> dict[str, Any]:
    """Return the values of arguments `--set NAME=VALUE`."""
    assert words[::2] == ["--set"] * (len(words) // 2), words
    values: dict[str, Any] = helm_python.parse_set_string(",".join(words[1::2]))
    return values
