"""Lookups, loads and stores of pages without any SGLang version.

SGLang's threads wait in these calls, each at most for the deadline of its setting. A failure of the fabric is
a miss, or a page that is not stored. No call raises an OstracaError.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

from ostraca.connectors.kv_identity.chains import Run, unordered_chain
from ostraca.connectors.sglang.pages import HASH_BYTES, PageForm
from ostraca.connectors.sglang.settings import RankIdentity, SglangSettings
from ostraca.connectors.transfers.counters import (
    LOAD_BYTES,
    LOAD_CHUNKS,
    LOOKUP_CHUNKS,
    REQUESTS,
    STORE_CHUNKS,
    ConnectorCounters,
    ConnectorMetric,
)
from ostraca.connectors.transfers.explain_command import explain_command
from ostraca.connectors.transfers.fabric_link import FabricLink
from ostraca.connectors.transfers.failed_loads import FailedLoads
from ostraca.connectors.transfers.health import FabricHealth
from ostraca.connectors.transfers.rows import Blocks, PoolRows
from ostraca.volume import Volume
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.model.outcome import BlockState, PutState, Reason

_ACCEPTED = frozenset({PutState.STAGED, PutState.COMMITTED, PutState.EXISTS})

_NO_RUN = Run(unordered_chain([bytes(HASH_BYTES)])[:0], ())

Prefix: TypeAlias = Sequence[str] | None
"""Keys of all pages before a call's pages, from the root."""

_Result = TypeVar("_Result")


class PageStore:
    """Pages of one rank in the fabric. Thread-safe. ``close`` must be called."""

    def __init__(
        self,
        settings: SglangSettings,
        identity: RankIdentity,
        *,
        block_bytes: int,
        generation: bytes = b"",
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect in the background. Raises UsageError for a ``weights_file`` that can't be read.

        Pages of another *generation* are not found.
        """
        self.counters = ConnectorCounters()
        self.generation = generation
        self._block_bytes = block_bytes
        self._settings = settings
        self._identity = identity
        self._clock_s = clock_s
        self._log = logging.getLogger(settings.LOGGER)
        self._holding = threading.Lock()  # FailedLoads is not thread-safe
        self._failed_loads = FailedLoads(
            entries_max=settings.failed_chunks_max, hold_s=settings.failed_hold_s
        )
        self._layout = identity.layout(settings, block_bytes=block_bytes)
        self._link = FabricLink(settings, block_bytes=block_bytes, layout=self._layout)
        self.health = FabricHealth(
            settings, is_linked=lambda: self._link.volume() is not None, clock_s=clock_s
        )

    def register(self, rows: PoolRows) -> None:
        """Use a pool in place. Its end or the end of the connection unregisters the pool."""
        self._link.register(rows)

    def look_up(self, form: PageForm, keys: Sequence[str], prefix: Prefix) -> list[bool]:
        """Tell for each page whether the fabric has all of its blocks. Pins the found pages for ``pin_s``.

        A page with a failed load is absent for ``failed_hold_s``.
        """
        pin_s, deadline_s = self._settings.pin_s, self._settings.lookup_deadline_s
        run, result = self._call(
            (LOOKUP_CHUNKS, self.health.read_refusal),
            (form, keys, prefix),
            lambda volume, run: volume.lookup(run.chain, pin_s=pin_s, deadline_s=deadline_s),
        )
        if result is None:
            return [False] * len(keys)
        (chain,) = result.chains
        self.counters.add_outcomes(LOOKUP_CHUNKS, BlockState, chain.state_codes, chain.reason_codes)
        self.health.record_read(chain.reason_codes)
        volume = self._link.volume()
        if BlockState.HIT not in chain.state_codes and volume is not None:
            command = explain_command(volume, run.chain)
            self._log.debug(
                "Ostraca: none of %d pages is found; explain the first with: %s", len(keys), command
            )
        now_s = self._clock_s()
        with self._holding:
            held = [self._failed_loads.holds(key, now_s) for key in run.keys]
        self.counters.add(LOOKUP_CHUNKS, "failed_load", sum(held))
        pairs = zip(chain.state_codes, held, strict=True)
        return form.are_pages_good([code == BlockState.HIT and not is_held for code, is_held in pairs])

    def load(self, form: PageForm, keys: Sequence[str], prefix: Prefix, into: Blocks) -> list[bool]:
        """Fill pages; return the success of each. *into* holds the memory of each block.

        Failed pages have undefined bytes. Nothing is written after the return.
        """
        deadline_s, speed = self._settings.load_deadline_s, self._settings.prefill_tokens_per_s
        recompute_s = len(keys) * self._identity.page_tokens / speed if speed else None
        run, result = self._call(
            (LOAD_CHUNKS, self.health.read_refusal),
            (form, keys, prefix),
            lambda volume, run: volume.get(
                run.chain, into=into, deadline_s=deadline_s, recompute_s=recompute_s
            ),
        )
        if result is None:
            return [False] * len(keys)
        self.counters.add_outcomes(LOAD_CHUNKS, BlockState, result.state_codes, result.reason_codes)
        self.health.record_read(result.reason_codes)
        are_good = [code == BlockState.HIT for code in result.state_codes]
        outcomes = zip(run.keys, are_good, result.reason_codes, strict=True)
        # After a reconnect, lookups are to find the blocks again.
        failed = [key for key, is_good, why in outcomes if not is_good and why != Reason.DISCONNECTED]
        with self._holding:
            self._failed_loads.add(failed, self._clock_s())
        pages = form.are_pages_good(are_good)
        self.counters.add(LOAD_BYTES, count=sum(pages) * form.page_bytes)
        return pages

    def store(self, form: PageForm, keys: Sequence[str], prefix: Prefix, source: Blocks) -> list[bool]:
        """Store pages; return the success of each. *source* holds the memory of each block.

        A block that another writer stores now counts as stored: SGLang ends the store of a prompt at the
        first failure. The caller may reuse the memory after the return.
        """
        deadline_s = self._settings.store_deadline_s
        _, result = self._call(
            (STORE_CHUNKS, self.health.write_refusal),
            (form, keys, prefix),
            lambda volume, run: volume.put(run.chain, source=source, deadline_s=deadline_s),
        )
        if result is None:
            return [False] * len(keys)
        self.counters.add_outcomes(STORE_CHUNKS, PutState, result.state_codes, result.reason_codes)
        self.health.record_write(result.reason_codes)
        outcomes = zip(result.state_codes, result.reason_codes, strict=True)
        return form.are_pages_good(
            [state in _ACCEPTED or reason == Reason.IN_FLIGHT for state, reason in outcomes]
        )

    def hide_pages(self, generation: bytes) -> None:
        """Hide all pages stored so far.

        If ``weights_file`` has changed, another volume is opened, shared with engines of the same weights.
        Otherwise *generation* begins, a name never used before, and common to ranks with common pages.
        """
        try:
            layout = self._identity.layout(self._settings, block_bytes=self._block_bytes)
        except UsageError as error:
            self._log.warning("Ostraca: the volume stays the same: %s", error)
            layout = self._layout
        if layout == self._layout:
            self.generation = generation
        else:
            self._layout, self.generation = layout, b""
            self._link.switch_layout(layout)

    def close(self) -> None:
        """End the connection. Calls under way fail."""
        self._link.close()

    def _call(
        self,
        allowance: tuple[ConnectorMetric, str],
        pages: tuple[PageForm, Sequence[str], Prefix],
        call: Callable[[Volume, Run], _Result],
    ) -> tuple[Run, _Result | None]:
        """Call the open volume for the blocks of pages, and wait; without a result after a refusal or error.

        *allowance* is the metric of the blocks, and the reason against a call.
        """
        (metric, refusal), (form, keys, prefix) = allowance, pages
        volume = self._link.volume()
        if refusal or volume is None or not keys:
            self.counters.add(metric, refusal or "no_fabric", len(keys) * form.blocks_per_page)
            return _NO_RUN, None
        # SGLang passes None instead of an empty prefix.
        run = form.run(keys, (prefix or ()) if self._settings.prefix_keys else None, self.generation)
        try:
            result = call(volume, run)
        except OstracaError as error:
            self._log.warning("Ostraca: %s failed: %s", metric.name, error)
            self.counters.add(metric, "error", len(run.keys))
            return run, None
        self.counters.add(REQUESTS, metric.name.removesuffix("_chunks"))
        return run, result
