"""Client of the fabric: an arena, a session with an agent, and counters of operations.

A client belongs to the process that created the client. After a fork, the child has neither the client's
threads nor the arena. Methods other than ``close``, ``fileno`` and ``metrics`` raise ClosedError there.
"""

from __future__ import annotations

import errno
import os
import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from ostraca._connection.credentials import Credentials, TokenSource, choose_credentials
from ostraca._connection.dial import ClientIdentity, choose_addresses, choose_tls
from ostraca._failover.connection_manager import ConnectionManager
from ostraca._memory.arena import Arena
from ostraca._memory.copy_pool import CopyPool, threads_for
from ostraca._memory.cuda import CudaDevices
from ostraca._memory.regions import Region, RegionMemory
from ostraca._operations.completions import Completion, Ticket
from ostraca._operations.job import Runtime
from ostraca._operations.runner import JobRunner, open_volume, query_status, run_in_thread
from ostraca._protocol.specs import VolumeSpec, checked_seconds
from ostraca.client_metrics import ClientMetrics
from ostraca.settings import ClientSettings
from ostraca.volume import Volume
from ostraca_fabric.errors import ClosedError, ConnectError, OstracaError, UsageError
from ostraca_fabric.model.ids import TenantId, checked_name
from ostraca_fabric.model.limits import flag, whole
from ostraca_fabric.model.volume import COUNT_MAX, Layout, VolumeRecord
from ostraca_fabric.runtime.process_memory import MemoryProof
from ostraca_fabric.telemetry.requests import worker_name
from ostraca_fabric.telemetry.status import AgentStatus
from ostraca_fabric.wire.handshake import CLIENT_BYTES, DIRECT, LEAVING, MEMORY, REGIONS

if TYPE_CHECKING:
    from ostraca._direct.direct_reader import DirectReader

_DIRECT_DRIVES_VARIABLE = "OSTRACA_DIRECT_DRIVES"

_ADVICE = {
    errno.EMFILE: ": raise this process's limit of open files (ulimit -n)",
    errno.ENFILE: ": raise this machine's limit of open files (fs.file-max)",
    errno.ENOMEM: ": lower arena_bytes in the settings, or raise the memory limit",
}


def connect(
    addresses: str | Sequence[str] | None = None,
    *,
    credentials: TokenSource = None,
    tenant: str = "default",
    settings: ClientSettings | None = None,
    timeout_s: float = 5.0,
) -> Client:
    """Connect to the first agent of *addresses* that answers.

    The other addresses serve failover. List the preferred agent first, usually the own host's: the client
    fails back to this agent when it answers again.

    Addresses are ``unix:///path``, ``tcp://host:port`` or, with a CA in the settings, ``tls://host:port``.
    Without *addresses*, OSTRACA_AGENT in the environment names them, else the default sockets of ``ostraca
    up`` are tried.

    *credentials* is a token, or a callable for each dial that returns a token, from any thread. Without
    *credentials*, the file ``token_file`` of the settings may hold the token. A unix socket may need no
    token.

    Raises UsageError for invalid arguments, and ConnectError for every other failure. The ConnectError is an
    AuthenticationError or a VersionError for such a cause, and also a TransportError if no transport can be
    set up.
    """
    chosen = ClientSettings() if settings is None else settings
    if not isinstance(chosen, ClientSettings):
        raise UsageError(f"settings is a {type(settings).__name__}: pass ostraca.ClientSettings")
    until_s = time.monotonic() + checked_seconds("timeout_s", timeout_s, longest_s=chosen.deadline_s_max)
    targets = choose_addresses(addresses, os.environ)
    tls = choose_tls(targets, chosen, os.environ)
    shown = choose_credentials(credentials, chosen, os.environ)
    name = TenantId(checked_name("tenant", tenant))

    def build_client() -> Client:
        arena, direct = Arena(chosen), None
        try:
            client_id = secrets.token_bytes(CLIENT_BYTES)
            worker = worker_name(client_id)
            direct = _direct_reader(chosen, arena.array, os.environ)
            has = {
                LEAVING: len(targets) > 1,
                DIRECT: direct is not None,
                MEMORY: chosen.direct_memory,
                REGIONS: True,
            }
            features = tuple(name for name, is_there in has.items() if is_there)
            proof = MemoryProof() if chosen.direct_memory else None
            identity = ClientIdentity(name, shown, arena.ends, client_id, features, tls, proof)
            connections = ConnectionManager(targets, identity, arena, chosen, worker)
            cpus = len(os.sched_getaffinity(0))
            threads, fetching = threads_for(cpus), threads_for(cpus, are_fetching=True)
            runner = JobRunner(
                Runtime(
                    chosen,
                    arena,
                    CopyPool(chosen.copy_threads or threads),
                    CopyPool(chosen.copy_threads or fetching),
                    connections,
                    CudaDevices(gpu_tags=chosen.gpu_tags),
                    direct,
                ),
                f"client {worker} of tenant {name}",
            )
        except BaseException:
            if direct is not None:
                direct.close()
            arena.close()
            raise
        try:
            runner.start(until_s)
        except BaseException:
            runner.close()
            raise
        return Client(runner, shown, tenant=name, worker=worker)

    try:
        return run_in_thread(build_client, name="connect", dispose=Client.close)
    except (ConnectError, UsageError):
        raise
    except (OstracaError, OSError, MemoryError, ImportError) as error:
        cause = (error.strerror if isinstance(error, OSError) else str(error)) or type(error).__name__
        advice = _ADVICE.get(error.errno or 0, "") if isinstance(error, OSError) else ""
        raise ConnectError(f"the client can't be set up here: {cause}{advice}") from error


def _direct_reader(
    settings: ClientSettings, memory: NDArray[np.uint8], environment: Mapping[str, str]
) -> DirectReader | None:
    """Open the drives of this host that the client may read into *memory*; None without any named.

    The variable OSTRACA_DIRECT_DRIVES names drives if the settings name none, separated by colons. Raises
    UsageError.
    """
    if not settings.direct_drives:
        named = environment.get(_DIRECT_DRIVES_VARIABLE, "").split(os.pathsep)
        settings = replace(settings, direct_drives=tuple(filter(None, named)))
    if not settings.direct_drives:
        return None
    # Few clients use these.
    from ostraca._direct.direct_reader import DirectReader  # noqa: PLC0415
    from ostraca_fabric.drives.io_engine import CHECKERS_MAX, FlashIoSettings  # noqa: PLC0415

    threads = settings.copy_threads or threads_for(len(os.sched_getaffinity(0)))
    return DirectReader(settings, memory, flash_io=FlashIoSettings(checkers=min(threads, CHECKERS_MAX)))


class Client:
    """Connection of a worker to the fabric.

    Thread-safe. ``connect`` creates a client; close the client, or use it as a context manager.
    """

    def __init__(self, runner: JobRunner, credentials: Credentials, *, tenant: str, worker: str) -> None:
        """Present *runner* to users; for ``connect``."""
        self.tenant = tenant
        self.worker = worker
        """Name of this client in metrics and logs, new for each client."""

        self._credentials = credentials
        self._runner = runner
        self._runtime = runner.runtime

    @property
    def settings(self) -> ClientSettings:
        """The settings passed to ``connect``."""
        return self._runtime.settings

    @property
    def agent(self) -> str:
        """The agent of the current or last connection; empty before the first."""
        session = self._runtime.connections.session
        return session.agent if session else ""

    @property
    def transport(self) -> str:
        """Transport of blocks on the current or last connection: ``nixl`` or ``inline``."""
        session = self._runtime.connections.session
        return session.transport if session else ""

    @property
    def is_connected(self) -> bool:
        """Whether a live connection exists now."""
        return self._runtime.is_ours and self._runtime.connections.live is not None

    @property
    def quarantined_bytes(self) -> int:
        """Arena bytes under transfers not known to have ended."""
        return self._runtime.arena.ledger.quarantined_bytes

    def metrics(self) -> ClientMetrics:
        """Return the counters of this client's operations.

        Waits for the client's thread, 0.05 s at most; usable after ``close``.
        """
        self._runner.await_counts()
        meter = self._runtime.meter
        return ClientMetrics(
            worker=self.worker,
            agent=self.agent,
            transport=self.transport,
            operations=tuple(tally.snapshot() for tally in meter.tallies.values()),
            hit_tokens=meter.hit_tokens,
            declared_saved_s=meter.saved_s,
            arena_bytes=self.settings.arena_bytes_whole,
            quarantined_bytes=self.quarantined_bytes,
            direct=self._runtime.direct_counters,
        )

    def __repr__(self) -> str:
        """Show tenant, state, agent and transport."""
        state = "closed" if self._runtime.is_closed else "connected" if self.is_connected else "not connected"
        way = f"agent {self.agent} by {self.transport}" if self.agent else "no agent yet"
        return f"<Client of tenant {self.tenant}, {state}, {way}>"

    def volume(
        self,
        name: str,
        layout: Layout,
        *,
        block_bytes: int,
        create: bool = False,
        break_even_tokens: int = 0,
        timeout_s: float = 5.0,
    ) -> Volume:
        """Open a volume of this tenant; with *create*, create a missing volume.

        *block_bytes* is the size of the volume's largest block. Puts of chains shorter than
        *break_even_tokens* are declined, because loading such a chain takes longer than computing it; 0
        stores every chain. docs/explanation/endurance.md explains the choice of the number.

        Raises UsageError if the volume has to be created and a drive of the fabric can't hold such a block.
        Raises UnknownVolumeError, and RefusedError; LayoutMismatchError if the volume exists with another
        layout or block size; ConnectError if no agent answers within *timeout_s*.
        """
        if not isinstance(layout, Layout):
            raise UsageError(f"layout is a {type(layout).__name__}: pass an ostraca.Layout")
        record = VolumeRecord(TenantId(self.tenant), checked_name("volume", name), layout, block_bytes)
        if record.slot_bytes > self.settings.chunk_bytes:
            raise UsageError(
                f"block_bytes is {record.block_bytes} and chunk_bytes in the settings "
                f"{self.settings.chunk_bytes}: raise chunk_bytes"
            )
        break_even = whole("break_even_tokens", break_even_tokens, least=0, most=COUNT_MAX)
        volume = VolumeSpec(
            record, self.settings, create=flag("create", create), break_even_tokens=break_even
        )
        open_volume(self._runner, volume, timeout_s=timeout_s)
        return Volume(self._runner, volume)

    def register(self, memory: object, *, row_bytes: int | None = None, may_withhold: bool = False) -> Region:
        """Register memory of the caller: its rows are destinations of gets and sources of puts.

        *memory* is a numpy array, a torch tensor on the host (also pinned), or a buffer such as an mmap: all
        contiguous. Its first axis counts the rows; with *row_bytes*, the memory is cut into rows of so many
        bytes. Over the inline transport, blocks move from and to the rows without a copy in the arena.
        Elsewhere, and for clients that read drives themselves, they are copied as from other memory.

        ``volume.get(chain, into=region.rows([...]), deadline_s=...)`` verifies blocks in their rows: rows of
        blocks that are no HITs have undefined bytes afterwards.

        With *may_withhold*, blocks cross between agent and rows over NIXL without a copy. A client that reads
        drives itself reads into the rows. In return, rows of an ended get may be withheld
        (``GetResult.withheld``): a late drive or agent may still write there. Drives need memory that begins
        at a page of 4096 bytes, and rows of whole pages; else their blocks are copied. Blocks are read as
        whole pages, and zeros fill the last page. NIXL registers the memory, in the background: agents may
        then reach all of it. Do not fork while rows are withheld: a child's copy of them may change.

        Raises UsageError, also for memory that overlaps a registered region; and ClosedError.
        """
        may_withhold, owner = flag("may_withhold", may_withhold), self._runtime.regions
        checked = RegionMemory(memory, row_bytes, may_withhold=may_withhold, owner=owner)
        self._runner.do(partial(self._add_region, checked))
        return Region(checked, self._unregister)

    def _add_region(self, region: RegionMemory) -> None:
        self._runtime.regions.add(region)
        session = self._runtime.connections.live
        if session is not None:
            session.offers(region)

    def _unregister(self, memory: RegionMemory) -> None:
        """Unregister a region, also after the end of the client. A forked child has no operations."""
        remove = partial(self._remove_region, memory)
        try:
            self._runner.do_at_end(remove)
        except ClosedError:
            if self._runtime.is_ours:
                remove()
            else:
                memory.end()

    def _remove_region(self, memory: RegionMemory) -> None:
        self._runtime.regions.remove(memory)
        for end in self._runtime.arena.ends.values():
            end.progress()  # deregisters

    def set_credentials(self, credentials: TokenSource) -> None:
        """Show another token from the next dial on. Never blocks.

        *credentials* is as in ``connect``; None means the token file again, if configured. The current
        connection stays; the agent ends it when the previous token is revoked. Raises UsageError.
        """

        def replace() -> None:
            self._credentials.set(credentials)
            self._runtime.connections.dial_soon()

        self._runner.do(replace)

    def status(self, *, timeout_s: float = 5.0) -> AgentStatus:
        """Ask the agent for its status.

        Raises ConnectError if no answer arrives within *timeout_s*.
        """
        return query_status(self._runner, timeout_s=timeout_s)

    def take_completions(self) -> list[Completion]:
        """Return the submitted operations that ended since the last call.

        Never blocks. Usable from any thread, and after ``close``.
        """
        self._runtime.check_process()
        return self._runtime.completions.take()

    def fileno(self) -> int:
        """Return a descriptor, readable while ``take_completions`` has results.

        For select, poll or epoll. Never read the descriptor: ``take_completions`` does. The value is -1 after
        ``close``, and in a forked child.
        """
        runtime = self._runtime
        return -1 if runtime.is_closed or not runtime.is_ours else runtime.completions.descriptor

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a submitted operation. Never blocks.

        The operation still ends, soon, and ``take_completions`` returns the result: blocks handed over before
        are HITs, others LATE with reason CANCELLED. An ended ticket is left as it is.
        """
        self._runner.cancel(Ticket(whole("ticket", ticket, least=0, most=sys.maxsize)))

    def close(self) -> None:
        """End the connection and release the arena. Repeated calls do nothing.

        Calls of other threads and submitted operations end as DISCONNECTED. Memory still writable by an agent
        or a drive stays in use.
        """
        self._runner.close()

    def __enter__(self) -> Self:
        """Return the client to the ``with`` block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()
