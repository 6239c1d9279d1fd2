"""A worker: the SDK's pure core and ledger, on one virtual loop over the agents' real wire.

It keeps to the agent of its own host while that answers, and goes to another one when it does not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.world import blocks
from tests.simulation.fabric.world.agent_memory import AgentMemories, MemoryGet, MemoryReader
from tests.simulation.fabric.world.blocks import Blocks, Version
from tests.simulation.fabric.world.direct import HostPaths, OwnBlock, OwnGet, SimulatedReader
from tests.simulation.fabric.world.inline import InlineEnd
from tests.simulation.fabric.world.links import FOREVER_S, Link, Links
from tests.simulation.fabric.world.regions import LentRows, WatchedRegion
from tests.simulation.fabric.world.worker_memory import OfferedMemories, OfferedMemory
from tests.simulation.shard.model import ViolationError
from tests.support.simulated.simulated_transport import SimulatedArenaEnd, SimulatedPlane

from ostraca._protocol.ledger import Ledger
from ostraca._protocol.operations import (
    NOT_STARTED_CODES,
    BlockOperation,
    Disconnected,
    Event,
    Finish,
    GetOperation,
    ReadExtents,
    Send,
    Ticked,
    Verified,
    Verify,
)
from ostraca_fabric.connection import ClientConnection, Network
from ostraca_fabric.errors import ConnectError, MalformedError, RefusedError
from ostraca_fabric.model.outcome import Ack, BlockState, Reason
from ostraca_fabric.tables.digests import CheckState, are_good, derive_keys, tag_seeds, tags_of
from ostraca_fabric.tables.slots import SlotPool
from ostraca_fabric.wire import codec
from ostraca_fabric.wire.codec import Outcomes
from ostraca_fabric.wire.handshake import DIRECT, LEAVING, MEMORY, REGIONS
from ostraca_fabric.wire.messages import (
    WIRE_VERSION,
    WIRE_VERSION_OLDEST,
    AnnouncedDrive,
    Cancel,
    DirectDrives,
    ExtentsRead,
    Failure,
    Fetch,
    Get,
    GetDone,
    GetExtents,
    GetProgress,
    Hello,
    Leaving,
    Lookup,
    Put,
    PutDone,
    RegionsOffer,
    Settled,
)

if TYPE_CHECKING:
    from tests.simulation.fabric.world.blocks import Volume

    from ostraca._protocol.operations import Effect
    from ostraca_fabric.connection.client import Aside
    from ostraca_fabric.model.chain import Span
    from ostraca_fabric.model.ids import TenantId
    from ostraca_fabric.wire.messages import Answer, Request

MIB = 1 << 20
SLOT_BYTES = blocks.BLOCK_BYTES
_ARENA_BYTES = 4 * MIB

Handed = dict[int, bytes]


def token_of(tenant: TenantId) -> str:
    """Return what a tenant's workers show."""
    return f"token of {tenant}"


@dataclass
class Ended:
    """How an operation ended for its caller: one state and reason for each block."""

    states: list[int]
    reasons: list[int]
    handed: Handed
    agent: str
    own: set[int] = field(default_factory=set)
    """Blocks that the agent left to the worker to read."""

    unread: set[int] = field(default_factory=set)
    """Those of them whose reads had not ended."""

    was_slow: bool = False
    """Whether some of these reads were."""

    is_in_place: bool = False
    """Whether the blocks went from or to rows of the worker's region."""

    withheld: int = 0
    """Rows that something may land in after the end."""

    def take(self, rows: list[int], rest: Ended) -> None:
        """Take the end of blocks that were asked for again."""
        for row, state, reason in zip(rows, rest.states, rest.reasons, strict=True):
            self.states[row], self.reasons[row] = state, reason
        self.handed |= rest.handed


class Worker:
    """One process of one tenant, with that one's volumes open.

    All methods are called in it, each with blocks of one volume.
    """

    def __init__(
        self,
        name: str,
        addresses: list[str],
        *,
        tenant: TenantId,
        its: Blocks,
        network: Network,
        plane: SimulatedPlane,
        dice: random.Random,
        is_inline: bool = False,
        wire_newest: int = WIRE_VERSION,
        is_told: bool = True,
        host_paths: HostPaths | None = None,
        memories: AgentMemories | None = None,
        worker_memories: OfferedMemories | None = None,
        is_lied_to: bool = False,
        regions: float = 0.0,
        pushed: float = 0.0,
    ) -> None:
        self.name = name
        self.tenant = tenant
        self.is_told = is_told and len(addresses) > 1
        """Whether agents that are about to end tell it."""

        self._blocks = its
        client = dice.randbytes(16)
        self._memory = bytearray(_ARENA_BYTES)
        slots = SlotPool(_ARENA_BYTES, MIB)
        self._inline = InlineEnd(self._memory, slots) if is_inline else None
        """Where blocks cross in frames of the connection."""

        self.arena = self._inline or self._planed(plane)
        self.ledger = Ledger(slots, quarantine_bytes_max=_ARENA_BYTES // 2)
        self.violations: list[str] = []
        self.on_bad_read: Callable[[int, OwnBlock, float, float], None] = lambda *_: None
        """Told of a block that it has read itself and that its tag does not fit, and when the get began and
        is to end."""

        self._is_lied_to = is_lied_to
        self._holders: dict[int, int] = {}
        """By slot: the request that used it last."""

        self._puts: set[object] = set()

        paths = [] if host_paths is None else host_paths.opened()
        self.direct: SimulatedReader | None = None
        if host_paths is not None and paths:
            memory = self.arena.array
            self.direct = SimulatedReader(paths, host_paths, memory, self._holder_of, self._check_holder)
        self._memories = memories if memories is not None and memories.are_read() else None
        self.under_copy = Counter[int]()
        """Slots that copies from an agent's memory are under way to."""

        self.region: WatchedRegion | None = None
        """Where some blocks go from and to."""

        share = regions if is_inline else pushed
        if share and self.direct is None:
            self.region = WatchedRegion(random.Random(client), share, is_lied_to=is_lied_to and not is_inline)
            self.region.on_free = lambda addresses: self._hold(addresses, 0)
        self._offered: OfferedMemory | None = None
        """What its agent may copy puts out of."""

        if self._memories is not None and worker_memories is not None:
            rows = () if self.region is None else (self.region.memory,)
            self._offered = OfferedMemory(client, self.arena.array, *rows)
            worker_memories.offer(self._offered)
        self._mail: dict[int, asyncio.Queue[Event]] = {}
        self._requests = 0
        self._asking: set[asyncio.Task[None]] = set()
        self._links = Links(
            Hello(
                version_oldest=WIRE_VERSION_OLDEST,
                version_newest=wire_newest,
                role="worker",
                tenant=tenant,
                token=token_of(tenant),
                name=name,
                client=client,
                features=(
                    *((LEAVING,) if self.is_told else ()),
                    *((DIRECT,) if self.direct else ()),
                    *((MEMORY,) if self._memories else ()),
                    *((REGIONS,) if self.region is not None else ()),
                ),
                memory=None if self._offered is None else self._offered.offer,
            ),
            addresses,
            [volume for volume in its.volumes if volume.tenant == tenant],
            network=network,
            arena=self.arena,
            ledger=self.ledger,
            on_aside=self._on_aside,
            spawn=self._spawn,
            next_request=self._next_request,
        )

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _planed(self, plane: SimulatedPlane) -> SimulatedArenaEnd:
        """Return an arena on the data plane, of which every landing is watched."""
        arena = SimulatedArenaEnd(plane, memoryview(self._memory), chunk_bytes=MIB)
        arena.on_submitted, arena.on_landing = self._holder_of, self._landing
        return arena

    # --------------------------------------------------------------------------------------- operations

    async def get(self, numbers: list[int], deadline_s: float) -> Ended:
        until_s = self._now_s + deadline_s
        link = await self._links.linked(until_s)
        slots = None if link is None else self._taken(len(numbers))
        if link is None or slots is None:
            return self._declined(numbers)
        self._announce(link)
        return await self._get(link, numbers, slots, until_s)

    async def _get(
        self,
        link: Link,
        numbers: list[int],
        slots: NDArray[np.int64],
        until_s: float,
        *,
        is_again: bool = False,
    ) -> Ended:
        volume, spans = self._blocks.volume_of_all(numbers), self._blocks.spans(numbers)
        lengths, seeds = self._lengths_and_seeds(volume, numbers, spans)
        request = self._next_request()
        self._hold(slots, request)
        lent = self._bound(link, request, slots, lengths, is_written=True)
        is_pushed = lent is not None and self._inline is None
        if lent is not None and is_pushed:
            lent.writes.begin(request, np.arange(len(numbers)))
        message = Get(
            request,
            link.handles[volume],
            until_s - self._now_s,
            spans,
            lengths.astype(codec.U32).tobytes(),
            slots.astype(codec.U64).tobytes(),
            SLOT_BYTES,
            is_again=is_again,
            addresses=lent.addresses.tobytes() if lent is not None and is_pushed else b"",
        )
        wanted = WantedBlocks(
            self, numbers, self.arena.array, slots, lengths, seeds, asked_s=self._now_s, until_s=until_s
        )
        if self.direct is not None:
            wanted.own = OwnGet(self.direct, request, slots, lengths, seeds, self._deliver)
        if lent is not None:
            wanted.memory, wanted.offsets, wanted.lent = lent.memory, lent.offsets, lent
        if link.memory is not None:
            keys = derive_keys(volume.secret, spans)
            wanted.copies = MemoryGet(
                link.memory, wanted.memory, wanted.offsets, self.under_copy, slots, keys, lengths, seeds
            )
        if self._inline is not None:
            self._inline.open(slots, SLOT_BYTES)
        operation = GetOperation(message, until_s=until_s)
        finish = await self._operate(link, operation, until_s, slots, wanted)
        wanted.take_checked(finish.outcomes.states == BlockState.HIT)
        if lent is not None:
            wanted.handed = {number: lent.block(numbers.index(number)) for number in wanted.handed}
        end = self._ended(link, finish.outcomes, wanted.handed, is_in_place=lent is not None)
        if lent is not None:
            end.withheld = lent.give_back_written(self.ledger) if is_pushed else lent.give_back()
        wanted.note_reads(end)
        rows = codec.positions(finish.again, len(numbers))
        if len(rows):
            if is_again:
                self.violations.append(f"worker {self.name} asks for blocks a third time")
            end.take(
                rows.tolist(),
                await self._get_again(link, [numbers[row] for row in rows.tolist()], slots[rows], until_s),
            )
        return end

    async def _get_again(
        self, link: Link, numbers: list[int], slots: NDArray[np.int64], until_s: float
    ) -> Ended:
        if link.is_lost:
            self.ledger.give(slots)
            declined = Outcomes.filled(len(numbers), BlockState.DECLINED, Reason.DISCONNECTED)
            return self._ended(link, declined, {})
        return await self._get(link, numbers, slots, until_s, is_again=True)

    async def put(self, versions: list[Version], deadline_s: float, ack: Ack) -> Ended:
        until_s = self._now_s + deadline_s
        numbers = [version.number for version in versions]
        link = await self._links.linked(until_s)
        slots = None if link is None else self._taken(len(numbers))
        if link is None or slots is None:
            return self._declined(numbers)
        volume, spans = self._blocks.volume_of_all(numbers), self._blocks.spans(numbers)
        lengths, seeds = self._lengths_and_seeds(volume, numbers, spans)
        request = self._next_request()
        self._puts.add(request)
        lent = self._bound(link, request, slots, lengths, is_written=False)
        memory, offsets = (self.arena.array, slots) if lent is None else (lent.memory, lent.offsets)
        for version, at in zip(versions, offsets.tolist(), strict=True):
            memory[at : at + len(version.data)] = version.data
        message = Put(
            request,
            link.handles[volume],
            until_s - self._now_s,
            int(ack),
            spans,
            lengths.astype(codec.U32).tobytes(),
            tags_of(memory, offsets, lengths, seeds).tobytes(),
            slots.astype(codec.U64).tobytes(),
            SLOT_BYTES,
            addresses=self._addresses(link, memory, offsets, lent),
        )
        end = await self._operate(link, BlockOperation(message, until_s=until_s), until_s, slots)
        if lent is not None:
            lent.give_back([version.data for version in versions])
        return self._ended(link, end.outcomes, {}, is_in_place=lent is not None)

    def _addresses(
        self, link: Link, memory: NDArray[np.uint8], offsets: NDArray[np.int64], lent: LentRows | None
    ) -> bytes:
        if self._offered is None or not link.connection.welcome.reads_worker:
            return b"" if lent is None or self._inline is not None else lent.addresses.tobytes()
        return self._offered.addresses(memory, offsets).tobytes()

    async def lookup(self, numbers: list[int], deadline_s: float, pin_s: float = 0.0) -> Ended:
        until_s = self._now_s + deadline_s
        link = await self._links.linked(until_s)
        if link is None:
            return self._declined(numbers)
        request = self._next_request()
        volume, spans = self._blocks.volume_of_all(numbers), self._blocks.spans(numbers)
        message = Lookup(request, link.handles[volume], until_s - self._now_s, spans, pin_s)
        end = await self._operate(link, BlockOperation(message, until_s=until_s), until_s, None)
        return self._ended(link, end.outcomes, {})

    def _lengths_and_seeds(
        self, volume: Volume, numbers: list[int], spans: tuple[Span, ...]
    ) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        lengths = self._blocks.lengths(numbers)
        return lengths, tag_seeds(volume.identity, spans, lengths)

    def _declined(self, numbers: list[int]) -> Ended:
        return Ended([-1] * len(numbers), [-1] * len(numbers), {}, "")

    def _ended(self, link: Link, end: Outcomes, handed: Handed, *, is_in_place: bool = False) -> Ended:
        return Ended(end.states.tolist(), end.reasons.tolist(), handed, link.agent, is_in_place=is_in_place)

    async def _operate(
        self,
        link: Link,
        operation: BlockOperation,
        until_s: float,
        slots: NDArray[np.int64] | None,
        wanted: WantedBlocks | None = None,
    ) -> Finish:
        request = operation.request
        mail = self._mail[request] = asyncio.Queue()
        todo, is_heard = deque(operation.start(self._now_s)), False
        is_sent = isinstance(todo[0], Send)
        if slots is not None and is_sent:
            self.ledger.add(request, slots, agent=link.agent, start_id=link.start_id)
        try:
            while True:
                while todo:
                    effect = todo.popleft()
                    if isinstance(effect, Finish):
                        self._links.count(is_heard=is_heard)
                        if wanted is not None and slots is not None:
                            wanted.settle(self.ledger.are_settled(request, slots))
                        self._keep(request, slots, effect.again)
                        return effect
                    if isinstance(effect, Verify | ReadExtents):
                        assert wanted is not None, "only gets have anything read and verified"
                        if (verified := await wanted.verified(effect)) is not None:
                            todo.extendleft(reversed(self._effects(operation, verified)))
                    else:
                        self._do(link, request, effect)
                event = await self._next(mail, until_s)
                is_heard = is_heard or not isinstance(event, Ticked | Disconnected)
                todo.extend(self._effects(operation, event))
        finally:
            del self._mail[request]
            if slots is not None:
                self._let_go(link, request, slots, is_sent=is_sent)

    def _let_go(self, link: Link, request: int, slots: NDArray[np.int64], *, is_sent: bool) -> None:
        """End the use of an operation's slots, and of rows that they are names of."""
        self._shut(slots)
        if self._inline is not None:
            self._inline.leave(link.connection, request)
        if is_sent:
            self._leave(request)
        else:
            self.ledger.give(slots)

    def _keep(self, request: int, slots: NDArray[np.int64] | None, again: bytes) -> None:
        """Keep the slots of blocks to ask for again."""
        if slots is not None and again:
            kept = slots[codec.positions(again, len(slots))]
            if not self.ledger.take_back(request, kept).all():
                self.violations.append(f"worker {self.name} asks again for blocks under transfers")

    def _effects(self, operation: BlockOperation, event: Event) -> list[Effect]:
        try:
            return operation.on(event, self._now_s)
        except MalformedError as error:
            raise ViolationError(f"the agent of {self.name} broke the wire's rules: {error}") from error

    def _do(self, link: Link, request: int, effect: Effect) -> None:
        match effect:
            case Send(message=Cancel() as cancel):
                if link.connection.is_open:
                    link.connection.send(cancel)
            case Send(message=ExtentsRead() as report):
                if link.connection.is_open:
                    link.connection.send(report)
            case Send(message=message):
                link.under_way += 1
                self._spawn(self._asked(link, request, message))  # type: ignore[arg-type]  # of blocks
            case _:
                raise ViolationError(f"an operation on blocks wants {effect}")

    async def _next(self, mail: asyncio.Queue[Event], until_s: float) -> Event:
        try:
            async with asyncio.timeout_at(until_s):
                return await mail.get()
        except TimeoutError:
            return Ticked()

    async def _asked(self, link: Link, request: int, message: Request) -> None:
        """Wait for the final answer, however long that takes: slots hang on it."""
        try:
            answer = await self._answer(link, message)
        except RefusedError:  # as many are under way as the agent takes: nothing was sent
            self.ledger.answer(request, np.empty(0, np.uint32))
            self._deliver(request, Disconnected())
            return
        except (ConnectError, TimeoutError):
            self._links.lost(link)
            self._deliver(request, Disconnected())
            return
        slots = self.ledger.slots(request)
        self._shut(slots)
        if isinstance(answer, GetDone) and len(slots) and not answer.places:
            self._check_unread(request, slots[codec.positions(answer.positions, len(slots))])
        if isinstance(answer, GetDone | PutDone):
            unsettled = (
                codec.positions(answer.unsettled, len(slots)) if len(slots) else np.empty(0, np.uint32)
            )
        elif isinstance(answer, Failure) and answer.code in NOT_STARTED_CODES:
            unsettled = np.empty(0, np.uint32)
        else:
            unsettled = np.arange(len(slots), dtype=np.uint32)
        self.ledger.answer(request, unsettled)
        self._deliver(request, answer)  # type: ignore[arg-type]  # an agent's answer to a worker

    async def _answer(self, link: Link, message: Request) -> Answer:
        try:
            return await link.connection.ask(message, FOREVER_S)
        finally:
            link.under_way -= 1

    def _deliver(self, request: int, event: Event) -> None:
        mail = self._mail.get(request)
        if mail is not None:
            mail.put_nowait(event)

    def _shut(self, slots: NDArray[np.int64]) -> None:
        """Let nothing land in these slots any more, where that is ours to decide."""
        if self._inline is not None:
            self._inline.shut(slots)

    def _on_aside(self, made: list[ClientConnection], aside: Aside) -> None:
        match aside:
            case GetProgress():
                self._check_unread(aside.request, self._shut_some(aside))
                self._deliver(aside.request, aside)
            case GetExtents() if self.direct is not None:
                self._shut_some(aside)
                self._deliver(aside.request, aside)
            case Fetch() if self._inline is not None and made:
                self._inline.answer(made[0], aside)
            case Settled(request=request):  # not before the answer, which may have come in the same piece
                asyncio.get_running_loop().call_soon(self.ledger.settle, request)
            case Leaving() if self.is_told:
                self._links.leaving(made)
            case _:
                self.violations.append(f"worker {self.name} was sent {type(aside).__name__}")

    def _shut_some(self, aside: GetProgress | GetExtents) -> NDArray[np.int64]:
        """Take word of blocks that landed, or are to be read; return their slots."""
        slots = self.ledger.slots(aside.request)
        if len(slots):
            slots = slots[codec.positions(aside.positions, len(slots))]
            self._shut(slots)
        return slots

    def _announce(self, link: Link) -> None:
        """Tell the agent what is read here, where this is news: which drives, and whether its memory."""
        direct, welcome = self.direct, link.connection.welcome
        if link.memory is None and welcome.memory is not None and self._memories is not None:
            link.memory = MemoryReader(self._memories, link.agent, link.start_id)
        reads_drives = direct is not None and DIRECT in welcome.features
        if not reads_drives and link.memory is None:
            return
        version = direct.version if direct is not None else 0
        reads_memory = link.memory is not None and link.memory.is_usable
        if link.announced != (version, reads_memory):
            link.announced = version, reads_memory
            drives = direct.announced() if direct is not None and reads_drives else ()
            link.connection.tell(DirectDrives(tuple(AnnouncedDrive(*each) for each in drives), reads_memory))

    @property
    def linked_to(self) -> tuple[str, bytes] | None:
        """The agent that it keeps to, and the start of it that it talked to last; None where it will dial."""
        return self._links.linked_to

    def _spawn(self, asking: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(asking)
        self._asking.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._asking.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self.violations.append(f"worker {self.name} crashed: {task.exception()!r}")

    # ------------------------------------------------------------------------------------------- slots

    def _next_request(self) -> int:
        self._requests += 1
        return self._requests

    def _taken(self, count: int) -> NDArray[np.int64] | None:
        if not self.ledger.is_open:
            return None
        slots = self.ledger.take(count, SLOT_BYTES)
        if slots is not None:
            self._hold(slots, self._requests + 1)
        return slots

    def _bound(
        self,
        link: Link,
        request: int,
        slots: NDArray[np.int64],
        lengths: NDArray[np.uint32],
        *,
        is_written: bool,
    ) -> LentRows | None:
        """Make a request's slots names of rows, where it is to use some; return those."""
        if self._inline is None and not self._is_offered(link):
            return None
        lent = None if self.region is None else self.region.take(lengths, is_written=is_written)
        if lent is not None:
            self._hold(lent.addresses, request)
        if lent is not None and lent.rows is not None and self._inline is not None:
            self._inline.bind(request, slots, lent.rows)
        return lent

    def _is_offered(self, link: Link) -> bool:
        """Return whether the agent may know the region; tell it."""
        features = link.connection.welcome.features
        if self.region is None or not isinstance(self.arena, SimulatedArenaEnd) or REGIONS not in features:
            return False
        if not link.is_offered:
            link.connection.tell(RegionsOffer(self.arena.offer_region(self.region.offered)))
            link.is_offered = True
        return True

    def _hold(self, slots: NDArray[np.int64] | NDArray[np.uint64], request: int) -> None:
        """Let only what this request asks for land in these slots, or rows by their addresses."""
        for at in slots.tolist():
            self._holders[at] = request

    def _holder_of(self, at: int) -> int:
        return self._holders.get(at, 0)

    def _leave(self, request: int) -> None:
        """Give the slots of a request back, at the end of own reads at the earliest."""
        if self.direct is None:
            self.ledger.leave(request)
        else:
            self.direct.when_read(request, partial(self.ledger.leave, request))

    def _check_unread(self, request: int, slots: NDArray[np.int64]) -> None:
        """Check blocks that an agent has delivered: no own read may be under way there."""
        for at in slots.tolist():
            if self._is_read_into(at):
                self.violations.append(
                    f"worker {self.name} reads a block of request {request} itself, and its agent delivers it"
                )

    def _is_read_into(self, at: int) -> bool:
        """Say whether a read of this worker may land in a slot."""
        return self.under_copy[at] > 0 or (self.direct is not None and self.direct.slots[at] > 0)

    def _landing(self, at: int, held_by: object) -> None:
        """Check a block that an agent lands: no own read may be under way there.

        Only the lie that lands an earlier block late writes to slots of a put, which may have ended since.
        """
        if held_by in self._puts:
            if not self._is_lied_to:
                self.violations.append(f"worker {self.name}: a block landed in slot {at} of put {held_by}")
            return
        if not self._is_lied_to and self._is_read_into(at):
            self.violations.append(
                f"worker {self.name}: what request {held_by} asked for landed in slot {at}, "
                "where an own read is under way"
            )
        self._check_holder(at, held_by)

    def _check_holder(self, at: int, held_by: object) -> None:
        """Check a landing block: its slot must belong to the operation it was sent for."""
        if held_by != self._holders.get(at, 0):
            self.violations.append(
                f"worker {self.name}: what request {held_by} asked for landed in slot {at} of request "
                f"{self._holders.get(at)}"
            )


@dataclass(eq=False)
class WantedBlocks:
    """Blocks of one get, from its start to its end: columns with a row per block."""

    worker: Worker
    numbers: list[int]
    memory: NDArray[np.uint8]
    """Where the blocks land."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.uint32]
    seeds: NDArray[np.uint64]
    asked_s: float
    until_s: float
    own: OwnGet | None = None
    """Reads of drives, where the worker reads any."""

    lent: LentRows | None = None
    """Rows for the blocks, unless they land in the arena."""

    copies: MemoryGet | None = None
    """Copies from the agent's memory, where the worker reads that."""

    handed: Handed = field(default_factory=dict)
    """Bytes of good blocks, by number."""

    async def verified(self, wanted: Verify | ReadExtents) -> Verified | None:
        """Verify blocks, after copies of them; None where reads of drives go on."""
        if isinstance(wanted, ReadExtents):
            if self.own is None:
                raise ViolationError(f"worker {self.worker.name} is to read drives that it has not announced")
            self.own.read(wanted.extents)
            return None
        verified = await self._copied(wanted) if wanted.places else self._verified(wanted)
        self._hand_over(verified)
        return verified

    def take_checked(self, is_hit: NDArray[np.bool_]) -> None:
        """Take HITs that the reader's engine has checked, right behind their reads."""
        rows = [row for row in np.flatnonzero(is_hit).tolist() if self.numbers[row] not in self.handed]
        found = np.array(rows, codec.U32)
        self._judge(found, np.ones(len(rows), np.bool_))
        self._hand_over(Verified(found.tobytes(), bytes([CheckState.GOOD]) * len(rows)))

    def settle(self, is_settled: NDArray[np.bool_]) -> None:
        """Take word of blocks that nothing is sent to any more."""
        if self.lent is not None:
            self.lent.writes.settle(np.flatnonzero(is_settled))

    def note_reads(self, end: Ended) -> None:
        """Say in the end of the get which blocks the worker had to read."""
        own = self.own
        if own is not None:
            end.own, end.unread = ({self.numbers[row] for row in rows} for rows in (own.blocks, own.unread))
            end.was_slow = own.is_slow or bool(own.unread)
        if self.copies is not None and self.copies.is_slow:  # the worker looked at no block meanwhile
            end.own, end.was_slow = set(self.numbers), True

    def _verified(self, wanted: Verify) -> Verified:
        found = codec.positions(wanted.positions, len(self.numbers))
        tags = codec.rows16(wanted.tags, len(found))
        good = are_good(self.memory, self.offsets[found], self.lengths[found], self.seeds[found], tags)
        self._judge(found, good)
        verdicts = np.where(good, CheckState.GOOD, CheckState.DAMAGED).astype(np.uint8)
        return Verified(wanted.positions, verdicts.tobytes())

    async def _copied(self, wanted: Verify) -> Verified:
        """Copy blocks out of the agent's memory, and verify them."""
        if self.copies is None:
            raise ViolationError(f"worker {self.worker.name} is to copy from memory that it does not read")
        return await self.copies.read(wanted, self.until_s)

    def _hand_over(self, verified: Verified) -> None:
        found = codec.positions(verified.positions, len(self.numbers))
        good = found[codec.u8(verified.verdicts, len(found)) == CheckState.GOOD]
        if self.lent is not None:
            self.lent.writes.verify(good.astype(np.int64))
        for row in good.tolist():
            begin, length = int(self.offsets[row]), int(self.lengths[row])
            self.handed[self.numbers[row]] = self.memory[begin : begin + length].tobytes()

    def _judge(self, found: NDArray[np.uint32], good: NDArray[np.bool_]) -> None:
        """Hear of checked blocks: count those read from drives here, and tell of those that are not good."""
        own, direct = self.own, self.worker.direct
        if own is None or direct is None:
            return
        for row, is_good in zip(found.tolist(), good.tolist(), strict=True):
            if row not in own.read_ones:
                continue
            own.read_ones.remove(row)  # what lands there after this is the agent's
            if is_good:
                direct.happened["direct HITs"] += 1
            else:
                self.worker.on_bad_read(self.numbers[row], own.blocks[row], self.asked_s, self.until_s)
