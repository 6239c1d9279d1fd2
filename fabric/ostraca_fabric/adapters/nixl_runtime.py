"""NIXL's Python API behind types: what we use of it, its errors translated, its environment made sane.

The package is called ``nixl_cu12``, ``nixl_cu13`` or ``nixl``; any of them will do, none needs a GPU. It is
imported when the first agent is made, never by importing this module, and torch is never imported.

No progress thread: the wrapper's spins. Who owns a NixlAgent calls ``progress`` (or ``poll``) itself, and
calls nothing of it from two threads at once.

How a transfer ends, as tried out with NIXL 1.5.1 over TCP. When a peer's process dies, each of its transfers
reports a disconnect of its own. Of 238 READs that did, with 19 MiB partly landed, no byte landed later: a
reported disconnect ends the transfer it is reported for. That was not tried with a peer that lives on behind
a broken link, nor over RDMA. Any other error of a posted transfer is UNKNOWN, for ever: NIXL may stop looking
at a transfer without knowing where its bytes are, and releasing one does not stop it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NewType

import numpy as np

from ostraca_fabric.errors import TransportError

if TYPE_CHECKING:
    from numpy.typing import NDArray

PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")

Prepared = NewType("Prepared", object)
"""A descriptor list that transfers can pick from by number."""

Transfer = NewType("Transfer", object)
"""A transfer, posted or not."""

Registration = NewType("Registration", object)

_RDMA_DEVICES = Path("/sys/class/infiniband")

_ENVIRONMENT = {
    "NIXL_LOG_LEVEL": "FATAL",  # every error is an answer here, and Python's logger prints INFO to stdout
    "UCX_LOG_LEVEL": "fatal",  # likewise, and it prints to stdout, which is a worker's own
    "UCX_WARN_UNUSED_ENV_VARS": "n",
    # Over TCP a READ takes 1.1 GB/s with UCX's own segment sizes and 5.5 with these.
    "UCX_TCP_TX_SEG_SIZE": "512k",
    "UCX_TCP_RX_SEG_SIZE": "512k",
    # A peer whose link is down is noticed after 3 s rather than two minutes.
    "UCX_TCP_KEEPIDLE": "1s",
    "UCX_TCP_KEEPINTVL": "1s",
    "UCX_TCP_KEEPCNT": "2",
    # Else UCX waits for a connection in the call that begins it, for 134 s where a firewall or a cut link
    # swallows what is sent (measured): the thread that owns the agent would move nobody's blocks meanwhile.
    "UCX_TCP_CONN_NB": "y",
    # And it is given up after 20 s (measured), not 134: until then its worker can't be attached anew.
    "UCX_TCP_SYN_CNT": "3",
}

_making = threading.RLock()
"""Held while an agent is made, and while the process forks. UCX has locks of its own then: a child that was
forked by another thread meanwhile would find them held for ever when it makes an agent itself."""

os.register_at_fork(before=_making.acquire, after_in_parent=_making.release, after_in_child=_making.release)


class State(Enum):
    """What is known of a transfer."""

    PENDING = auto()
    DONE = auto()
    FAILED = auto()
    """It has ended, or was never begun; nothing of it lands any more."""

    UNKNOWN = auto()
    """NIXL can't say, now or later."""


def package() -> str | None:
    """Name the NIXL package that is installed; None when there is none."""
    return next((name for name in PACKAGES if importlib.util.find_spec(name) is not None), None)


def set_environment() -> None:
    """Set UCX's and NIXL's defaults where the user has not. Must come before the first backend is made.

    Without an RDMA device UCX's InfiniBand module is left out: it has crashed processes at their exit. With
    one it is needed, and a process that then meets that crash should leave through ``os._exit`` after closing
    everything.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not (_RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())):
        os.environ.setdefault("UCX_MODULES", "^ib")


class NixlAgent:
    """One NIXL agent with the UCX backend. Not thread-safe.

    Methods raise TransportError when NIXL refuses, except ``post`` and ``poll``, which answer with a State.
    """

    def __init__(self, name: str) -> None:
        found = package()
        if found is None:
            raise TransportError(f"NIXL is not installed: pip install {PACKAGES[0]}")
        set_environment()
        api = importlib.import_module(f"{found}._api")
        bindings = api.nixlBind
        self._refusals: tuple[type[BaseException], ...] = (
            RuntimeError,
            OSError,
            *(
                error
                for key, error in vars(bindings).items()
                if key.startswith("nixl") and isinstance(error, type) and issubclass(error, Exception)
            ),
        )
        self._disconnected: tuple[type[BaseException], ...] = (bindings.nixlRemoteDisconnectError,)
        self._before_posting: tuple[type[BaseException], ...] = (
            bindings.nixlNotFoundError,
            bindings.nixlInvalidParamError,
            bindings.nixlNotAllowedError,
            bindings.nixlNotSupportedError,
        )
        self.name = name
        try:
            with _making:
                self._api: Any = api.nixl_agent(
                    name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                )
        except self._refusals as error:
            raise TransportError(f"NIXL can't be set up: {error}") from error
        if "UCX" not in self._api.backends:
            raise TransportError(f"{found} has no UCX backend here")

    def register(self, address: int, size_bytes: int) -> Registration:
        """Make memory reachable for transfers of this agent, and for peers that have its metadata."""
        rows = np.array([[address, size_bytes, 0]], np.uint64)
        return Registration(self._call("register memory", self._api.register_memory, rows, "DRAM"))

    def deregister(self, registration: Registration) -> None:
        """Take memory back. Not enforced against peers on every path: they must know by other means."""
        self._call("deregister memory", self._api.deregister_memory, registration)

    def metadata(self) -> bytes:
        """Return what a peer needs to reach the memory registered so far."""
        return bytes(self._call("describe itself", self._api.get_agent_metadata))

    def add_remote(self, metadata: bytes) -> str:
        """Make a peer known and begin to connect; return its agent's name."""
        name = self._call("use the worker's metadata", self._api.add_remote_agent, metadata)
        remote = name.decode() if isinstance(name, bytes) else str(name)
        self._call("connect", self._api.make_connection, remote)
        return remote

    def remove_remote(self, name: str) -> None:
        """Disconnect from a peer and forget it."""
        self._call("forget a peer", self._api.remove_remote_agent, name)

    def prepare(self, remote: str, rows: NDArray[np.uint64]) -> Prepared:
        """Prepare slots: rows of (address, length, 0, stride, count). *remote* is empty for our own."""
        owner = remote or "NIXL_INIT_AGENT"
        return Prepared(self._call("prepare slots", self._api.prep_xfer_dlist, owner, rows, "DRAM"))

    def release_prepared(self, prepared: Prepared) -> None:
        """Let a descriptor list go; transfers made from it go on."""
        self._call("release slots", self._api.release_dlist_handle, prepared)

    def pick(
        self,
        operation: str,
        own: tuple[Prepared, NDArray[np.int32]],
        theirs: tuple[Prepared, NDArray[np.int32]],
    ) -> Transfer:
        """Make a transfer of prepared slots by number. *operation* is WRITE or READ."""
        return Transfer(self._call("make a transfer", self._api.make_prepped_xfer, operation, *own, *theirs))

    def spell_out(
        self, operation: str, own: NDArray[np.uint64], theirs: NDArray[np.uint64], remote: str
    ) -> Transfer:
        """Make a transfer of pieces (address, length, 0), shape (n, 3), of any lengths."""
        own_pieces = self._api.get_xfer_descs(own, "DRAM")
        their_pieces = self._api.get_xfer_descs(theirs, "DRAM")
        return Transfer(
            self._call(
                "make a transfer", self._api.initialize_xfer, operation, own_pieces, their_pieces, remote
            )
        )

    def post(self, transfer: Transfer) -> State:
        """Start a transfer. Within one host the bytes move during this call, without the GIL."""
        try:
            return self._state(self._api.transfer(transfer))
        except self._disconnected + self._before_posting:
            return State.FAILED
        except self._refusals:
            return State.UNKNOWN

    def poll(self, transfer: Transfer) -> State:
        """Make progress and say what is known of a posted transfer."""
        try:
            return self._state(self._api.check_xfer_state(transfer))
        except self._disconnected:
            return State.FAILED
        except self._refusals:
            return State.UNKNOWN

    def release(self, transfer: Transfer) -> None:
        """Let an ended transfer go. Never one that is PENDING or UNKNOWN: its bytes could still land."""
        self._call("release a transfer", self._api.release_xfer_handle, transfer)

    def progress(self) -> None:
        """Do what is ready to be done, for connections and transfers of both sides (about a microsecond)."""
        self._call("make progress", self._api.get_new_notifs)

    def _call(self, what: str, function: Any, *args: Any) -> Any:  # noqa: ANN401 (the library has no types)
        try:
            return function(*args)
        except self._refusals as error:
            raise TransportError(f"NIXL could not {what}: {error}") from error

    @staticmethod
    def _state(answer: str) -> State:
        return {"DONE": State.DONE, "PROC": State.PENDING}.get(answer, State.UNKNOWN)
