"""The trial of five minutes: two values, and a fabric on one node or on several."""

from __future__ import annotations

from tests.kube.stage import TRIAL, Stage
from tests.support.pod.work import CHAINS


def on_one_node(stage: Stage) -> None:
    """Install on a cluster of one node; put and get blocks there."""
    assert not stage.cluster.nodes, "the first scenario begins without nodes"
    _run(stage, "trial-one", 1)


def on_three_nodes(stage: Stage) -> None:
    """Install on three nodes; get on each node all blocks that the first node has put."""
    _run(stage, "trial-three", 3)


def _run(stage: Stage, name: str, nodes: int) -> None:
    stage.want_nodes(nodes)
    with stage.installed(name, TRIAL) as release:
        first, *others = stage.cluster.nodes
        with stage.worker(release, first) as worker:
            worker.put_all(CHAINS)
            worker.wait_hits(CHAINS)
        for node in others:
            with stage.worker(release, node) as worker:
                worker.wait_hits(CHAINS)
                stage.say(f"{node.name} got all blocks of {first.name}, each byte verified")
        release.test()
        stage.say("helm test passed")
