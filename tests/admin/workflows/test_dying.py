"""An admin that dies anywhere: before or after any thing it does, and another goes on."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from tests.admin.agents import Agent, AgentsHere, made_agent
from tests.admin.shelf import Shelf
from tests.support.simulated.memory_records import MemoryRecords

from ostraca_admin.agent_queries import AgentQueries, QuerySettings
from ostraca_admin.audit import Audit, Requester
from ostraca_admin.enclosure_service import EnclosureService
from ostraca_admin.model import (
    VERSION,
    EnclosurePhase,
    EnclosureSpec,
    Operation,
    OperationKind,
    OperationState,
    RegistrationStatus,
    decode,
)
from ostraca_admin.override_service import OverrideService
from ostraca_admin.tenant_service import TenantService
from ostraca_admin.workflow_runner import WorkflowRunner
from ostraca_admin.workflows.erase import ErasureSteps
from ostraca_admin.workflows.steps import RetrySettings, Steps
from ostraca_dpu_agent.volumes import Incarnations
from ostraca_fabric.flash.superblock import decode_superblock
from ostraca_fabric.membership.memory_membership import MemoryMembership
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.extent import PAGE_BYTES, SUPERBLOCK_COPIES
from ostraca_fabric.model.fabric_map import AgentRecord, EnclosureRecord, EnclosureState, FabricMap
from ostraca_fabric.model.ids import ID_BYTES, AgentId, EnclosureId, FabricId, StartId, TenantId
from ostraca_fabric.model.overrides import LiveSettings, Overrides
from ostraca_fabric.model.volume import Layout, VolumeRecord
from ostraca_fabric.ports.records import Record, RecordChange, RecordLock
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.flash_work import FlashAnswer, FlashRequest

_T = TypeVar("_T")

ALICE = Requester("alice", "admin", "PUT /v1/enclosures/shelf-1")
SHELF = EnclosureId("shelf-1")
WITHIN_S = 20.0
FAR = 10_000
STRIDE = 1 if os.environ.get("OSTRACA_EVERY_CELL") else 3
"""Every how many acts an admin dies at: at each in `make soak`."""


class DiedError(asyncio.CancelledError):
    """The process is gone."""


@dataclass
class Life:
    """How many things a process does before it is gone, the last of them done or not."""

    acts: int = FAR
    is_last_done: bool = True

    async def act(self, what: Callable[[], Awaitable[_T]]) -> _T:
        self.acts -= 1
        if self.acts < 0 or (self.acts == 0 and not self.is_last_done):
            raise DiedError
        done = await what()
        if self.acts == 0:
            raise DiedError
        return done


class MortalRecords:
    """Records as a process has them that may die."""

    def __init__(self, records: MemoryRecords, life: Life) -> None:
        self._records = records
        self._life = life
        self.holds: list[RecordLock] = []

    async def get(self, key: str) -> Record | None:
        return await self._records.get(key)

    async def get_many(self, keys: Sequence[str]) -> Mapping[str, Record]:
        return await self._records.get_many(keys)

    async def below(self, prefix: str, *, after: str = "", limit: int = 0) -> tuple[Record, ...]:
        return await self._records.below(prefix, after=after, limit=limit)

    async def write(self, changes: Sequence[RecordChange], *, unchanged: Mapping[str, int]) -> int | None:
        return await self._life.act(lambda: self._records.write(changes, unchanged=unchanged))

    async def hold(self, key: str, value: bytes) -> RecordLock | None:
        async def held() -> RecordLock | None:
            hold = await self._records.hold(key, value)
            if hold is not None:
                self.holds.append(hold)
            return hold

        return await self._life.act(held)

    async def let_go(self, hold: RecordLock) -> None:
        if self._life.acts > 0:  # the dead let nothing go
            await self._records.let_go(hold)

    def changes(self, prefix: str) -> AsyncIterator[tuple[Record | str, ...]]:
        return self._records.changes(prefix)


class MortalMembership(MemoryMembership):
    """Membership as a process has it that may die; the fabric's own is in *fabric*."""

    def __init__(self, fabric: MemoryMembership, life: Life) -> None:
        super().__init__(fabric.map.fabric)
        self.store = fabric.store
        self._fabric = fabric
        self._life = life

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        await self._life.act(
            lambda: self._fabric.put_enclosures(
                enclosures, removed=removed, seen=seen, under=under, force=force
            )
        )

    async def erase_volume(self, seen: VolumeRecord) -> int:
        return await self._life.act(lambda: self._fabric.erase_volume(seen))


class LateMembership(MortalMembership):
    """The same of a process that hears of no change of the map until it asks for them, or for one itself."""

    def __init__(self, fabric: MemoryMembership, old: FabricMap) -> None:
        super().__init__(fabric, Life())
        self._old: FabricMap | None = old
        self._old_volumes = fabric.volumes

    @property
    def map(self) -> FabricMap:
        return self._old or super().map

    async def volume_changes(self) -> AsyncIterator[tuple[VolumeRecord, ...]]:
        yield self._old_volumes if self._old else self.volumes

    async def refresh(self) -> None:
        self._old = None

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        try:
            await super().put_enclosures(enclosures, removed=removed, seen=seen, under=under, force=force)
        finally:
            self._old = None


class PausedMembership(MortalMembership):
    """The same of a process that is paused before it changes the map, while others go on."""

    def __init__(self, fabric: MemoryMembership, others: Callable[[], Awaitable[None]]) -> None:
        super().__init__(fabric, Life())
        self._others = others
        self.has_changed = asyncio.Event()
        """Set once the store has taken the change, or refused it."""

    async def put_enclosures(
        self,
        enclosures: Sequence[EnclosureRecord],
        *,
        removed: Collection[EnclosureId] = (),
        seen: Mapping[EnclosureId, EnclosureRecord | None] | None = None,
        under: RecordLock | None = None,
        force: bool = False,
    ) -> None:
        await self._others()
        try:
            await super().put_enclosures(enclosures, removed=removed, seen=seen, under=under, force=force)
        finally:
            self.has_changed.set()


class MortalHands:
    """Agents as a process asks them that may die."""

    def __init__(self, hands: AgentsHere, life: Life) -> None:
        self._hands = hands
        self._life = life

    async def ask(self, agent: AgentId, ask: FlashRequest, deadline_s: float) -> FlashAnswer:
        return await self._life.act(lambda: self._hands.ask(agent, ask, deadline_s))

    async def status(self, agent: AgentId) -> AgentStatus:
        return await self._hands.status(agent)


class Fabric:
    """What outlives admins."""

    def __init__(self, directory: Path) -> None:
        self.records = MemoryRecords()
        self.membership = MemoryMembership(FabricId(bytes(range(ID_BYTES))))
        self.membership.store.stands = self.records.stands
        self.agents: dict[AgentId, Agent] = {}
        self.shelf = Shelf(directory / SHELF, SHELF, drives=2)
        self._numbers = itertools.count()

    async def begin(self) -> None:
        for name in (AgentId("agent-0"), AgentId("agent-1")):
            self.agents[name] = made_agent(name, lambda: self.membership.map)
            await self.membership.join(AgentRecord(name, StartId(bytes(ID_BYTES)), (f"unix:///{name}",)))
            self.agents[name].incarnations = Incarnations(self.membership, time.monotonic)

    @property
    def tenants(self) -> TenantService:
        audit = Audit(lambda: 0.0, lambda: f"{next(self._numbers):012x}")
        return TenantService(self.records, OverrideService(self.records, audit), audit, volumes=self._volumes)

    async def _volumes(self) -> list[VolumeRecord]:
        return list(self.membership.store.volumes.values())

    @property
    def spec(self) -> EnclosureSpec:
        return EnclosureSpec(VERSION, SHELF, self.shelf.nqn, (self.shelf.controller,))

    @property
    def desk(self) -> EnclosureService:
        return EnclosureService(self.records, Audit(lambda: 0.0, lambda: f"{next(self._numbers):012x}"))

    async def lives(self, life: Life, membership: MortalMembership | None = None) -> bool:
        """Let an admin do long work until it is over, or the admin is; say whether it was over."""
        records = MortalRecords(self.records, life)
        worker = self.worker(records, membership or MortalMembership(self.membership, life), life)
        working = asyncio.ensure_future(worker.run())
        try:
            async with asyncio.timeout(WITHIN_S):
                while life.acts > 0 and not await self._is_over():  # noqa: ASYNC110
                    await asyncio.sleep(0.002)  # it may die, and then tells nobody
        finally:
            working.cancel()
            with suppress(asyncio.CancelledError):
                await working
            for hold in records.holds:  # its lease has run out
                await self.records.let_go(hold)
        return await self._is_over()

    def worker(self, records: MortalRecords, membership: MortalMembership, life: Life) -> WorkflowRunner:
        """Return what an admin does long work with."""
        hands = MortalHands(AgentsHere(self.agents), life)

        async def report_of(_: EnclosureId) -> None:
            return None

        async def volumes() -> tuple[()]:
            return ()

        steps = Steps(
            records,
            membership,
            AgentQueries(membership, hands, QuerySettings(probe_s=0.005)),
            report_of=report_of,
            volumes=volumes,
            new_format_id=lambda: secrets.token_hex(ID_BYTES),
            erasure=ErasureSteps(records, membership, hands, clock=time.monotonic, poll_s=0.01),
            retry=RetrySettings(busy_s=0.01, drain_s=0.01),
        )
        return WorkflowRunner(records, steps, name="admin", unix_s=lambda: 0.0, poll_s=0.01)

    async def operations(self) -> list[Operation]:
        return [decode(each, Operation) for each in await self.records.below(record_keys.OPERATIONS)]

    async def _is_over(self) -> bool:
        return all(operation.state is not OperationState.RUNNING for operation in await self.operations())

    async def check_is_in_the_map(self) -> None:
        """Assert that the enclosure is onboarded, once, with each of its drives."""
        (record,) = self.membership.map.enclosures.values()
        kept = await self.desk.find(SHELF)
        assert kept is not None
        assert kept.status.phase is EnclosurePhase.READY
        assert {drive.nguid for drive in record.drives} == {*self.shelf.drives}
        assert {each.nguid: f"{SHELF}/{each.name}" for each in kept.status.drives} == {
            drive.nguid: drive.id for drive in record.drives
        }
        for drive in kept.status.drives:
            with self.shelf.drives[drive.nguid].open("rb") as file:
                superblock = decode_superblock(file.read(SUPERBLOCK_COPIES * PAGE_BYTES))
            assert (superblock.format_id.hex(), superblock.drive) == (
                drive.format_id,
                f"{SHELF}/{drive.name}",
            )


async def acts_of(directory: Path) -> int:
    """Count what an admin does to onboard an enclosure that nobody disturbs."""
    fabric, life = Fabric(directory), Life()
    await fabric.begin()
    await fabric.desk.register(fabric.spec, ALICE)
    assert await fabric.lives(life)
    await fabric.check_is_in_the_map()
    return FAR - life.acts


@pytest.mark.parametrize("is_last_done", [False, True], ids=["before", "after"])
async def test_an_admin_may_die_at_anything_it_does_to_onboard(tmp_path: Path, *, is_last_done: bool) -> None:
    acts = await acts_of(tmp_path / "undisturbed")
    assert acts > 15
    for number in range(1 + is_last_done, acts + 1, STRIDE):
        fabric = Fabric(tmp_path / f"dies-{number}")
        await fabric.begin()
        await fabric.desk.register(fabric.spec, ALICE)
        await fabric.lives(Life(number, is_last_done=is_last_done))
        assert await fabric.lives(Life()), f"nobody ends what died at {number}"
        (operation,) = await fabric.operations()
        assert [step.state for step in operation.steps] == [OperationState.DONE] * len(operation.steps), (
            operation
        )
        await fabric.check_is_in_the_map()


async def test_an_admin_whose_work_has_passed_on_writes_nothing_of_it(tmp_path: Path) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    await fabric.desk.register(fabric.spec, ALICE)
    passed_on = asyncio.Event()
    ask = AgentsHere.ask

    async def asked(hands: AgentsHere, agent: AgentId, ask_: FlashRequest, deadline_s: float) -> FlashAnswer:
        """While the first agent looks, the lease runs out, and another admin takes the work."""
        answer = await ask(hands, agent, ask_, deadline_s)
        if not passed_on.is_set():
            (work,) = await fabric.records.below(record_keys.WORK)
            await fabric.records.let_go(RecordLock(work.key, work.revision))
            assert await fabric.records.hold(work.key, b"another")
            passed_on.set()
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AgentsHere, "ask", asked)
        living = asyncio.ensure_future(fabric.lives(Life()))
        await passed_on.wait()
        await asyncio.sleep(0.2)  # it would have gone on by now
        living.cancel()
        with suppress(asyncio.CancelledError):
            await living
    (operation,) = await fabric.operations()
    assert [step.state for step in operation.steps[:2]] == [OperationState.RUNNING, OperationState.WAITING]


@pytest.mark.parametrize(
    "kind",
    [
        OperationKind.DRAIN,
        OperationKind.UNDRAIN,
        OperationKind.REPLACE,
        OperationKind.EXPAND,
        OperationKind.RETIRE,
    ],
)
async def test_an_admin_may_die_at_anything_else_it_does(tmp_path: Path, kind: OperationKind) -> None:
    for number, is_last_done in itertools.islice(
        itertools.product(range(1, FAR), (False, True)), 0, None, STRIDE
    ):
        fabric = Fabric(tmp_path / f"{kind.value}-{number}-{is_last_done}")
        await fabric.begin()
        await fabric.desk.register(fabric.spec, ALICE)
        assert await fabric.lives(Life())
        passing = asyncio.ensure_future(_pass_over(fabric)) if kind is OperationKind.DRAIN else None
        await _ask(fabric, kind)
        placement = fabric.membership.map.placement_epoch
        life = Life(number, is_last_done=is_last_done)
        has_lived = await fabric.lives(life)
        assert await fabric.lives(Life())
        if passing is not None:
            await passing
        await _check(fabric, kind)
        if kind is OperationKind.EXPAND:
            assert fabric.membership.map.placement_epoch == placement + 1
        if has_lived and life.acts > 0:
            return


async def test_an_admin_may_die_at_anything_it_does_to_erase(tmp_path: Path) -> None:
    """Every volume gets its next incarnation once, and none is told to be erased that somebody serves."""
    for number, is_last_done in itertools.product(range(1, FAR), (False, True)):
        fabric = Fabric(tmp_path / f"{number}-{is_last_done}")
        await fabric.begin()
        fabric.membership.rule(Overrides(live=LiveSettings(key_ttl_s=0.05, key_ttl_longest_s=0.05)))
        for name in ("a", "b"):
            await fabric.membership.create_volume(_erasable("t", name))
        await fabric.membership.create_volume(_erasable("other", "a"))
        hearing = [asyncio.ensure_future(_hear(agent)) for agent in fabric.agents.values()]
        await fabric.tenants.erase(TenantId("t"), ALICE)
        life = Life(number, is_last_done=is_last_done)
        has_lived = await fabric.lives(life)
        assert await fabric.lives(Life())
        for each in hearing:
            each.cancel()
        (operation,) = await fabric.operations()
        assert [step.state for step in operation.steps] == [OperationState.DONE] * 3, operation
        found = {at: volume.incarnation for at, volume in fabric.membership.store.volumes.items()}
        assert found == {("t", "a"): 2, ("t", "b"): 2, ("other", "a"): 1}
        assert {agent.status().purged for agent in fabric.agents.values()} == {
            fabric.membership.overrides.revision
        }
        if has_lived and life.acts > 0:
            return


async def test_an_admin_that_has_not_heard_of_a_volume_yet_erases_it_with_the_others(tmp_path: Path) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    fabric.membership.rule(Overrides(live=LiveSettings(key_ttl_s=0.05, key_ttl_longest_s=0.05)))
    late = LateMembership(fabric.membership, fabric.membership.map)
    await fabric.membership.create_volume(_erasable("t", "new"))
    hearing = [asyncio.ensure_future(_hear(agent)) for agent in fabric.agents.values()]
    await fabric.tenants.erase(TenantId("t"), ALICE)
    assert await fabric.lives(Life(), late)
    for each in hearing:
        each.cancel()
    assert [volume.incarnation for volume in fabric.membership.volumes] == [2]


def _erasable(tenant: str, name: str) -> VolumeRecord:
    return VolumeRecord(TenantId(tenant), name, Layout("m", "bf16", 16), 4096, is_erasable=True)


async def _hear(agent: Agent) -> None:
    assert agent.incarnations is not None
    await agent.incarnations.run()


@pytest.mark.parametrize("kind", [OperationKind.REPLACE, OperationKind.EXPAND])
async def test_an_admin_whose_map_is_late_loses_no_drive_that_came_in_before(
    tmp_path: Path, kind: OperationKind
) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    await fabric.desk.register(fabric.spec, ALICE)
    assert await fabric.lives(Life())
    old = fabric.membership.map
    came = fabric.shelf.plug_in()
    await fabric.desk.expand(SHELF, ALICE)
    assert await fabric.lives(Life())
    comes = fabric.shelf.plug_in()
    if kind is OperationKind.REPLACE:
        await fabric.desk.replace(SHELF, "drive-0", ALICE, replacement=comes)
    else:
        await fabric.desk.expand(SHELF, ALICE, drives=[comes])
    assert await fabric.lives(Life(), LateMembership(fabric.membership, old))
    assert {came, comes} <= {drive.nguid for drive in fabric.membership.map.enclosures[SHELF].drives}


@pytest.mark.parametrize("kind", [OperationKind.DRAIN, OperationKind.UNDRAIN, OperationKind.RETIRE])
async def test_an_admin_whose_map_is_late_does_what_it_tells(tmp_path: Path, kind: OperationKind) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    old = fabric.membership.map
    await fabric.desk.register(fabric.spec, ALICE)
    assert await fabric.lives(Life())
    if kind is OperationKind.UNDRAIN:
        old = fabric.membership.map
    passing = asyncio.ensure_future(_pass_over(fabric)) if kind is OperationKind.DRAIN else None
    await _ask(fabric, kind)
    assert await fabric.lives(Life(), LateMembership(fabric.membership, old))
    await _check(fabric, kind)
    if passing is not None:
        await passing


async def test_an_admin_paused_while_its_operation_is_cancelled_changes_the_map_no_more(
    tmp_path: Path,
) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    await fabric.desk.register(fabric.spec, ALICE)

    async def retire() -> None:
        await fabric.desk.start(OperationKind.RETIRE, SHELF, ALICE)
        assert await fabric.lives(Life())

    paused = PausedMembership(fabric.membership, retire)
    worker = fabric.worker(MortalRecords(fabric.records, Life()), paused, Life())
    working = asyncio.ensure_future(worker.run())
    async with asyncio.timeout(WITHIN_S):
        await paused.has_changed.wait()
    working.cancel()
    with suppress(asyncio.CancelledError):
        await working
    assert [each.state for each in await fabric.operations()] == [
        OperationState.CANCELLED,
        OperationState.DONE,
    ]
    assert fabric.membership.map.enclosures == {}


async def test_a_drain_that_waits_to_begin_is_cancelled_by_an_undrain(tmp_path: Path) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    await fabric.desk.register(fabric.spec, ALICE)
    assert await fabric.lives(Life())
    await fabric.desk.start(OperationKind.DRAIN, SHELF, ALICE, force=True)
    await fabric.desk.start(OperationKind.UNDRAIN, SHELF, ALICE)
    assert await fabric.lives(Life())
    assert [each.state for each in (await fabric.operations())[1:]] == [
        OperationState.CANCELLED,
        OperationState.DONE,
    ]
    assert fabric.membership.map.enclosures[SHELF].state is EnclosureState.READY


async def test_of_two_last_enclosures_drained_at_once_one_stays_open(tmp_path: Path) -> None:
    fabric = Fabric(tmp_path)
    await fabric.begin()
    other = Shelf(tmp_path / "shelf-2", "shelf-2", drives=1)
    await fabric.desk.register(fabric.spec, ALICE)
    await fabric.desk.register(EnclosureSpec(VERSION, other.name, other.nqn, (other.controller,)), ALICE)
    assert await fabric.lives(Life())

    async def drain_the_other() -> None:
        record = fabric.membership.map.enclosures[EnclosureId(other.name)]
        await fabric.membership.put_enclosures([record.drained()])

    await fabric.desk.start(OperationKind.DRAIN, SHELF, ALICE)
    assert await fabric.lives(Life(), PausedMembership(fabric.membership, drain_the_other))
    drain = (await fabric.operations())[-1]
    assert (drain.state, "no other enclosure is open" in drain.message) == (OperationState.FAILED, True)
    assert fabric.membership.map.enclosures[SHELF].state is EnclosureState.READY


async def _pass_over(fabric: Fabric) -> None:
    """Let earlier placements end once the enclosure is draining."""
    async for fabric_map in fabric.membership.changes():
        if fabric_map.enclosures[SHELF].state is EnclosureState.DRAINING:
            for record in fabric_map.earlier_placements:
                await fabric.membership.retire_placement(record.epoch)
            return


async def _ask(fabric: Fabric, kind: OperationKind) -> None:
    match kind:
        case OperationKind.DRAIN:
            await fabric.desk.start(OperationKind.DRAIN, SHELF, ALICE, force=True)
        case OperationKind.UNDRAIN:
            await fabric.desk.start(OperationKind.DRAIN, SHELF, ALICE, force=True)
            passing = asyncio.ensure_future(_pass_over(fabric))
            assert await fabric.lives(Life())
            await passing
            await fabric.desk.start(OperationKind.UNDRAIN, SHELF, ALICE)
        case OperationKind.REPLACE:
            fabric.shelf.plug_in()
            await fabric.desk.replace(SHELF, "drive-0", ALICE)
        case OperationKind.EXPAND:
            fabric.shelf.plug_in()
            fabric.shelf.plug_in()
            await fabric.desk.expand(SHELF, ALICE)
        case _:
            await fabric.desk.start(OperationKind.RETIRE, SHELF, ALICE, force=True)


async def _check(fabric: Fabric, kind: OperationKind) -> None:
    last = (await fabric.operations())[-1]
    assert (last.kind, last.state) == (kind, OperationState.DONE), last
    record = fabric.membership.map.enclosures.get(SHELF)
    if kind is OperationKind.RETIRE:
        assert record is None
        for prefix in (record_keys.SPECS, record_keys.STATUSES, record_keys.NGUIDS, record_keys.WORK):
            assert await fabric.records.below(prefix) == ()
        assert await fabric.records.get(record_keys.retired(SHELF)) is not None
        return
    assert record is not None
    kept = await fabric.records.get(record_keys.status(SHELF))
    assert kept is not None
    status: Any = decode(kept, RegistrationStatus)
    assert {drive.id for drive in record.drives} == {f"{SHELF}/{each.name}" for each in status.drives}
    assert record.state is (EnclosureState.DRAINING if kind is OperationKind.DRAIN else EnclosureState.READY)
    assert status.phase is (EnclosurePhase.DRAINED if kind is OperationKind.DRAIN else EnclosurePhase.READY)
    if kind is OperationKind.REPLACE:
        assert {each.name for each in status.drives} == {"drive-1", "drive-2"}
    if kind is OperationKind.EXPAND:
        assert [each.name for each in status.drives] == [f"drive-{number}" for number in range(4)]
        await fabric.check_is_in_the_map()
    assert not any(each.is_coming for each in status.drives)
    used = await fabric.records.below(record_keys.NGUIDS)
    uses = {record.key.removeprefix(record_keys.NGUIDS) for record in used}
    assert uses == {each.nguid for each in status.drives}
