"""Link: background connection to the fabric, in a thread of its own.

An engine starts without a fabric and continues when one appears. After the volume is open, the client itself
handles failover and reconnects.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from itertools import chain, repeat

import ostraca
from ostraca.client import Client
from ostraca.connectors.kv_identity.identity import volume_name
from ostraca.connectors.transfers.hash_seed import other_seed_problem
from ostraca.connectors.transfers.rows import PoolRows
from ostraca.connectors.transfers.settings import ConnectorSettings
from ostraca.volume import Volume
from ostraca_fabric.errors import OstracaError
from ostraca_fabric.model.volume import Layout
from ostraca_fabric.runtime.threads import BackgroundTask

_ATTEMPT_S = 5.0
"""Longest attempt to connect, or to open the volume."""

_NO_FABRIC = "no fabric yet, the engine goes on without"


class FabricLink:
    """Background connection, once there is a layout. Thread-safe. ``close`` must be called."""

    def __init__(self, settings: ConnectorSettings, *, block_bytes: int, layout: Layout | None) -> None:
        self._settings = settings
        self._log = logging.getLogger(settings.LOGGER)
        self._block_bytes = block_bytes
        self._changing = threading.Lock()  # held while layout, volume, client, pools or end change
        self._layout = layout
        self._hash_seed = ""
        """Seed to compare with the other engines'; empty if there is none, or after the comparison."""
        self._volume: Volume | None = None
        self.client: Client | None = None
        """The client once connected: its operations and regions outlive reconnects and changes of volumes."""

        self._unregistered: list[PoolRows] = []
        """Pools that wait for the client."""

        self._last_logged = ""
        self._task = BackgroundTask(
            "link",
            self._attempt,
            is_needed=lambda: self._layout is not None and (self._volume is None or bool(self._hash_seed)),
            pauses_s=lambda: chain((0.0,), repeat(settings.connect_retry_s)),
        )
        self._start()

    def volume(self) -> Volume | None:
        """Return the open volume; None while not connected. Does not wait.

        Methods ``submit_*`` of the volume never block.
        """
        if self._volume is None:
            self._start()
        return self._volume

    def switch_layout(self, layout: Layout | None, *, hash_seed: str = "") -> None:
        """Open this layout's volume in place of the previous volume; None leaves all volumes closed.

        Does not wait. A *hash_seed* is compared with the other engines' seed, and a difference is logged.
        """
        with self._changing:
            self._layout, self._volume, self._hash_seed = layout, None, hash_seed
        self._start()

    def compare_hash_seed(self, hash_seed: str) -> None:
        """Compare a seed with the other engines' once the volume is open, and log a difference.

        Does not wait, so must not be called during ``switch_layout``.
        """
        self._hash_seed = hash_seed  # without the lock, held while pools are registered
        self._start()

    def register(self, pool: PoolRows) -> None:
        """Register a pool with the client, before the first volume is opened where possible.

        The end of the connection unregisters the pool.
        """
        with self._changing:
            self._unregistered.append(pool)
            self._register_pools()

    def close(self) -> None:
        """End the connection; operations under way end as DISCONNECTED. Lets go of all pools."""
        with self._changing:
            self._task.close()
            self._volume = None
            self._unregistered.clear()
        if self.client is not None:
            self.client.close()

    def _start(self) -> None:
        if not self._task.start():
            self._log_once(f"{_NO_FABRIC}: the process can start no more threads", logging.WARNING)

    def _attempt(self) -> None:
        """Open the volume of the layout, and log the result.

        Opens the next layout's volume at once if the layout changes meanwhile. Compares the hash seed.
        """
        is_current = self._volume is not None
        while not is_current:
            layout = self._layout
            if layout is None:
                return
            try:
                volume = self._open(layout)
            except Exception as error:  # noqa: BLE001 (otherwise no attempt would follow in the engine's life)
                cause = str(error) if isinstance(error, OstracaError) else f"{type(error).__name__}: {error}"
                if not self._task.is_closed:
                    self._log_once(f"{_NO_FABRIC}: {cause}", logging.WARNING)
                return
            with self._changing:
                is_current = layout == self._layout or self._task.is_closed
                if is_current and not self._task.is_closed:
                    self._volume = volume
            self._log_once(f"uses {volume!r} by {self.client!r}", logging.INFO)
        self._compare_hash_seed()

    def _compare_hash_seed(self) -> None:
        """Compare the seed with the volume's, once."""
        with self._changing:
            volume, seed = self._volume, self._hash_seed
            if volume is None or not seed:
                return
            self._hash_seed = ""
        with contextlib.suppress(OstracaError):
            problem = other_seed_problem(volume, seed)
            if problem:
                self._log.warning("Ostraca: %s", problem)

    def _open(self, layout: Layout) -> Volume:
        """Open the layout's volume, connecting first if necessary.

        Raises OstracaError.
        """
        client = self.client
        if client is None:
            client = ostraca.connect(
                self._settings.agents or None,
                tenant=self._settings.tenant,
                settings=self._settings.client(),
                timeout_s=_ATTEMPT_S,
            )
            with self._changing:
                self.client = client
                is_closed = self._task.is_closed
                self._register_pools()
            if is_closed:  # ``close`` has not seen this client
                client.close()
        return client.volume(
            volume_name(self._settings.volume, layout),
            layout,
            block_bytes=self._block_bytes,
            create=True,
            break_even_tokens=self._settings.break_even_tokens,
            timeout_s=_ATTEMPT_S,
        )

    def _register_pools(self) -> None:
        """Register the pools that wait, once there is a client."""
        while self.client is not None and self._unregistered:
            try:
                self._unregistered.pop().register(self.client)
            except OstracaError as error:
                self._log.info("Ostraca: blocks are copied between pool and arena: %s", error)

    def _log_once(self, words: str, level: int) -> None:
        """Log a sentence once, not on every attempt."""
        if words != self._last_logged:
            self._last_logged = words
            self._log.log(level, "Ostraca: %s", words)
