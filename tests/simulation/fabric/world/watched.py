"""What happens inside of agents, and in the store, told to a world as it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import NDArray
from tests.simulation.fabric.oracle.own_reads import check_places
from tests.simulation.fabric.oracle.said import rows_of

from ostraca._direct import direct_reader
from ostraca_dpu_agent.adapters.transports.worker_memory import WorkerMemories
from ostraca_dpu_agent.datapath.get import GetRun
from ostraca_dpu_agent.datapath.staging.staged import StagedBlocks
from ostraca_dpu_agent.shards.core import ShardCore
from ostraca_dpu_agent.shards.core.catalog import BlockCatalog
from ostraca_dpu_agent.shards.core.ring.ring import Ring
from ostraca_dpu_agent.shards.service import OwnerService
from ostraca_dpu_agent.shards.shard import OwnedShard
from ostraca_fabric.membership.memory_membership import MemoryStore
from ostraca_fabric.model.ids import ShardId
from ostraca_fabric.model.outcome import PutState
from ostraca_fabric.telemetry.requests import EventRing

if TYPE_CHECKING:
    from tests.simulation.fabric.world.world import World

    from ostraca_fabric.wire.messages import ShardCommit, ShardCommitted

_Hear = Callable[..., object]
"""Is told what a method has returned, and what it was given."""


class Watched:
    """Has a world hear of every event of every agent, as long as it is entered."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._before: list[tuple[object, str, Any]] = []

    def __enter__(self) -> None:
        margins, heard = self._world.margins, self._world.heard
        self._hear(
            EventRing, "record", lambda _, ring, kind, keys, *__, **___: heard.observe(ring.agent, kind, keys)
        )
        self._hear(OwnedShard, "count_damage", lambda _, owned, offset: heard.found_damaged(owned, offset))
        self._hear(ShardCore, "reserve", lambda made, core, *_, **__: margins.reserved(core, made))
        self._hear(ShardCore, "reserve_copies", lambda made, core, *_, **__: margins.reserved(core, made))
        self._hear(
            ShardCore,
            "commit",
            lambda answer, core, _, numbers, *__, **___: margins.taken(core, numbers, answer),
        )
        self._hear(
            ShardCore,
            "resolve",
            lambda where, core, now_s, _, *, pin_s, **__: margins.pinned(core, now_s, pin_s, where),
        )
        self._change(ShardCore, "release", self._releasing(ShardCore.release))
        self._hear(ShardCore, "retire", lambda _, core, __, segments: margins.retired(core, segments))
        self._hear(Ring, "begin_opening", lambda opened, ring, _: margins.opened(ring, opened.number))
        self._hear(
            MemoryStore,
            "has",
            lambda stands, store, *who: margins.stands(store.map, *who) if stands else None,
        )
        self._hear(
            MemoryStore,
            "claim",
            lambda given, store, _, *who, **__: margins.stands(store.map, *who) if given else None,
        )
        oracle = self._world.oracle
        self._hear(
            StagedBlocks,
            "add",
            lambda _, __, group, rows: oracle.staged(group.keys[rows], group.tags[rows]),
        )
        self._change(OwnerService, "_commit", self._committing(OwnerService._commit))
        self._hear(GetRun, "_places", lambda told, run, _: check_places(self._world, run, told))
        if self._world.worker_memories is not None:
            self._change(WorkerMemories, "reader", self._world.worker_memories.reader)
        clock = SimpleNamespace(monotonic=self._world.loop.time)
        self._change(direct_reader, "time", clock)  # its readers are in simulated processes
        self._hear_what_owners_have()

    def _hear_what_owners_have(self) -> None:
        said, world = self._world.said, self._world

        def disowned(*_: object) -> None:
            world.disowned_shards += 1

        self._hear(OwnerService, "disown", disowned)
        self._hear(
            ShardCore,
            "resolve",
            lambda where, core, _, keys, **__: said.looked_up(core, keys, where.found),
        )
        self._hear(ShardCore, "has", lambda found, core, keys, **_: said.looked_up(core, keys, found))

        def looked_up(
            found: NDArray[np.bool_],
            service: OwnerService,
            runs: Sequence[tuple[ShardId | None, int]],
            _: int,
            keys: NDArray[np.uint8],
            *__: object,
        ) -> None:
            first = 0
            for shard, count in runs:
                last = first + count
                if shard is not None:
                    said.looked_up(service.shards[shard].core, keys[first:last], found[first:last])
                first = last

        self._hear(OwnerService, "has", looked_up)
        self._hear(
            ShardCore, "reserve", lambda made, core, _, keys, *__, **___: said.reserved(core, keys, made)
        )
        cores = WeakKeyDictionary[BlockCatalog, ref[ShardCore]]()
        self._hear(
            ShardCore, "__init__", lambda _, core, *__, **___: cores.__setitem__(core.catalog, ref(core))
        )

        def gone(_: None, catalog: BlockCatalog, keys: NDArray[np.uint8]) -> None:
            core = cores[catalog]()
            if core is not None:
                said.gone(core, keys)

        self._hear(BlockCatalog, "note_evicted", gone)
        self._hear(
            ShardCore,
            "drop",
            lambda was_there, core, key, **_: said.gone(core, rows_of([key])) if was_there else None,
        )

    def __exit__(self, *_: object) -> None:
        for of, name, before in reversed(self._before):
            setattr(of, name, before)

    def _change(self, of: object, name: str, to: object) -> None:
        self._before.append((of, name, getattr(of, name)))
        setattr(of, name, to)

    def _hear(self, of: type, name: str, hear: _Hear) -> None:
        """Have *hear* called behind each call of a method."""
        method = getattr(of, name)

        @wraps(method)
        def heard(*given: Any, **named: Any) -> Any:
            result = method(*given, **named)
            self._world.judge(hear, result, *given, **named)
            return result

        self._change(of, name, heard)

    def _releasing(self, release: Callable[..., bool]) -> object:
        """Hear of pins that are given back before anything is done upon it."""
        world = self._world

        @wraps(release)
        def releasing(core: ShardCore, now_s: float, pins: Sequence[int], *rest: Any, **named: Any) -> bool:
            world.judge(world.margins.released, core, pins)
            return release(core, now_s, pins, *rest, **named)

        return releasing

    def _committing(self, commit: Callable[..., Any]) -> object:
        world = self._world

        async def committing(
            service: OwnerService,
            part: ShardCommit,
            numbers: NDArray[np.uint64],
            tags: NDArray[np.uint8],
            seeds: NDArray[np.uint64],
        ) -> ShardCommitted:
            owned = service.shards.get(ShardId(part.shard))
            keys = np.empty((0, 16), np.uint8) if owned is None else owned.keys_of(numbers)
            world.judge(world.oracle.offered, keys, tags)
            asked = None if owned is None else world.heard.asked(owned, keys)
            done: ShardCommitted = await commit(service, part, numbers, tags, seeds)
            is_done = np.frombuffer(done.states, np.uint8)[: len(keys)] == PutState.COMMITTED
            if is_done.any():
                world.judge(world.oracle.answered, keys[is_done], tags[is_done])
                assert owned is not None, "nobody else says COMMITTED"
                assert asked is not None
                world.judge(world.said.committed, owned.core, keys[is_done], tags[is_done])
                agent = service.events.agent
                world.judge(world.heard.committed, agent, owned, keys[is_done], tags[is_done], asked)
            return done

        return committing
