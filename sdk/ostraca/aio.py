"""The asyncio shell: the same operations, awaited.

    async with await ostraca.aio.connect("unix:///run/ostraca/agent.sock") as client:
        volume = await client.volume("llama-70b", layout, block_bytes=2 << 20, create=True)
        result = await volume.get(chain, into=blocks, deadline_s=0.5)

Nothing here blocks the event loop: the client's driver carries the operations, and what has no other way
(dialling) runs in a thread. Arguments, results and errors are those of ``Client`` and ``Volume``. When an
awaiting task is cancelled, the operation is too, and the cancellation goes on once it has ended: memory that
was passed is the caller's again then, and not before.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

from ostraca import client as blocking
from ostraca.jobs import get_job, get_views_job, lookup_job, prefetch_job, put_job, put_slots_job
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from types import TracebackType

    from ostraca.jobs import Job
    from ostraca.results import GetResult, LookupResult, PrefetchResult, PutResult
    from ostraca.settings import ClientSettings
    from ostraca.shells.done import Ticket
    from ostraca.views import BlockViews, SlotLease
    from ostraca.volume import Volume
    from ostraca_fabric.chain import Chain
    from ostraca_fabric.layout import Layout
    from ostraca_fabric.status import AgentStatus

_Result = TypeVar("_Result")


async def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    credentials: str | None = None,
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
    """A client whose operations are awaited. ``connect`` makes it; close it, or use it in ``async with``."""

    def __init__(self, client: blocking.Client) -> None:
        self.blocking = client
        """The same client: for threads, and for what never waits (``agent``, ``transport`` ...)."""

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
            self.blocking,
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

    async def status(self, *, timeout_s: float = 5.0) -> AgentStatus:
        """Ask the agent what it believes, as ``Client.status``."""
        return await asyncio.to_thread(self.blocking.status, timeout_s=timeout_s)

    async def close(self) -> None:
        """End the connection, as ``Client.close``; operations that are awaited end as DISCONNECTED."""
        await asyncio.to_thread(self.blocking.close)

    async def __aenter__(self) -> Self:
        """Lend the client to the ``async with`` block."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        await self.close()


class AsyncVolume:
    """A volume whose operations are awaited. Usable from one event loop or several."""

    def __init__(self, client: blocking.Client, volume: Volume) -> None:
        self.blocking = volume
        """The same volume, for what never waits (``name``, ``layout``, ``slots``), and for threads."""

        self._client = client

    def chain(
        self, engine_hashes: Iterable[bytes], *, rank: int = 0, group: int = 0, is_chained: bool = True
    ) -> Chain:
        """Make a chain, as ``Volume.chain``."""
        return self.blocking.chain(engine_hashes, rank=rank, group=group, is_chained=is_chained)

    async def lookup(
        self, chains: Chain | Sequence[Chain], *, deadline_s: float, pin_s: float = 0.0
    ) -> LookupResult:
        """As ``Volume.lookup``."""
        return await self._run(lookup_job(self.blocking, chains, deadline_s=deadline_s, pin_s=pin_s))

    async def prefetch(self, chain: Chain, *, deadline_s: float, at: str | None = None) -> PrefetchResult:
        """As ``Volume.prefetch``."""
        return await self._run(prefetch_job(self.blocking, chain, deadline_s=deadline_s, at=at))

    async def get(
        self, chain: Chain, *, into: object, deadline_s: float, recompute_s: float | None = None
    ) -> GetResult:
        """As ``Volume.get``."""
        return await self._run(
            get_job(self.blocking, chain, into=into, deadline_s=deadline_s, recompute_s=recompute_s)
        )

    async def get_views(
        self,
        chain: Chain,
        *,
        lengths: int | Sequence[int],
        deadline_s: float,
        recompute_s: float | None = None,
    ) -> BlockViews:
        """As ``Volume.get_views``."""
        return await self._run(
            get_views_job(
                self.blocking, chain, lengths=lengths, deadline_s=deadline_s, recompute_s=recompute_s
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
        """As ``Volume.put``."""
        return await self._run(
            put_job(self.blocking, chain, source=source, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
        )

    def end_session(self, chains: Chain | Sequence[Chain]) -> None:
        """As ``Volume.end_session``: there is nothing to await."""
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
        """As ``Volume.put_slots``."""
        with self._client.running():
            job = put_slots_job(self.blocking, chain, lease, deadline_s=deadline_s, ack=ack, ttl_s=ttl_s)
        return await self._run(job)

    async def _run(self, job: Job[_Result]) -> _Result:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[_Result] = loop.create_future()

        def tell(result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the job's)
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(result)

        def deliver(_: Ticket, result: Any, error: BaseException | None) -> None:  # noqa: ANN401 (the job's)
            with contextlib.suppress(RuntimeError):  # the loop was closed under its task
                loop.call_soon_threadsafe(tell, result, error)

        ticket = self._client.carry(job, deliver)
        try:
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            self._client.cancel(ticket)
            await _settled(ended)
            raise


async def _settled(ended: asyncio.Future[Any]) -> None:
    """Wait until an operation that was cancelled has ended, and drop what it gave.

    A second cancellation does not cut this short: until then the operation may write to its caller's memory.
    """
    while not ended.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait([ended])
    if ended.exception() is None and hasattr(ended.result(), "release"):
        ended.result().release()
