"""The link: finds the fabric in a thread of its own, so that nobody waits for it.

An engine starts without a fabric and goes on when one appears. Once a volume is open, losing the agent and
finding it again is the client's own affair.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import ostraca
from ostraca.connectors.vllm.settings import LOGGER
from ostraca.connectors.vllm.shape import volume_name
from ostraca_fabric.errors import OstracaError

if TYPE_CHECKING:
    from ostraca.client import Client
    from ostraca.connectors.vllm.settings import TierSettings
    from ostraca.volume import Volume
    from ostraca_fabric.layout import Layout

log = logging.getLogger(LOGGER)

_ATTEMPT_S = 5.0
"""How long one attempt to connect, or to open the volume, may take."""


@dataclass(frozen=True, slots=True)
class Lane:
    """An open volume and its client. Neither blocks through its ``submit_*`` methods."""

    client: Client
    volume: Volume


class Link:
    """Thread-safe. ``close`` must be called."""

    def __init__(self, settings: TierSettings, *, block_bytes: int, layout: Layout) -> None:
        self._settings = settings
        self._block_bytes = block_bytes
        self._changed = threading.Condition()
        self._wanted = layout
        self._lane: Lane | None = None
        self._client: Client | None = None
        self._is_closed = False
        self._said = ""
        self._token = settings.token()
        self._thread = threading.Thread(target=self._run, name="ostraca-link", daemon=True)
        self._thread.start()

    def now(self) -> Lane | None:
        """Return the open volume; None while there is none. Does not wait."""
        return self._lane

    @property
    def client(self) -> Client | None:
        """The client, once one is connected: what it has under way outlives a change of volumes."""
        return self._client

    def want(self, layout: Layout) -> None:
        """Open this layout's volume in place of the one before. Does not wait."""
        with self._changed:
            self._wanted = layout
            self._lane = None
            self._changed.notify_all()

    def close(self) -> None:
        """End the connection; what is under way ends as DISCONNECTED. Takes seconds at most."""
        with self._changed:
            self._is_closed = True
            self._lane = None
            self._changed.notify_all()
        self._thread.join()
        if self._client is not None:
            self._client.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self._lane is None)
                if self._is_closed:
                    return
                wanted = self._wanted
            try:
                lane = self._open(wanted)
            except OstracaError as error:
                self._say(f"no fabric yet, the engine goes on without: {error}", logging.WARNING)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, self._settings.connect_retry_s)
                continue
            with self._changed:
                if wanted == self._wanted and not self._is_closed:
                    self._lane = lane
            self._say(f"uses {lane.volume!r} by {lane.client!r}", logging.INFO)

    def _open(self, layout: Layout) -> Lane:
        """Raises OstracaError."""
        if self._client is None:
            self._client = ostraca.connect(
                self._settings.agents or None,
                credentials=self._token,
                tenant=self._settings.tenant,
                settings=self._settings.client(),
                timeout_s=_ATTEMPT_S,
            )
        volume = self._client.volume(
            volume_name(self._settings.volume, layout),
            layout,
            block_bytes=self._block_bytes,
            create=True,
            break_even_tokens=self._settings.break_even_tokens,
            timeout_s=_ATTEMPT_S,
        )
        return Lane(self._client, volume)

    def _say(self, words: str, level: int) -> None:
        """Log a sentence once, not at every attempt."""
        if words != self._said:
            self._said = words
            log.log(level, "Ostraca tier: %s", words)
