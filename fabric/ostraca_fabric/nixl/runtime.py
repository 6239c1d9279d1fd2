"""Typed wrapper of NIXL's Python API: calls used here, error translation, environment.

The package is ``nixl_cu12``, ``nixl_cu13`` or ``nixl``; any of the three works, none needs a GPU. The first
agent's creation imports the package, never the import of this module. torch is never imported.

There is no progress thread, because the wrapper's thread spins. The owner of a NixlAgent calls ``progress``
(or ``poll``), and never calls an agent from two threads at once.

End of transfers, as measured with NIXL 1.5.1 over TCP: after the death of a peer's process, each of its
transfers reports a disconnect. After 238 such READs, with 19 MiB partly landed, no later byte landed: a
reported disconnect ends its transfer. Not measured with a live peer behind a broken link, nor over RDMA. Any
other error of a posted transfer is UNKNOWN for ever: NIXL may stop tracking a transfer whose bytes are still
moving, and a release does not stop the transfer.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import secrets
import threading
from collections import deque
from enum import Enum, auto
from typing import Any, NewType

import numpy as np
import xxhash
from numpy.typing import NDArray

from ostraca_fabric.errors import ClosedError, NotInstalledError, TransportError, shown
from ostraca_fabric.nixl.room import check_room, rdma_devices

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")

Prepared = NewType("Prepared", object)
"""Descriptor list for transfers by slot number."""

Transfer = NewType("Transfer", object)
"""Transfer, posted or not."""

Registration = NewType("Registration", object)

_USED = (
    "add_remote_agent",
    "backends",
    "check_xfer_state",
    "deregister_memory",
    "get_agent_metadata",
    "get_new_notifs",
    "get_xfer_descs",
    "initialize_xfer",
    "make_connection",
    "make_prepped_xfer",
    "prep_xfer_dlist",
    "register_memory",
    "release_dlist_handle",
    "release_xfer_handle",
    "remove_remote_agent",
    "transfer",
)
"""Methods of NIXL's agent used here. A version without all of these is refused at the start."""

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # errors are answers here, and Python's logger prints INFO to stdout
    "UCX_LOG_LEVEL": "fatal",  # likewise; UCX prints to stdout, which belongs to the worker
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Over TCP a READ takes 1.1 GB/s with UCX's own segment sizes and 5.5 with these.
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    # Detects a peer with a broken link after 3 s rather than two minutes.
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
    # Otherwise UCX blocks in the connecting call, for 134 s behind a firewall or a cut link (measured): the
    # agent's thread would move no blocks of any worker meanwhile.
    "UCX_TCP_CONN_NB": "y",
    # Gives up after 20 s (measured), not 134: until then the worker can't attach again.
    "UCX_TCP_SYN_CNT": "3",
}

_WITHOUT_RDMA = ("UCX_MODULES", "^ib")

_VARIABLES_SHOWN = 8

_making = threading.RLock()
"""Held during the creation of an agent, and while the process forks. UCX holds locks during the creation: a
child forked meanwhile by another thread would inherit the locks and hang in its own creation of an agent."""

os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)

_users: set[int] = set()
"""Ids of processes with agents: this one, and those from which it was forked."""


class TransferState(Enum):
    """Known state of a transfer."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()
    """Ended, or never begun; no more bytes land."""

    UNKNOWN = auto()
    """NIXL can't tell, now or later."""


def package() -> str | None:
    """Return the name of the installed NIXL package, or None."""
    return next((name for name in PACKAGES if _is_installed(name)), None)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # a module of this name without a file was put into sys.modules
        return True


def _loaded() -> tuple[str, Any]:
    """Import NIXL's Python API from the first package that loads. Raises TransportError."""
    problems = []
    for name in filter(_is_installed, PACKAGES):
        try:
            return name, importlib.import_module(f"{name}._api")
        except Exception as error:  # noqa: BLE001 (the import runs the package's own code, and loads libraries)
            problems.append(f"{name} can't be loaded: {type(error).__name__}: {error}")
    if not problems:
        raise NotInstalledError(f"NIXL is not installed: pip install {PACKAGES[0]}")
    raise TransportError("; ".join(problems))


def set_environment() -> None:
    """Set defaults of UCX and NIXL where the user has not.

    Call before the creation of the first backend. Without an RDMA device UCX's InfiniBand module is excluded,
    because the module has crashed processes at exit. With an RDMA device the module is needed. A process that
    meets the crash should close everything and leave through ``os._exit``.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not rdma_devices():
        os.environ.setdefault(*_WITHOUT_RDMA)


def foreign_variables() -> str:
    """Return variables of UCX and NIXL with other values than set here; empty for none.

    For example variables set by a pod, which may exclude components needed here.
    """
    ours = dict([*_ENVIRONMENT.items(), _WITHOUT_RDMA])
    found = sorted(
        name
        for name, value in os.environ.items()
        if name.startswith(("UCX_", "NIXL_")) and value != ours.get(name)
    )
    return ", ".join(f"{name}={shown(os.environ[name])}" for name in found[:_VARIABLES_SHOWN])


class RegisteredMemory:
    """Memory registered with a NIXL agent of its own, for peers. Thread-safe."""

    def __init__(self, name: str, address: int, size_bytes: int) -> None:
        self._agent: NixlAgent | None = NixlAgent(name)
        self._registration = self._agent.register(address, size_bytes)
        self._extensions: dict[tuple[int, int], Registration | None] = {}
        """None without success."""

        self._leaving: deque[tuple[int, int]] = deque()
        self.metadata = sealed(self._agent.metadata())
        """For peers that reach the first memory alone."""

        self._lock = threading.Lock()

    def extend(self, address: int, size_bytes: int) -> bytes:
        """Register further memory; return metadata for peers that know ``metadata``.

        Blocks while NIXL registers the memory. Raises TransportError, and ClosedError after ``close``.
        """
        with self._lock:
            if self._agent is None:
                raise ClosedError("the NIXL agent is closed")
            self._deregister_leaving(self._agent)
            self._extensions[address, size_bytes] = None
            self._extensions[address, size_bytes] = self._agent.register(address, size_bytes)
            return sealed(self._agent.metadata())

    def shrink(self, address: int, size_bytes: int) -> None:
        """Deregister memory of an ``extend`` begun before, in a later call. Never blocks."""
        self._leaving.append((address, size_bytes))

    def _deregister_leaving(self, agent: NixlAgent) -> None:
        for _ in range(len(self._leaving)):
            place = self._leaving.popleft()
            if place not in self._extensions:  # not registered yet
                self._leaving.append(place)
            elif (extension := self._extensions.pop(place)) is not None:
                agent.deregister(extension)

    def progress(self) -> None:
        """Let the transport make progress, from any thread.

        Does nothing after ``close``, or while another thread makes progress.
        """
        if self._lock.acquire(blocking=False):
            try:
                if self._agent is not None:
                    self._agent.progress()
                    if self._leaving:
                        self._deregister_leaving(self._agent)
            finally:
                self._lock.release()

    def close(self) -> None:
        """Deregister the memory while still mapped; the agent goes, with its endpoints and their data."""
        with self._lock:
            agent, self._agent = self._agent, None
            if agent is not None:
                for registration in (self._registration, *self._extensions.values()):
                    if registration is not None:
                        agent.deregister(registration)


class NixlAgent:
    """NIXL agent with the UCX backend. Not thread-safe.

    Methods raise TransportError for refusals of NIXL, except ``post`` and ``poll``, which return a State.
    """

    def __init__(self, name: str) -> None:
        if _users - {os.getpid()}:  # others can't reach UCX in the child
            raise TransportError("the process was forked after the use of NIXL: start workers with spawn")
        if package() is not None:
            check_room()
        set_environment()
        found, api = _loaded()
        try:
            bindings = api.nixlBind
            self._disconnected: tuple[type[BaseException], ...] = (bindings.nixlRemoteDisconnectError,)
            self._before_posting: tuple[type[BaseException], ...] = (
                bindings.nixlNotFoundError,
                bindings.nixlInvalidParamError,
                bindings.nixlNotAllowedError,
                bindings.nixlNotSupportedError,
            )
            self._refusals: tuple[type[BaseException], ...] = (
                RuntimeError,
                OSError,
                *(
                    error
                    for key, error in vars(bindings).items()
                    if key.startswith("nixl") and isinstance(error, type) and issubclass(error, Exception)
                ),
            )
            with _making:
                _users.add(os.getpid())
                self._api: Any = api.nixl_agent(
                    name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                )
            missing = [each for each in _USED if not hasattr(self._api, each)]
        except Exception as error:  # another version of NIXL may lack any of these, or raise any error
            others = foreign_variables()
            cause = f" (with {others}, set for this process)" if others else ""
            raise TransportError(
                f"{found} can't be set up: {type(error).__name__}: {error}{cause}"
            ) from error
        if missing:
            raise TransportError(f"{found} lacks {', '.join(missing)}: install version 1.5 or later")
        if "UCX" not in self._api.backends:
            raise TransportError(f"{found} has no UCX backend here")
        self.name = name

    def register(self, address: int, size_bytes: int) -> Registration:
        """Register memory for transfers of this agent and of peers with its metadata."""
        rows = np.array([[address, size_bytes, 0]], np.uint64)
        return Registration(self._call("register memory", self._api.register_memory, rows, "DRAM"))

    def deregister(self, registration: Registration) -> None:
        """Deregister memory. Not enforced against peers on every path: notify peers separately."""
        self._call("deregister memory", self._api.deregister_memory, registration)

    def metadata(self) -> bytes:
        """Return the metadata a peer needs to reach the memory registered so far."""
        return bytes(self._call("describe itself", self._api.get_agent_metadata))

    def add_remote(self, metadata: bytes) -> str:
        """Add a peer and begin to connect; return the name of the peer's agent."""
        name = self._call("use the worker's metadata", self._api.add_remote_agent, metadata)
        try:
            remote = name.decode() if isinstance(name, bytes) else str(name)
        except UnicodeDecodeError as error:  # from the peer
            raise TransportError(f"the name of the worker's NIXL agent is no text: {error}") from error
        self._call("connect", self._api.make_connection, remote)
        return remote

    def remove_remote(self, name: str) -> None:
        """Disconnect from a peer and forget the peer."""
        self._call("forget a peer", self._api.remove_remote_agent, name)

    def prepare(self, remote: str, rows: NDArray[np.uint64]) -> Prepared:
        """Prepare slots from rows of (address, length, 0, stride, count).

        *remote* is empty for local memory.
        """
        owner = remote or "NIXL_INIT_AGENT"
        return Prepared(self._call("prepare slots", self._api.prep_xfer_dlist, owner, rows, "DRAM"))

    def release_prepared(self, prepared: Prepared) -> None:
        """Release a descriptor list; transfers created from the list continue."""
        self._call("release slots", self._api.release_dlist_handle, prepared)

    def pick(
        self,
        operation: str,
        own: tuple[Prepared, NDArray[np.int32]],
        theirs: tuple[Prepared, NDArray[np.int32]],
    ) -> Transfer:
        """Create a transfer of prepared slots by number. *operation* is WRITE or READ."""
        return Transfer(self._call("make a transfer", self._api.make_prepped_xfer, operation, *own, *theirs))

    def spell_out(
        self, operation: str, own: NDArray[np.uint64], theirs: NDArray[np.uint64], remote: str
    ) -> Transfer:
        """Create a transfer of pieces (address, length, 0), shape (n, 3), of any lengths."""
        own_pieces = self._api.get_xfer_descs(own, "DRAM")
        their_pieces = self._api.get_xfer_descs(theirs, "DRAM")
        return Transfer(
            self._call(
                "make a transfer", self._api.initialize_xfer, operation, own_pieces, their_pieces, remote
            )
        )

    def post(self, transfer: Transfer) -> TransferState:
        """Start a transfer. Within one host the bytes move during this call, without the GIL."""
        try:
            return self._state(self._api.transfer(transfer))
        except self._disconnected + self._before_posting:
            return TransferState.FAILED
        except self._refusals:
            return TransferState.UNKNOWN

    def poll(self, transfer: Transfer) -> TransferState:
        """Make progress and return the state of a posted transfer."""
        try:
            return self._state(self._api.check_xfer_state(transfer))
        except self._disconnected:
            return TransferState.FAILED
        except self._refusals:
            return TransferState.UNKNOWN

    def release(self, transfer: Transfer) -> None:
        """Release an ended transfer. Never release a PENDING or UNKNOWN transfer: bytes may land."""
        self._call("release a transfer", self._api.release_xfer_handle, transfer)

    def progress(self) -> None:
        """Advance connections and transfers of both sides (about a microsecond)."""
        self._call("make progress", self._api.get_new_notifs)

    def _call(self, what: str, function: Any, *args: Any) -> Any:  # noqa: ANN401 (the library has no types)
        try:
            return function(*args)
        except self._refusals as error:
            raise TransportError(f"NIXL could not {what}: {error}") from error

    @staticmethod
    def _state(answer: str) -> TransferState:
        return {"DONE": TransferState.DONE, "PROC": TransferState.PENDING}.get(answer, TransferState.UNKNOWN)


NAME = "nixl"
CHECKSUM_BYTES = 16


def sealed(metadata: bytes) -> bytes:
    """Put a checksum before NIXL's metadata."""
    return xxhash.xxh3_128_digest(metadata) + metadata


def unsealed(metadata: bytes) -> bytes:
    """Return NIXL's metadata. Raises TransportError for a wrong checksum."""
    checksum, inner = metadata[:CHECKSUM_BYTES], metadata[CHECKSUM_BYTES:]
    if not inner or xxhash.xxh3_128_digest(inner) != checksum:
        raise TransportError("the worker's NIXL metadata is damaged, or is none")
    return inner


def unique_name(label: str) -> str:
    """Return an unguessable NIXL agent name: NIXL identifies its peers by name alone."""
    return f"{label}-{secrets.token_hex(16)}"
