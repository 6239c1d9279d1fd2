"""Faults and changes of nodes: power loss, partition, drain, scale-out."""

from __future__ import annotations

from tests.kube.cluster.control_plane import NODE_LOST_S
from tests.kube.cluster.processes import wait_until
from tests.kube.release import HelmRelease
from tests.kube.stage import Stage
from tests.kube.workers import PodWorker
from tests.support.pod.work import CHAINS

_BACK_S = 120.0
_NEW_CHAINS = range(100, 124)


def power_loss(stage: Stage) -> None:
    """Pull the power cord of a node with drives; boot the node later."""
    stage.want_nodes(3)
    victim = stage.cluster.nodes[2]
    with stage.installed("power", stage.external_etcd()) as release:
        with stage.worker(release, stage.cluster.nodes[0]) as worker:
            worker.put_all(CHAINS)
            victim.power_off()
            lost = worker.missing(CHAINS)
            lost_s = stage.cluster.wait_lost(victim)
            stage.say(f"{victim.name} is NotReady after {lost_s:.0f} s (grace period {NODE_LOST_S} s)")
            assert 0 < len(lost) < len(CHAINS), "only drives of the other nodes serve their blocks"
            new = _put_some(worker)
            stage.say(
                f"without {victim.name}: {len(lost)} of {len(CHAINS)} chains missed, {new} new ones put"
            )
            victim.boot()
            stage.cluster.wait_ready([victim])
            back_s = worker.wait_hits(CHAINS)
            stage.say(f"{victim.name} is back: all chains hit after another {back_s:.0f} s")
        release.wait_ready()


def partition(stage: Stage) -> None:
    """Unplug a node's network cable, and plug it in again."""
    stage.want_nodes(3)
    first, cut, _ = stage.cluster.nodes[:3]
    with (
        stage.installed("partition", stage.external_etcd()) as release,
        stage.worker(release, first) as worker,
    ):
        worker.put_all(CHAINS)
        cut.unplug()
        lost = worker.missing(CHAINS)
        stage.cluster.wait_lost(cut)
        assert 0 < len(lost) < len(CHAINS), "only drives of the other nodes serve their blocks"
        new = _put_some(worker)
        stage.say(f"{cut.name} is cut off: {len(lost)} of {len(CHAINS)} chains missed, {new} new ones put")
        cut.plug()
        stage.cluster.wait_ready([cut])
        worker.put_all(_NEW_CHAINS)
        back_s = worker.wait_hits([*CHAINS, *_NEW_CHAINS])
        stage.say(f"{cut.name} is connected again: all chains hit after another {back_s:.0f} s")
        with stage.worker(release, cut) as other:
            other.wait_hits([*CHAINS, *_NEW_CHAINS])
            stage.say(f"{cut.name} gets all chains")


def drain(stage: Stage) -> None:
    """Drain a node of pods that may move: agents and daemons stay, the admin service moves."""
    stage.want_nodes(3)
    node = stage.cluster.nodes[1]
    with (
        stage.installed("drain", stage.external_etcd()) as release,
        stage.worker(release, stage.cluster.nodes[0]) as worker,
    ):
        worker.put_all(CHAINS)
        words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
        release.kubectl.run("drain", node.name, *words, within_s=150.0)
        assert _nodes_of(release, "admin").isdisjoint({node.name})
        assert node.name in _nodes_of(release, "agent")
        worker.wait_hits(CHAINS)
        release.wait_ready()
        stage.say(f"{node.name} is drained: the admin service moved, no chain missed")
        release.kubectl.run("uncordon", node.name)


def scale_out(stage: Stage) -> None:
    """Add a node: its agent and drives join, and workers there get all blocks."""
    stage.want_nodes(3)
    with stage.installed("scale-out", stage.external_etcd()) as release:
        with stage.worker(release, stage.cluster.nodes[0]) as worker:
            worker.put_all(CHAINS)
        stage.want_nodes(4)
        added = stage.cluster.nodes[3]
        wait_until(lambda: added.name in _nodes_of(release, "agent"), _BACK_S, f"agent on {added.name}")
        release.wait_ready()
        with stage.worker(release, added) as worker:
            worker.wait_hits(CHAINS)
            worker.put_all(_NEW_CHAINS)
        stage.say(f"{added.name} joined: its worker gets and puts")


def _put_some(worker: PodWorker) -> int:
    """Put new chains until the remaining drives take some; return their number."""
    done: list[int] = []

    def put() -> bool:
        done[:] = worker.put(_NEW_CHAINS)
        return bool(done)

    wait_until(put, _BACK_S, "puts to the drives of the other nodes")
    return len(done)


def _nodes_of(release: HelmRelease, component: str) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in release.pods(component)}
