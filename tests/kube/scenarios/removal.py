"""Uninstallation, and a second release in another namespace."""

from __future__ import annotations

from typing import Any

from tests.kube.stage import Stage
from tests.support.pod.work import CHAINS

_KINDS = "all,configmaps,secrets,persistentvolumeclaims,poddisruptionbudgets,networkpolicies,ingresses"
_AGENT_CPU = "500m"
_KEEP = "helm.sh/resource-policy"


def leaves_only_data(stage: Stage) -> None:
    """Run two releases beside each other; uninstall one, and install it again over its data."""
    stage.want_nodes(3)
    first_node, second_node, _ = stage.cluster.nodes[:3]
    values = stage.external_etcd()
    # The agents of two releases share each node.
    values["agent"]["cpu"] = _AGENT_CPU
    with stage.installed("second", values) as second, stage.worker(second, second_node) as neighbour:
        neighbour.put_all(CHAINS)
        with (
            stage.installed("first", values, ends_in_order=True) as first,
            stage.worker(first, first_node) as worker,
        ):
            assert worker.missing(CHAINS) == list(CHAINS), "a release sees the blocks of another one"
            worker.put_all(CHAINS)
        left = first.kubectl.list(_KINDS, first.labels)
        names = sorted(f"{item['kind']} {item['metadata']['name']}" for item in left)
        assert all(_is_kept(item) for item in left), f"left behind: {names}"
        stage.say(f"uninstalled, left by policy: {', '.join(names)}")
        assert neighbour.missing(CHAINS) == []
        with stage.installed("first", values) as first, stage.worker(first, first_node) as worker:
            back_s = worker.wait_hits(CHAINS)
            stage.say(f"installed again: all blocks of before hit after {back_s:.0f} s")


def _is_kept(item: Any) -> bool:
    return bool(item["metadata"].get("annotations", {}).get(_KEEP) == "keep")
