"""Asyncio front end: the operations of a volume, awaited.

    async with await ostraca.aio.connect("unix:///run/ostraca/agent.sock") as client:
        volume = await client.volume("llama-70b", layout, block_bytes=2 << 20, create=True)
        result = await volume.get(chain, into=blocks, deadline_s=0.5)

Nothing blocks the event loop: the client's driver runs the operations, and a thread runs the dialling.
Arguments, results and errors are those of ``Client`` and ``Volume``.

If an awaiting task is cancelled, the operation is cancelled too, and the cancellation propagates after the
operation's end. Memory passed to the operation is the caller's again then, and not before; rows of a region
may be withheld (``Region.withheld``).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from ostraca import client as blocking
from ostraca._connection.credentials import TokenSource
from ostraca._memory.regions import Region
from ostraca._memory.views import BlockViews, SlotLease
from ostraca._operations.get import GetIntoJob, GetViewsJob
from ostraca._operations.job import Job
from ostraca._operations.lookup import LookupJob, PrefetchJob
from ostraca._operations.put import PutFromJob, PutSlotsJob
from ostraca._protocol.specs import GetSpec, LookupSpec, PrefetchSpec, PutSpec
from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
from ostraca.settings import ClientSettings
from ostraca.volume import Volume
from ostraca_fabric.model.chain import Chain
from ostraca_fabric.model.outcome import Ack
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.telemetry.status import AgentStatus

_Result = TypeVar("_Result")


async def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    credentials: TokenSource = None,
    tenant: str = "default",
    settings: ClientSettings | None = None,
    timeout_s: float = 5.0,
) -> AsyncClient:
    """Connect as ``ostraca.connect`` does."""
    return AsyncClient(
        await asyncio.to_thread(
            blocking.connect,
            addresses,
            credentials=credentials,
            tenant=tenant,
            settings=settings,
            timeout_s=timeout_s,
        )
    )


class AsyncClient:
    """Client with awaitable operations.

    ``connect`` creates a client; close the client, or use it in ``async with``.
    """

    def __init__(self, client: blocking.Client) -> None:
        self.blocking = client
        """The same client: for threads, and for members that never wait (``agent``, ``transport`` ...)."""

    async def volume(
        self,
        name: str,
        layout: Layout,
        *,
        block_bytes: int,
        create: bool = False,
        break_even_tokens: int = 0,
        timeout_s: float = 5.0,
    ) -> AsyncVolume:
        """Open a volume, as ``Client.volume``."""
        return AsyncVolume(
            await asyncio.to_thread(
                self.blocking.volume,
                name,
                layout,
                block_bytes=block_bytes,
                create=create,
                break_even_tokens=break_even_tokens,
                timeout_s=timeout_s,
            ),
        )

    async def register(
        self, memory: object, *, row_bytes: int | None = None, may_withhold: bool = False
    ) -> Region:
        """Register memory of the caller, as ``Client.register``."""
        return await asyncio.to_thread(
            self.blocking.register, memory, row_bytes=row_bytes, may_withhold=may_withhold
        )

    async def status(self, *, timeout_s: float = 5.0) -> AgentStatus:
        """Ask the agent for its status, as ``Client.status``."""
        return await asyncio.to_thread(self.blocking.status, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the connection, as ``Client.close``.

        Awaited operations end as DISCONNECTED.
        """
        await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> Self:
        """Return the client to the ``async with`` block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()


class AsyncVolume:
    """Volume with awaitable operations, for one event loop or several."""

    def __init__(self, volume: Volume) -> None:
        self.blocking = volume
        """The same volume: for threads, and for members that never wait (``name``, ``layout``, ``slots``)."""

        # Another front end over the same runner.
        self._runner = volume._runner  # noqa: SLF001
        self._spec = volume._spec  # noqa: SLF001

    def chain(
        self, engine_hashes: Iterable[bytes], *, rank: int = 0, group: int = 0, is_chained: bool = True
    ) -> Chain:
        """Build a chain, as ``Volume.chain``."""
        return self.blocking.chain(engine_hashes, rank=rank, group=group, is_chained=is_chained)

    async def lookup(
        self,
        chains: Chain | Sequence[Chain],
        *,
        deadline_s: float,
        pin_s: float = 0.0,
        is_counted: bool = True,
    ) -> LookupResult:
        """Run ``Volume.lookup``."""
        return await self._run(
            LookupJob(
                self._runner.runtime,
                LookupSpec(
                    volume=self._spec,
                    chains=chains,
                    deadline_s=deadline_s,
                    pin_s=pin_s,
                    is_counted=is_counted,
                ),
            )
        )

    async def prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> PrefetchResult:
        """Run ``Volume.prefetch``."""
        return await self._run(
            PrefetchJob(
                self._runner.runtime,
                PrefetchSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, at=at),
            )
        )

    async def get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> GetResult:
        """Run ``Volume.get``."""
        return await self._run(
            GetIntoJob(
                self._runner.runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                into,
            )
        )

    async def get_views(
        self,
        chain: Chain,
        *,
        lengths: int | Sequence[int],
        deadline_s: float,
        recompute_s: float | None = None,
    ) -> BlockViews:
        """Run ``Volume.get_views``."""
        return await self._run(
            GetViewsJob(
                self._runner.runtime,
                GetSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, recompute_s=recompute_s),
                lengths,
            )
        )

    async def put(
        self,
        chain: Chain,
        *,
        source: object,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> PutResult:
        """Run ``Volume.put``."""
        return await self._run(
            PutFromJob(
                self._runner.runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                source,
            )
        )

    def end_session(self, chains: Chain | Sequence[Chain]) -> None:
        """Call ``Volume.end_session``, without anything to await."""
        self.blocking.end_session(chains)

    async def put_slots(
        self,
        chain: Chain,
        lease: SlotLease,
        *,
        deadline_s: float,
        ack: Ack = Ack.STAGED,
        ttl_s: float | None = None,
    ) -> PutResult:
        """Run ``Volume.put_slots``."""
        return await self._run(
            PutSlotsJob(
                self._runner.runtime,
                PutSpec(volume=self._spec, chain=chain, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s),
                lease,
            )
        )

    async def _run(self, job: Job[Any, _Result]) -> _Result:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Result] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the job's)
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        def deliver(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the job's)
            with contextlib.suppress(RuntimeError):  # the event loop was closed before its task ended
                loop.call_soon_threadsafe(tell, result, error)

        ticket = self._runner.submit(job, deliver)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._runner.cancel(ticket)
            await _await_end(ended)
            raise


async def _await_end(ended: asyncio.Future[Any]) -> None:
    """Wait for the end of a cancelled operation, and drop its result.

    A second cancellation does not shorten the wait: until the end, the operation may write to the caller's
    memory.
    """
    while not ended.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    if ended.exception() is None and hasattr(ended.result(), "release"):
        ended.result().release()
