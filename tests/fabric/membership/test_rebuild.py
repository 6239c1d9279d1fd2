"""`ostraca fabric rebuild --etcd` over real etcd.

It dies at each of its writes, is repeated, and is watched by who runs meanwhile. The command runs in a
thread, and each of its writes waits for the test.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.cli.tools.doctor.volume_drives import record_volumes
from tests.contract.membership.membership_contract import A, agent
from tests.fabric.membership.nodes import Cluster

from ostraca_cli.composition.state import write_key
from ostraca_cli.program import main
from ostraca_dpu_agent.volumes import Volumes
from ostraca_enclosure.files import FileEnclosure
from ostraca_fabric.errors import ChangedError, RefusedError, WrongStoreError
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import EtcdClient
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.membership.etcd.membership import EtcdMembership
from ostraca_fabric.membership.etcd.rebuild import FabricRepair, Rebuilding
from ostraca_fabric.membership.etcd.schema.keys import EtcdKeys
from ostraca_fabric.membership.etcd.schema.records import encode_meta, encode_rebuild
from ostraca_fabric.membership.etcd.schema.view import RollbackDetection
from ostraca_fabric.membership.etcd.store import fabric_at
from ostraca_fabric.model.ids import EnclosureId, FabricId, StartId, TenantId
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.tables.digests import fabric_key_check
from ostraca_fabric.wire.messages import OpenVolume

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.slow

FABRIC, OTHER_FABRIC = FabricId(b"f" * 16), FabricId(b"o" * 16)
KEY = b"k" * 32
TENANT = TenantId("t")
PLAIN = VolumeRecord(TENANT, "plain", Layout("m", "bf16", 16), 4096)
ERASED = replace(PLAIN, name="erased", is_erasable=True).erased()
DRIVE_BYTES = 3 << 20
HEARD_WITHIN_S = 20.0


class DiedError(Exception):
    """As if the process had ended here."""


Txn = Callable[..., Awaitable[rpc.TxnResponse]]
OnWrite = Callable[[list[bytes], Callable[[], Awaitable[rpc.TxnResponse]]], Awaitable[rpc.TxnResponse]]
"""Given the keys that a transaction writes, and what does it."""


@dataclass
class Place:
    """Where a fabric's drives lie, and where its records in etcd."""

    etcd: Cluster
    keys: EtcdKeys
    files: Path

    @property
    def settings(self) -> EtcdSettings:
        return EtcdSettings(self.etcd.endpoints, operation_timeout_s=5)

    async def rebuild(self, *more: str) -> int:
        """Run the command in a thread, and return its exit code."""
        where = ("--etcd", self.etcd.endpoints[0], "--prefix", self.keys.text, "--files", str(self.files))
        return await asyncio.to_thread(main, ["fabric", "rebuild", *where, *more])

    def lose(self) -> None:
        self.etcd.ctl("del", "--prefix", self.keys.text)

    def put(self, below: str, value: str = "{}") -> None:
        self.etcd.ctl("put", f"{self.keys.text}{below}", value)

    def listed(self) -> dict[str, Any]:
        """Return what lies below the prefix: each record by its key."""
        lines = iter(self.etcd.ctl("get", "--prefix", self.keys.text).splitlines())
        return {key.removeprefix(self.keys.text): json.loads(next(lines)) for key in lines}

    def incarnations(self) -> dict[str, int]:
        """Return in which incarnation each volume is there."""
        return {
            record["name"]: record["incarnation"]
            for key, record in self.listed().items()
            if key.startswith("volumes/")
        }

    @property
    def drives(self) -> list[Path]:
        return [self.files / f"enclosure-{number}" / "drive-0.img" for number in range(2)]


@pytest.fixture
def place(etcd: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """Two enclosures of one drive each, of a fabric that etcd has lost. One drive is behind the other."""
    name = "".join(letter if letter.isalnum() else "-" for letter in request.node.name.lower())
    return place_in(etcd, EtcdKeys(f"/rebuild/{name[-60:].strip('-')}"), tmp_path)


@pytest.fixture
def own_place(fresh_etcd: Cluster, tmp_path: Path) -> Place:
    """Return the same in a separate etcd."""
    return place_in(fresh_etcd, EtcdKeys("/rebuild"), tmp_path)


def place_in(etcd: Cluster, keys: EtcdKeys, folder: Path) -> Place:
    place = Place(etcd, keys, folder / "files")
    place.files.mkdir()
    for drive in place.drives:
        FileEnclosure(
            EnclosureId(drive.parent.name), drive.parent, fabric=FABRIC, drives=1, drive_bytes=DRIVE_BYTES
        ).prepare()
    record_volumes(place.drives[0], PLAIN, replace(ERASED, incarnation=1))
    record_volumes(place.drives[1], ERASED)
    write_key(place.files / "fabric.key", KEY)
    return place


Opens = Callable[..., Awaitable[EtcdMembership]]


@pytest.fixture
async def opened(request: pytest.FixtureRequest) -> AsyncIterator[Opens]:
    """Yield a function that opens memberships like separate processes; close them in the end."""
    async with AsyncExitStack() as stack:

        async def open_one(
            there: Place | None = None, *, fabric: FabricId = FABRIC, begin: bool = False
        ) -> EtcdMembership:
            at = there or request.getfixturevalue("place")
            membership = await EtcdMembership.open(
                fabric, at.settings, dice=random.Random(9), keys=at.keys, begin=begin
            )
            stack.push_async_callback(membership.close)
            return membership

        yield open_one


@contextmanager
def writes_of_the_command(on_write: OnWrite) -> Iterator[None]:
    """Have *on_write* do each write of the command that runs in another thread than the test."""
    test, plain = threading.current_thread(), EtcdClient.txn

    async def txn(
        self: EtcdClient,
        compare: Iterable[rpc.Compare],
        success: Iterable[rpc.RequestOp],
        failure: Iterable[rpc.RequestOp] = (),
    ) -> rpc.TxnResponse:
        asked = list(compare), list(success), list(failure)
        written = [each.request_put.key for each in asked[1] if each.HasField("request_put")]
        if not written or threading.current_thread() is test:
            return await plain(self, *asked)
        return await on_write(written, lambda: plain(self, *asked))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(EtcdClient, "txn", txn)
        yield


async def died_at(place: Place, number: int, *options: str, is_done: bool) -> bool:
    """Run the command until it dies at this one of its writes, which *is_done*, or not.

    Say whether it died before it ended.
    """
    count = 0

    async def dies(_: list[bytes], write: Callable[[], Awaitable[rpc.TxnResponse]]) -> rpc.TxnResponse:
        nonlocal count
        count += 1
        if count <= number:
            return await write()
        if is_done:
            await write()
        raise DiedError

    with writes_of_the_command(dies):
        try:
            assert await place.rebuild(*options) == 0
        except DiedError:
            return True
    return False


# ----------------------------------------------------------------------------------- ended, and repeated


@pytest.mark.parametrize("is_done", [False, True], ids=["not-done", "done"])
async def test_wherever_a_rebuild_dies_it_is_repeated_plainly_and_nothing_is_half_there(
    place: Place, is_done: bool
) -> None:
    assert await place.rebuild() == 0
    whole, number = place.listed(), 0
    whole["meta"].pop("rebuilt_unix_s")
    assert place.incarnations() == {"plain": 1, "erased": 2}
    assert [key.partition("/")[0] for key in whole] == [
        *(2 * ["enclosures"]),
        *(2 * ["grants"]),
        *("meta", "placement"),
        *(2 * ["volumes"]),
    ]
    place.lose()
    while await died_at(place, number, is_done=is_done):
        if "meta" not in place.listed():
            assert await place.rebuild() == 0
        left = place.listed()
        assert left["meta"].pop("rebuilt_unix_s") > 0
        assert left == whole
        place.lose()
        number += 1
    assert number == len(whole) + 1, "each of its writes, and the one that takes the prefix"


async def test_a_rebuild_that_dies_again_and_again_gets_on(place: Place) -> None:
    """Each try takes the prefix over, writes one record more, and dies."""
    tries = 0
    while "meta" not in place.listed():
        assert await died_at(place, 1, is_done=True)
        tries += 1
    assert tries == len(place.listed()), "nothing is written twice"
    assert place.incarnations() == {"plain": 1, "erased": 2}
    assert await place.rebuild() == 2


async def test_wherever_a_rebuild_with_a_new_key_dies_the_key_is_kept_that_its_fabric_has(
    place: Place,
) -> None:
    number, key = 0, place.files / "fabric.key"
    key.unlink()
    while await died_at(place, number, "--new-key", is_done=True):
        if "meta" not in place.listed():
            assert await place.rebuild("--new-key") == 0
        assert place.listed()["meta"]["key_check"] == fabric_key_check(key.read_bytes(), FABRIC)
        place.lose()
        key.unlink()
        number += 1
    assert number > 1


async def test_a_rebuild_is_refused_without_a_key_written_for_it(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await place.rebuild() == 0
    (place.files / "fabric.key").unlink()
    assert await place.rebuild("--new-key") == 2
    assert "nothing needs a rebuild" in capsys.readouterr().err
    assert await place.rebuild("--new-key", "--force") == 1
    assert "has another fabric key" in capsys.readouterr().err
    assert not (place.files / "fabric.key").exists()


# --------------------------------------------------------------------------------- what others see meanwhile


async def test_an_agent_that_runs_believes_nothing_of_it_before_it_is_whole_and_then_all_of_it(
    place: Place, opened: Opens
) -> None:
    await place.rebuild()
    running = await opened()
    await running.join(agent(A))
    volumes = Volumes(running, KEY)
    known, last = running.map, await anext(running.volume_changes())
    place.lose()
    loop, seen = asyncio.get_running_loop(), list[list[bytes]]()

    async def incarnation(volume: VolumeRecord) -> int:
        """As a worker makes it that opens it."""
        asked = OpenVolume(1, volume.name, volume.layout, volume.block_bytes, create=True)
        return (await volumes.open(volume.tenant, asked)).record.incarnation

    async def look(written: list[bytes], revision: int) -> None:
        async with asyncio.timeout(HEARD_WITHIN_S):
            while running._follower.view.revision < revision:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        seen.append(written)
        assert [await incarnation(each) for each in (PLAIN, ERASED)] == [1, 2]
        if place.keys.meta() in written:
            assert running.map.enclosures == known.enclosures
            assert not running.map.agents
            assert set(await anext(running.volume_changes())) == set(last)
        else:
            assert running.map is known
            assert "has lost fabric" in running.trouble
            with pytest.raises(RefusedError, match="has lost fabric"):
                await incarnation(replace(PLAIN, name="new"))
            with pytest.raises(WrongStoreError, match="has lost fabric"):
                await running.join(agent(A))
            with pytest.raises(WrongStoreError, match="there is no fabric"):
                await opened()

    async def tell(written: list[bytes], write: Callable[[], Awaitable[rpc.TxnResponse]]) -> rpc.TxnResponse:
        done = await write()
        looked = asyncio.run_coroutine_threadsafe(look(written, done.header.revision), loop)
        await asyncio.wrap_future(looked)
        return done

    with writes_of_the_command(tell):
        assert await place.rebuild() == 0
    assert seen[0] == [place.keys.rebuild()]
    assert seen[-1] == [place.keys.meta()]
    assert place.incarnations() == {"plain": 1, "erased": 2}


def remade(etcd: Cluster, kept: Path | None = None) -> None:
    """Put a new and empty etcd in place of what there is, or one of the data *kept*."""
    (node,) = etcd.nodes
    etcd.kill()
    shutil.rmtree(node.folder / node.name)
    if kept is not None:
        shutil.copytree(kept, node.folder / node.name)
    etcd.start()


async def said_by(membership: EtcdMembership, says: str, *, is_joined: bool = True) -> None:
    """Wait until its trouble says so, or, if that is empty, until it has none.

    And until its map has the agent or, *is_joined* being false, has it no more.
    """

    def is_said() -> bool:
        return says in membership.trouble and bool(membership.trouble) == bool(says)

    async with asyncio.timeout(HEARD_WITHIN_S):
        while not (is_said() and (A in membership.map.agents) == is_joined):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_seen_empty", [True, False], ids=["seen-empty", "seen-rebuilt"])
async def test_who_sees_etcd_lost_and_rebuilt_is_told_to_rebuild_and_then_nothing_more(
    own_place: Place, opened: Opens, caplog: pytest.LogCaptureFixture, is_seen_empty: bool
) -> None:
    for _ in range(3):  # so the revision is higher than that of the rebuild to come
        assert await own_place.rebuild() == 0
        own_place.lose()
    assert await own_place.rebuild() == 0
    running = await opened(own_place)
    await running.join(agent(A))
    caplog.clear()
    remade(own_place.etcd)
    if is_seen_empty:
        await said_by(running, "has lost fabric")
        assert await own_place.rebuild() == 0
    else:  # this loop stands meanwhile
        rebuilding = threading.Thread(target=asyncio.run, args=(own_place.rebuild(),))
        rebuilding.start()
        rebuilding.join()
    await said_by(running, "", is_joined=False)
    await running.join(agent(A))
    assert running.trouble == ""
    assert "stop all agents" not in caplog.text
    assert ("fabric rebuild --etcd" in caplog.text) == is_seen_empty


async def test_a_rebuild_that_a_backup_brings_back_does_not_tell_what_was_granted_since(
    own_place: Place, opened: Opens, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = own_place.etcd.nodes
    assert await own_place.rebuild() == 0
    running = await opened(own_place)
    own_place.etcd.kill()
    shutil.copytree(node.folder / node.name, tmp_path / "backup")
    own_place.etcd.start()
    await running.join(agent(A))
    remade(own_place.etcd, tmp_path / "backup")
    await said_by(running, "stop all agents for late_write_s", is_joined=False)
    assert "the map of the fabric may be old: etcd has gone back" in caplog.text
    own_place.put("agents/new", '{"version":9,"agent":"new"}')
    await said_by(running, f"; besides, {own_place.keys.text}agents/new is left out", is_joined=False)
    assert "stop all agents" in running.trouble
    own_place.lose()
    await said_by(running, "has lost fabric", is_joined=False)
    assert "stop all agents" not in running.trouble
    assert await own_place.rebuild() == 0
    await said_by(running, "", is_joined=False)


def test_a_rebuild_that_is_older_than_one_that_was_seen_is_none_to_go_by() -> None:
    past = RollbackDetection()
    first, second, third = (encode_meta(FABRIC, rebuilt_unix_s=unix_s) for unix_s in (100.0, 200.0, 300.0))
    past.take(second)
    assert past.trouble == ""
    past.note_went_back("its revision is 7, and was 9")
    for meta in (first, second, encode_meta(FABRIC)):
        past.take(meta)
        assert "(its revision is 7, and was 9)" in past.trouble
    past.take(third)
    assert past.trouble == ""


# ------------------------------------------------------------------------------------- what else lies there


async def test_what_an_earlier_try_left_becomes_what_drives_say_now_and_no_incarnation_lower(
    place: Place,
) -> None:
    again = replace(ERASED, incarnation=5)
    record_volumes(place.drives[1], again)
    gone = place.files / "enclosure-2"
    FileEnclosure(
        EnclosureId("enclosure-2"), gone, fabric=FABRIC, drives=1, drive_bytes=DRIVE_BYTES
    ).prepare()
    all_but_meta = 1 + 3 + 2 + 3 + 1
    assert await died_at(place, all_but_meta, is_done=False)
    assert {key for key in place.listed() if key.startswith("enclosures/")} == {
        f"enclosures/enclosure-{number}" for number in range(3)
    }
    shutil.rmtree(gone)
    record_volumes(place.drives[0], replace(PLAIN, is_erasable=True).erased())
    record_volumes(place.drives[1], ERASED)
    assert await place.rebuild() == 0
    assert {key for key in place.listed() if key.startswith("enclosures/")} == {
        f"enclosures/enclosure-{number}" for number in range(2)
    }
    assert place.incarnations() == {"plain": 2, "erased": 5}
    assert place.listed()["placement"] == {"version": 1, "epoch": 2}


async def test_a_dry_run_says_that_a_rebuild_has_not_ended_and_a_fabric_is_begun_elsewhere(
    place: Place, opened: Opens, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await died_at(place, 3, is_done=False)
    left = place.listed()
    assert await place.rebuild("--dry-run") == 0
    assert "but an unfinished rebuild, to be continued" in capsys.readouterr().out
    with pytest.raises(WrongStoreError, match="perhaps of an unfinished rebuild"):
        await opened(fabric=OTHER_FABRIC, begin=True)
    assert place.listed() == left
    assert await place.rebuild() == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry"])
async def test_a_rebuild_of_another_fabric_that_has_not_ended_is_left_as_it_is(
    place: Place, capsys: pytest.CaptureFixture[str], dry: tuple[str, ...]
) -> None:
    async with rebuilding(place, fabric=OTHER_FABRIC) as other:
        await other.take()
    left = place.listed()
    assert await place.rebuild(*dry) == 1
    said = capsys.readouterr().err
    assert f"an unfinished rebuild of another fabric, {OTHER_FABRIC.hex()}" in said
    assert f"etcdctl del --prefix {place.keys.text}" in said
    assert place.listed() == left


@pytest.mark.parametrize("more", [(), ("--force",), ("--dry-run",)], ids=["", "force", "dry"])
async def test_what_nobody_knows_the_fabric_of_is_left_as_it_is(
    place: Place, capsys: pytest.CaptureFixture[str], more: tuple[str, ...]
) -> None:
    place.put("volumes/t/erased")
    assert await place.rebuild(*more) == 1
    assert (
        f"but keys of an unknown fabric are, such as {place.keys.text}volumes/t/erased"
        in capsys.readouterr().err
    )
    assert place.listed() == {"volumes/t/erased": {}}


@pytest.mark.parametrize("word", ["meta", "rebuild"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry"])
async def test_nobody_is_advised_to_delete_a_fabric_that_lies_further_down(
    place: Place, capsys: pytest.CaptureFixture[str], dry: tuple[str, ...], word: str
) -> None:
    place.put(f"live/{word}", json.dumps({"version": 1, "fabric": OTHER_FABRIC.hex(), "start": "00" * 16}))
    for left in ({}, {"rebuild": encode_rebuild(OTHER_FABRIC, StartId(b"1" * 16)).decode()}):
        for key, value in left.items():
            place.put(key, value)
        assert await place.rebuild(*dry) == 1
        said = capsys.readouterr().err
        assert f"another fabric lies under {place.keys.text}live/" in said
        assert "etcdctl del" not in said
        assert set(place.listed()) == {f"live/{word}", *left}


@pytest.mark.parametrize("word", ["meta", "rebuild"])
@pytest.mark.parametrize("dry", [(), ("--dry-run",)], ids=["", "dry"])
async def test_nothing_is_rebuilt_under_another_fabric_s_prefix(
    place: Place, capsys: pytest.CaptureFixture[str], dry: tuple[str, ...], word: str
) -> None:
    upper = replace(place, keys=EtcdKeys(f"{place.keys.text}upper"))
    upper.put(word)
    lower = replace(place, keys=EtcdKeys(f"{upper.keys.text}lower"))
    assert await lower.rebuild(*dry) == 1
    assert f"a fabric lies under {upper.keys.text} of etcd" in capsys.readouterr().err
    assert lower.listed() == {}


# ------------------------------------------------------------------------------------------ several tries


def rebuilding(place: Place, start: bytes = b"1", fabric: FabricId = FABRIC) -> Rebuilding:
    return Rebuilding(
        fabric,
        place.settings,
        keys=place.keys,
        dice=random.Random(1),
        start=StartId(start * 16),
        unix_s=float(start),
    )


async def test_who_is_overtaken_writes_no_more(place: Place) -> None:
    async with rebuilding(place, b"1") as first, rebuilding(place, b"2") as second:
        await first.take()
        await first.write((), [PLAIN])
        await second.take()
        with pytest.raises(ChangedError, match="another rebuild of fabric 6666"):
            await first.write((), [PLAIN, ERASED])
        with pytest.raises(ChangedError, match="another rebuild of fabric 6666"):
            await first.begin("c0de")
        await second.write((), [ERASED])
        assert place.incarnations() == {"plain": 1, "erased": 2}
        await second.begin("c0de")
        assert (place.listed()["meta"]["key_check"], "rebuild" in place.listed()) == ("c0de", False)
        with pytest.raises(ChangedError):
            await first.begin("another")
        with pytest.raises(WrongStoreError, match="a fabric was begun"):
            await first.take()


async def test_two_that_begin_at_once_do_not_both_have_the_prefix(place: Place) -> None:
    async with rebuilding(place, b"1") as first, rebuilding(place, b"2") as second:
        await asyncio.gather(first.take(), second.take())
        done = await asyncio.gather(first.begin("1"), second.begin("2"), return_exceptions=True)
        assert [type(each) for each in done if each is not None] == [ChangedError]
        assert place.listed()["meta"]["key_check"] == ("1" if done[0] is None else "2")


async def test_each_answer_may_be_lost_once(place: Place) -> None:
    async with rebuilding(place) as once:
        txn = once._client.txn

        async def twice(compare: Sequence[rpc.Compare], success: Sequence[rpc.RequestOp]) -> rpc.TxnResponse:
            await txn(compare, success)
            return await txn(compare, success)

        once._client.txn = twice  # type: ignore[method-assign, assignment]
        await once.take()
        await once.write((), [PLAIN, ERASED])
        await once.begin("c0de")
    assert set(place.listed()) == {"meta", "placement", "volumes/t/erased", "volumes/t/plain"}
    assert await fabric_at(place.keys, place.settings, dice=random.Random(1)) == FABRIC


# ----------------------------------------------------------------------------------- a fabric that is there


async def test_a_volume_that_was_made_again_is_raised_when_told_to_and_agents_hear_of_it(
    place: Place, opened: Opens, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await opened(begin=True)
    other = Layout("another", "bf16", 16)
    made = replace(ERASED, incarnation=1, is_erasable=False, layout=other)
    higher = replace(PLAIN, incarnation=7, is_erasable=True)
    await running.create_volume(made)
    await running.create_volume(higher)
    before = running.overrides.revision
    assert await place.rebuild() == 2
    raised = "raised: volume t/erased from incarnation 1 to 2, by the drives"
    assert await place.rebuild("--dry-run") == 0
    assert f"with --force would be {raised}" in capsys.readouterr().out
    assert await place.rebuild("--dry-run", "--force") == 0
    assert f"\nwould be {raised}" in capsys.readouterr().out
    assert place.incarnations() == {"plain": 7, "erased": 1}
    assert await place.rebuild("--force") == 0
    assert "RAISED: volume t/erased from incarnation 1 to 2" in capsys.readouterr().out
    await running.refresh_overrides()
    assert running.overrides.revision > before
    after = {each.name: each for each in await anext(running.volume_changes())}
    assert after == {"plain": higher, "erased": replace(made, incarnation=2, is_erasable=True)}
    assert await place.rebuild("--force") == 0
    assert "RAISED" not in capsys.readouterr().out


async def test_what_a_fabric_lacks_is_added_when_told_to(place: Place, opened: Opens) -> None:
    await opened(begin=True)
    assert await place.rebuild("--force") == 0
    there = place.listed()
    assert place.incarnations() == {"plain": 1, "erased": 2}
    assert {key.partition("/")[0] for key in there} == {
        *("meta", "enclosures", "grants", "placement", "volumes")
    }
    assert [grant["whole"] for key in there if key.startswith("grants/") for grant in there[key]["unretired"]]


async def test_an_erasure_meanwhile_is_not_taken_back_and_an_answer_may_be_lost(
    place: Place, opened: Opens
) -> None:
    running = await opened(begin=True)
    await running.create_volume(replace(ERASED, incarnation=1))
    lost = FabricRepair(FABRIC, place.settings, keys=place.keys, dice=random.Random(1))
    write = lost._store.write

    async def late(*given: Any, **named: Any) -> int | None:
        lost._store.write = write  # type: ignore[method-assign]
        for _ in range(2):
            await running.erase_volume(replace(ERASED, incarnation=place.incarnations()["erased"]))
        return await write(*given, **named)

    lost._store.write = late  # type: ignore[method-assign]
    assert [each.incarnation for each in await lost.raise_volumes([ERASED])] == [1]
    assert place.incarnations() == {"erased": 3}

    async def twice(*given: Any, **named: Any) -> int | None:
        await write(*given, **named)
        return await write(*given, **named)

    lost._store.write = twice  # type: ignore[method-assign]
    assert [each.incarnation for each in await lost.raise_volumes([replace(ERASED, incarnation=4)])] == [3]
    assert place.incarnations() == {"erased": 4}
    await lost.close()
