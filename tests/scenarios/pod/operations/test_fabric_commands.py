"""``ostraca fabric create`` and ``rebuild`` where etcd keeps the fabric."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import pytest
from tests.fabric.membership.nodes import Cluster
from tests.support.pod.processes import GRANT_S, HOLD_S, LATE_WRITE_S, Pod, command, until
from tests.support.pod.work import BLOCK_BYTES, CHAINS, LAYOUT, await_puts, missing, put, put_all

from ostraca_cli.commands.fabric.rebuild import look
from ostraca_cli.program import main
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import EtcdClient
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.model.ids import FabricId, TenantId
from ostraca_fabric.model.volume import VolumeRecord

pytestmark = pytest.mark.slow

LATE_S = GRANT_S + HOLD_S + LATE_WRITE_S
"""For so long after its claim may something be written under a grant before it."""


def test_creating_a_fabric_again_finds_it_and_adds_what_is_new(own: Pod) -> None:
    said = own.create(enclosures=1, drives=1, capacity="17MiB")
    assert "created under" in said
    assert "enclosure-0  1 drive, 17.0 MiB" in said
    kept = [(own.files / name).read_bytes() for name in ("fabric.key", "tokens.toml")]
    assert [(own.files / name).stat().st_mode & 0o777 for name in ("fabric.key", "tokens.toml")] == [
        0o600
    ] * 2
    before = own.listed("")
    assert "found under" in own.create(enclosures=1, drives=1, capacity="17MiB")
    assert own.listed("") == before, "nothing has changed"
    said = own.create(enclosures=1, drives=1, capacity="20MiB")
    assert "1 existing drive of another size left unchanged: --capacity" in said
    assert own.listed("") == before
    said = own.create(enclosures=2, drives=1, capacity="34MiB")
    assert "of another size" not in said
    assert "enclosure-1  1 drive, 17.0 MiB" in said
    assert len(own.listed("enclosures/")) == 2
    assert kept == [(own.files / name).read_bytes() for name in ("fabric.key", "tokens.toml")]


def test_a_drive_that_the_fabric_has_is_made_again_only_where_it_is_to_be_replaced(own: Pod) -> None:
    own.create(enclosures=1, drives=2, capacity="34MiB")
    before, drive = own.listed(""), own.files / "enclosure-0" / "drive-1.img"
    drive.unlink()
    drive.symlink_to("unmounted")
    shape = ("--capacity", "34MiB", "--segment", "1MiB")
    create = ("fabric", "create", *own.where, "--files", own.files, *shape)
    for replaced in ((), ("--replace", "enclosure-0/drive-0")):
        told = command(*create, *replaced)
        assert told.returncode == 0, told.stderr
        assert (
            f"UNUSABLE: drive enclosure-0/drive-1 is not usable: {drive} is a link to unmounted"
            in told.stdout
        )
        assert "repeat the command with --replace enclosure-0/drive-1" in told.stdout
        assert not drive.exists()
    there = command(*create, "--replace", "enclosure-0/drive-1")
    assert (there.returncode, f"{drive} is a link" in there.stderr) == (1, True)
    unknown = command(*create, "--replace", "enclosure-0/drive-7")
    assert (unknown.returncode, "the fabric has no such drive" in unknown.stderr) == (2, True)
    drive.unlink()
    made = command(*create, "--replace", "enclosure-0/drive-1")
    assert (made.returncode, "UNUSABLE" in made.stdout) == (0, False)
    assert drive.stat().st_mode & 0o777 == 0o600
    assert own.listed("") == before


def test_creating_never_takes_away_what_is_there(own: Pod) -> None:
    own.create(enclosures=1, drives=2, capacity="34MiB")
    create = ("fabric", "create", *own.where, "--files", own.files, "--capacity", "34MiB", "--drives")
    fewer = command(*create, "1")
    assert (fewer.returncode, "has 2 drives" in fewer.stderr) == (2, True)
    key = own.files / "fabric.key"
    key.rename(own.folder / "kept")
    without = command(*create, "2")
    assert (without.returncode, "is missing, and the fabric already has a key" in without.stderr) == (1, True)
    (own.folder / "kept").rename(key)
    own.etcd.ctl("del", "--prefix", own.prefix)
    lost = command(*create, "2")
    assert (lost.returncode, "ostraca fabric rebuild --files" in lost.stderr) == (2, True)
    assert own.listed("") == [], "and no other fabric was begun in its place"


def test_what_etcd_has_lost_is_made_again_from_the_drives(own: Pod) -> None:
    own.create()
    agent = own.agent("agent-0")
    own.start()
    with agent.connect() as client:
        put_all(client)
    agent.stop()
    enclosures, volumes = own.listed("enclosures/"), own.listed("volumes/")
    rebuild = ("fabric", "rebuild", *own.where, "--files", own.files)
    refused = command(*rebuild)
    assert (refused.returncode, "nothing needs a rebuild" in refused.stderr) == (2, True)
    dry = command(*rebuild, "--dry-run")
    assert (dry.returncode, dry.stderr) == (0, "")
    assert f"etcd: fabric under {own.prefix}" in dry.stdout
    assert ", with 2 enclosures, 1 volume and no agents" in dry.stdout
    assert "would be written: nothing without --force; with it no enclosure" in dry.stdout
    own.etcd.ctl("del", "--prefix", own.prefix)
    done = command(*rebuild)
    assert (done.returncode, done.stderr) == (0, "")
    assert own.listed("enclosures/") == enclosures
    assert own.listed("volumes/") == volumes
    own.start()
    with agent.connect() as client:
        assert missing(client) == []
    agent.stop()
    own.check_logs()


def test_a_new_and_empty_etcd_is_filled_while_agents_run_and_none_of_them_writes_too_early(
    tmp_path: Path,
) -> None:
    (tmp_path / "etcd").mkdir()
    with contextlib.closing(Cluster(tmp_path / "etcd")) as etcd, Pod(tmp_path, etcd) as pod:
        pod.create()
        for number in range(2):
            pod.agent(f"agent-{number}")
        pod.start()
        rebuild = ("fabric", "rebuild", *pod.where, "--files", pod.files)
        with pod.connect() as client:
            # The first agent may have all shards, and hand some over to the second just then.
            put_all(client)
            before = pod.epochs()
            etcd.kill()
            shutil.rmtree(tmp_path / "etcd" / etcd.nodes[0].name)
            etcd.start()
            assert missing(client) == [], "gets go on under the last map"
            dry = command(*rebuild, "--dry-run")
            assert (dry.returncode, dry.stderr) == (0, "")
            assert f"etcd: no fabric under {pod.prefix}" in dry.stdout
            assert "would be written: 2 enclosures with 4 shards, and 1 volume" in dry.stdout
            assert pod.listed("") == []
            began_s = time.monotonic()
            done = command(*rebuild)
            assert (done.returncode, done.stderr) == (0, "")
            assert "Running agents join by themselves" in done.stdout
            pod.await_settled()
            until(lambda: not missing(client), "every block can be got once agents have joined again")
            await_puts(client)
            assert time.monotonic() - began_s > LATE_S
            assert missing(client) == []
        lost = [grant for each in pod.listed("grants/") for grant in each["unretired"] if "whole" in grant]
        assert lost == [], "what was not known is forgotten"
        assert all(epoch > before[shard] for shard, epoch in pod.epochs().items())
        pod.check_logs()


ERASABLE = VolumeRecord(TenantId("default"), "v", LAYOUT, BLOCK_BYTES, is_erasable=True)
"""The volume of these tests' workers, as it is where its tenant may have it erased."""


def test_a_rebuild_that_dies_costs_agents_nothing_and_brings_nothing_back_that_was_erased(own: Pod) -> None:
    own.create()
    asyncio.run(told(own, lambda membership: membership.create_volume(ERASABLE)))
    agent = own.agent("agent-0")
    own.start()
    erased, kept = CHAINS[::2], CHAINS[1::2]
    with agent.connect() as client:
        await_puts(client)
        assert put(client, erased) == list(erased)
        asyncio.run(told(own, lambda membership: membership.erase_volume(ERASABLE)))
        until(lambda: missing(client, erased) == list(erased), "the agent hears of it")
        assert put(client, kept) == list(kept)
        until(lambda: look(own.files, is_of_up=False).volumes == (ERASABLE.erased(),), "drives say so")
        own.etcd.ctl("del", "--prefix", own.prefix)
        dies_at(own, "volumes/")
        assert missing(client, kept) == [], "gets go on under the last map"
        assert missing(client, erased) == list(erased)
        assert command("fabric", "rebuild", *own.where, "--files", own.files).returncode == 0
        own.await_settled()
        until(lambda: not missing(client, kept), "every block can be got once agents have joined again")
        assert missing(client, erased) == list(erased)
        assert [each["incarnation"] for each in own.listed("volumes/")] == [2]
    own.check_logs()


async def told(pod: Pod, tell: Callable[[EtcdMembership], Awaitable[object]]) -> None:
    """Have etcd told something, as an admin tells it."""
    (meta,) = pod.listed("meta")
    membership = await EtcdMembership.open(
        FabricId(bytes.fromhex(meta["fabric"])),
        EtcdSettings(pod.etcd.endpoints),
        dice=random.Random(9),
        keys=EtcdKeys(pod.prefix),
    )
    try:
        await tell(membership)
    finally:
        await membership.close()


def dies_at(pod: Pod, below: str) -> None:
    """Rebuild it here, until that would write a record below a key."""
    plain = EtcdClient.txn

    async def txn(
        self: EtcdClient,
        compare: Iterable[rpc.Compare],
        success: Iterable[rpc.RequestOp],
        failure: Iterable[rpc.RequestOp] = (),
    ) -> rpc.TxnResponse:
        asked = list(success)
        if any(each.request_put.key.startswith(f"{pod.prefix}{below}".encode()) for each in asked):
            raise DiedError
        return await plain(self, compare, asked, failure)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EtcdClient, "txn", txn)
        with pytest.raises(DiedError):
            main(["fabric", "rebuild", *pod.where, "--files", str(pod.files)])


class DiedError(Exception):
    """As if the process had ended here."""
