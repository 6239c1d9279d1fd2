"""etcd with certificates, and with its own access control."""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.fabric.membership.client.watched import values
from tests.fabric.membership.nodes import Cluster, Secured
from tests.support.stalls import Stopwatch

from ostraca_fabric.errors import FormatError, MembershipError, StoreAwayError
from ostraca_fabric.membership.etcd.client.client import EtcdClient, put
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings, EtcdUser
from ostraca_fabric.membership.etcd.client.watch import Watch
from ostraca_fabric.membership.etcd.client.watch_events import EntryList
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.ids import FabricId
from ostraca_fabric.sockets.tls import TlsFiles

pytestmark = pytest.mark.slow

PASSWORD = "secret"
OURS = EtcdUser("agent", lambda: PASSWORD)


@dataclass(frozen=True)
class Certificates:
    """A certificate authority, with one certificate for the server and one for a client."""

    folder: Path

    def __getitem__(self, name: str) -> Path:
        return self.folder / name


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl, which is not here")
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for ca in ("ca", "other-ca"):
        openssl("req", "-x509", *new, "-subj", f"/CN={ca}", "-keyout", f"{ca}.key", "-out", f"{ca}.crt")
    for name in ("server", "client"):
        openssl("req", *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", *signed, "-out", f"{name}.crt")
    return Certificates(folder)


@pytest.fixture
def tls_etcd(has_etcd: None, certificates: Certificates, tmp_path: Path) -> Iterator[Cluster]:
    secured = Secured(certificates["ca.crt"], certificates["server.crt"], certificates["server.key"])
    cluster = Cluster(tmp_path, secured=secured)
    yield cluster
    cluster.close()


@pytest.fixture
def guarded_etcd(fresh_etcd: Cluster) -> Cluster:
    """Access control is on: our user may use what is under /ours/, and nothing else."""
    fresh_etcd.ctl("user", "add", "root:root")
    fresh_etcd.ctl("user", "grant-role", "root", "root")
    fresh_etcd.ctl("role", "add", "ours")
    fresh_etcd.ctl("role", "grant-permission", "ours", "--prefix=true", "readwrite", "/ours/")
    fresh_etcd.ctl("user", "add", f"{OURS.name}:{PASSWORD}")
    fresh_etcd.ctl("user", "grant-role", OURS.name, "ours")
    fresh_etcd.ctl("auth", "enable")
    return fresh_etcd


def settings(cluster: Cluster, *, tls: TlsFiles | None = None, user: EtcdUser | None = None) -> EtcdSettings:
    return EtcdSettings(cluster.endpoints, tls=tls, user=user, operation_timeout_s=3)


@pytest.fixture
def opened() -> Callable[[EtcdSettings], EtcdClient]:
    return lambda asked: EtcdClient(asked, dice=random.Random(1))


Opened = Callable[[EtcdSettings], EtcdClient]


async def test_mutual_tls_lets_in_who_shows_a_certificate(
    tls_etcd: Cluster, certificates: Certificates, opened: Opened
) -> None:
    tls = TlsFiles(certificates["ca.crt"], certificates["client.crt"], certificates["client.key"])
    client = opened(settings(tls_etcd, tls=tls))
    await client.txn([], [put(b"/k", b"v")])
    assert [kv.value for kv in (await client.range(b"/k")).kvs] == [b"v"]
    await client.close()


@pytest.mark.parametrize(
    ("lacks", "advice"),
    [
        ("a certificate of ours", "check etcd.cert and etcd.key"),
        ("the right authority", "not signed by a CA in etcd.ca"),
        ("tls at all", "set etcd.ca"),
    ],
)
async def test_who_is_not_trusted_gets_an_error_in_time(
    tls_etcd: Cluster, certificates: Certificates, opened: Opened, lacks: str, advice: str
) -> None:
    pair = (certificates["client.crt"], certificates["client.key"])
    tls = {
        "a certificate of ours": TlsFiles(certificates["ca.crt"]),
        "the right authority": TlsFiles(certificates["other-ca.crt"], *pair),
        "tls at all": None,
    }[lacks]
    client = opened(settings(tls_etcd, tls=tls))
    with pytest.raises(MembershipError, match=f"{tls_etcd.endpoints[0]}.*{advice}"):
        await client.range(b"/k")
    await client.close()


async def test_files_that_can_not_be_used_are_named(tmp_path: Path, opened: Opened) -> None:
    nonsense = tmp_path / "nonsense.crt"
    nonsense.write_text("nothing of use")
    client = opened(EtcdSettings(("127.0.0.1:1",), tls=TlsFiles(nonsense)))
    with pytest.raises(MembershipError, match=r"can't be used.*nonsense\.crt"):
        await client.range(b"/k")


async def test_a_certificate_that_is_not_there_is_named(tmp_path: Path, opened: Opened) -> None:
    client = opened(EtcdSettings(("127.0.0.1:1",), tls=TlsFiles(tmp_path / "ca.crt")))
    with pytest.raises(MembershipError, match=r"ca\.crt"):
        await client.range(b"/k")


async def test_a_user_reads_writes_and_watches_what_is_his(guarded_etcd: Cluster, opened: Opened) -> None:
    client = opened(settings(guarded_etcd, user=OURS))
    watch = Watch(client, b"/ours/").run()
    assert isinstance(await anext(watch), EntryList)
    await client.txn([], [put(b"/ours/k", b"v")])
    assert values(await anext(watch)) == [b"v"]
    await watch.aclose()
    with pytest.raises(MembershipError, match="grant the user's role"):
        await client.range(b"/theirs/k")
    await client.close()


async def test_a_user_who_may_read_nothing_above_his_prefix_begins_a_fabric_there(
    guarded_etcd: Cluster,
) -> None:
    allowed = ("ours", "--prefix=true", "readwrite", "/all/ours/")
    guarded_etcd.ctl("role", "grant-permission", *allowed, user="root:root")
    membership = await EtcdMembership.open(
        FabricId(b"f" * 16),
        settings(guarded_etcd, user=OURS),
        dice=random.Random(1),
        keys=EtcdKeys("/all/ours"),
        begin=True,
    )
    assert membership.trouble == ""
    await membership.close()


async def test_a_token_that_etcd_forgot_is_replaced(guarded_etcd: Cluster, opened: Opened) -> None:
    """Its simple tokens end with the member that made them."""
    client = opened(settings(guarded_etcd, user=OURS))
    watch = Watch(client, b"/ours/").run()
    await anext(watch)
    await client.txn([], [put(b"/ours/k", b"before")])
    await anext(watch)
    guarded_etcd.kill()
    guarded_etcd.start()
    await client.txn([], [put(b"/ours/k", b"after")])
    assert values(await anext(watch)) == [b"after"]
    await watch.aclose()
    await client.close()


def change_password(cluster: Cluster, password: str) -> None:
    cluster.ctl("user", "passwd", OURS.name, "--interactive=false", user="root:root", typed=password)


async def test_a_new_password_is_used_once_etcd_forgets_who_came_with_the_old_one(
    guarded_etcd: Cluster, opened: Opened
) -> None:
    kept = {"password": PASSWORD}
    client = opened(settings(guarded_etcd, user=EtcdUser(OURS.name, lambda: kept["password"])))
    async with aclosing(Watch(client, b"/ours/").run()) as watch:
        await anext(watch)
        kept["password"] = "renewed"
        await client.txn([], [put(b"/ours/k", b"before")])
        assert values(await anext(watch)) == [b"before"]
        change_password(guarded_etcd, "renewed")
        await client.txn([], [put(b"/ours/k", b"after")])
        assert values(await anext(watch)) == [b"after"]
    await client.close()


async def test_a_password_that_comes_late_or_is_gone_for_a_while_is_asked_for_again(
    guarded_etcd: Cluster, opened: Opened
) -> None:
    kept = {"password": PASSWORD}

    def read() -> str:
        if "password" not in kept:
            raise FormatError("a secret can't be read: no such file")
        return kept["password"]

    client = opened(settings(guarded_etcd, user=EtcdUser(OURS.name, read)))
    await client.range(b"/ours/k")
    change_password(guarded_etcd, "renewed")
    with pytest.raises(MembershipError, match="check etcd's user and password"):
        await client.range(b"/ours/k")
    del kept["password"]
    with pytest.raises(MembershipError, match=r"of etcd's user agent can't be read: .*no such file"):
        await client.range(b"/ours/k")
    kept["password"] = "renewed"
    await client.range(b"/ours/k")
    await client.close()


@pytest.mark.parametrize(
    ("user", "advice"),
    [
        (None, "name a user and its password"),
        (EtcdUser("agent", lambda: "wrong"), "check etcd's user and password"),
    ],
)
async def test_who_says_nothing_or_the_wrong_password_is_told_what_to_do(
    guarded_etcd: Cluster, opened: Opened, user: EtcdUser | None, advice: str
) -> None:
    client = opened(settings(guarded_etcd, user=user))
    with pytest.raises(MembershipError, match=advice) as refused:
        await client.range(b"/ours/k")
    assert "wrong" not in str(refused.value)
    await client.close()


async def test_a_user_where_nobody_asks_for_one_is_told_so(etcd: Cluster, opened: Opened) -> None:
    client = opened(settings(etcd, user=OURS))
    with pytest.raises(MembershipError, match="name no user"):
        await client.range(b"/ours/k")
    await client.close()


async def test_calls_that_wait_for_a_login_end_in_time_all_of_them(
    guarded_etcd: Cluster, opened: Opened
) -> None:
    client = opened(settings(guarded_etcd, user=OURS))
    await client.range(b"/ours/k")
    client._token = None
    guarded_etcd.nodes[0].pause()

    async def took_s() -> float:
        watch = Stopwatch()
        with pytest.raises(StoreAwayError, match="did not read"):
            await client.range(b"/ours/k")
        return watch.took_s

    took = await asyncio.gather(*(took_s() for _ in range(100)))
    assert max(took) < client.settings.operation_timeout_s + 0.5
    guarded_etcd.nodes[0].resume()
    assert not (await client.range(b"/ours/k")).kvs
    await client.close()


async def test_a_token_that_ended_costs_one_login_however_many_calls_are_under_way(
    guarded_etcd: Cluster, opened: Opened
) -> None:
    client = opened(settings(guarded_etcd, user=OURS))
    await client.range(b"/ours/k")
    before = guarded_etcd.nodes[0].calls()["Authenticate"]
    client._token = "nonsense.1"
    await asyncio.gather(*(client.range(b"/ours/k") for _ in range(48)))
    assert guarded_etcd.nodes[0].calls()["Authenticate"] - before == 1
    await client.close()


async def test_a_client_that_is_closed_leaves_no_login_behind(guarded_etcd: Cluster, opened: Opened) -> None:
    client = opened(settings(guarded_etcd, user=OURS))
    await client.range(b"/ours/k")
    client._token = None
    guarded_etcd.nodes[0].pause()
    asking = asyncio.ensure_future(client.range(b"/ours/k"))
    while client._logging_in is None:  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    await client.close()
    assert client._logging_in is None
