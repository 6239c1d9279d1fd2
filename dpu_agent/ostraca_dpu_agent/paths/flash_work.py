"""Work on drives outside the map: inspect, measure, format.

No request touches a drive of the map. A drive with contents is formatted only if the request permits the loss
of such contents. Requests use a drive one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TypeVar, assert_never

import numpy as np
from numpy.typing import NDArray

from ostraca_dpu_agent.paths.contents import format_drive, inspect_drive
from ostraca_dpu_agent.paths.manager import PathManager
from ostraca_fabric.errors import OstracaError, RefusedError, UsageError
from ostraca_fabric.model.extent import FIRST_SEGMENT_OFFSET, MIB, PAGE_BYTES, Pieces
from ostraca_fabric.model.fabric_map import FabricMap
from ostraca_fabric.model.ids import ID_BYTES, DriveId, EnclosureId, drive_id
from ostraca_fabric.model.target import Target, parse_controller
from ostraca_fabric.ports.drive import Drive
from ostraca_fabric.ports.paths import Namespace, PathError
from ostraca_fabric.runtime.memory import HugeMemory
from ostraca_fabric.runtime.tasks import in_own_thread
from ostraca_fabric.runtime.threads import run_in_background
from ostraca_fabric.wire.flash_work import (
    BUSY,
    Content,
    DiscoverDrives,
    DiscoveredDrives,
    FlashAnswer,
    FlashRequest,
    Format,
    FormatResult,
    Probe,
    ProbeResult,
    TargetText,
    read_ask,
)

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_LOOK_DEADLINE_S = 60.0
_PROBE_S_MAX = 60.0


class FlashWorker:
    """Flash work of one agent."""

    def __init__(self, manager: PathManager, newest_map: Callable[[], FabricMap]) -> None:
        """Use the paths of *manager*."""
        self._manager = manager
        self._newest_map = newest_map
        self._busy: set[str] = set()
        """NGUIDs of drives under measurement or formatting."""

    async def answer(self, body: bytes, deadline_s: float) -> FlashAnswer:
        """Execute the request in *body*, encoded as msgpack.

        Raises MalformedError, UsageError for an invalid request, and RefusedError if the drive is in the
        map or busy, or after *deadline_s*.
        """
        ask = read_ask(body)
        try:
            async with asyncio.timeout(min(_LOOK_DEADLINE_S + _PROBE_S_MAX, deadline_s)):  # NaN: the former
                return await self._answer(ask)
        except TimeoutError:
            raise RefusedError("late", "the operation was not completed within its deadline") from None

    async def _answer(self, ask: FlashRequest) -> FlashAnswer:
        target = _target(ask.target)
        self._manager.keep_connected(target)
        match ask:
            case DiscoverDrives():
                return await self._look(target)
            case Probe():
                return await self._probe(target, ask)
            case Format():
                return await self._format(target, ask)
            case _:
                assert_never(ask)

    async def _look(self, target: Target) -> DiscoveredDrives:
        host = self._manager.paths.host
        try:
            namespaces = await self._connect(target)
            states = await self._manager.paths.states(target)
        except PathError as error:
            return DiscoveredDrives(host, stage=error.stage.value, trouble=str(error))
        fabric = self._newest_map().fabric
        drives = await asyncio.gather(
            *(
                in_own_thread("inspect", partial(inspect_drive, self._manager.opener, namespace, fabric))
                for namespace in namespaces
            )
        )
        return DiscoveredDrives(host, tuple(drives), sum(state.is_live for state in states), len(states))

    async def _probe(self, target: Target, ask: Probe) -> ProbeResult:
        if not 0 < ask.seconds <= _PROBE_S_MAX:
            raise UsageError(
                f"a measurement takes up to {_PROBE_S_MAX:.0f} s, not {ask.seconds}: choose a shorter time"
            )
        namespace = await self._namespace(target, ask.nguid)
        if isinstance(namespace, str):
            return ProbeResult(trouble=namespace)
        if ask.writes:
            self._check_is_free(ask.nguid)
            fabric = self._newest_map().fabric
            seen = await in_own_thread(
                "inspect", partial(inspect_drive, self._manager.opener, namespace, fabric)
            )
            if seen.content is not Content.OURS:
                return ProbeResult(
                    trouble=f"no write test: not formatted for this fabric: {seen.says or 'blank'}"
                )
        with self._exclusive(ask.nguid) as use:
            try:
                drive = self._manager.opener.open(DriveId(f"looked-at/{ask.nguid}"), namespace.device)
                try:
                    result = await measure_drive(drive, seconds=ask.seconds, writes=ask.writes)
                finally:
                    closed = _run_to_end("inspect", drive.close, use)
                await closed
            except OstracaError as error:
                return ProbeResult(trouble=str(error))
        return result

    async def _format(self, target: Target, ask: Format) -> FormatResult:
        drive = drive_id(EnclosureId(ask.enclosure), ask.drive)
        format_id = _format_id(ask.format_id)
        if not {*ask.replaces} <= {Content.BLANK, Content.OURS, Content.OTHER, Content.FOREIGN}:
            raise UsageError("an unreadable drive can't be formatted: replace the drive")
        namespace = await self._namespace(target, ask.nguid)
        if isinstance(namespace, str):
            return FormatResult(trouble=namespace)
        with self._exclusive(ask.nguid) as use:
            try:
                self._check_is_free(ask.nguid, but_for=drive)
                log.info("Formatting %s as %s", namespace.device, drive)
                formats = partial(
                    format_drive,
                    self._manager.opener,
                    namespace,
                    self._newest_map().fabric,
                    drive,
                    format_id,
                    replaces=frozenset(ask.replaces),
                    segment_bytes=ask.segment_bytes,
                    may_begin=lambda: self._is_free(ask.nguid, but_for=drive),
                )
                record = await _run_to_end("format", formats, use)
            except OstracaError as error:
                return FormatResult(trouble=str(error))
        return FormatResult(record.id, record.size_bytes, record.weight, record.block_bytes_max)

    async def _connect(self, target: Target) -> tuple[Namespace, ...]:
        try:
            secret = self._manager.secret_of(target.secret)
        except OstracaError as error:
            raise RefusedError("secret", str(error)) from error
        return await self._manager.paths.connect(target, secret)

    async def _namespace(self, target: Target, nguid: str) -> Namespace | str:
        """Return a drive of a target, or the reason for its absence."""
        try:
            found = {each.nguid: each for each in await self._connect(target)}
        except PathError as error:
            return str(error)
        return found.get(nguid) or f"{target.nqn} exports no drive {nguid}: check the slot and the exports"

    @contextmanager
    def _exclusive(self, nguid: str) -> Iterator[ExitStack]:
        """Mark a drive as busy; yield the mark, which ``_run_to_end`` may take over."""
        if nguid in self._busy:
            raise RefusedError(BUSY, f"another operation uses drive {nguid}: try again later")
        self._busy.add(nguid)
        with ExitStack() as use:
            use.callback(self._busy.discard, nguid)
            yield use

    def _is_free(self, nguid: str, *, but_for: DriveId | None = None) -> bool:
        return not any(
            drive.nguid == nguid and drive.id != but_for
            for enclosure in self._newest_map().enclosures.values()
            for drive in enclosure.drives
        )

    def _check_is_free(self, nguid: str, *, but_for: DriveId | None = None) -> None:
        if not self._is_free(nguid, but_for=but_for):
            raise RefusedError(
                "in_the_map",
                f"drive {nguid} is part of the map, with blocks: drain and remove the drive first",
            )


def _run_to_end(name: str, act: Callable[[], _T], use: ExitStack) -> asyncio.Future[_T]:
    """Run *act* in a thread; the drive in *use* stays busy until the end, which may miss a deadline."""
    loop, mark, ended = asyncio.get_running_loop(), use.pop_all(), run_in_background(name, act)
    ended.add_done_callback(lambda _: loop.call_soon_threadsafe(mark.close))
    return asyncio.shield(asyncio.wrap_future(ended))


def _target(text: TargetText) -> Target:
    return Target(text.nqn, tuple(map(parse_controller, text.controllers)), text.secret)


def _format_id(text: str) -> bytes:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        found = b""
    if len(found) != ID_BYTES:
        raise UsageError(f"a format id has {2 * ID_BYTES} hexadecimal digits")
    return found


_AT_ONCE = 4
_SHORT_READS_MAX = 2000


async def measure_drive(drive: Drive, *, seconds: float, writes: bool) -> ProbeResult:
    """Measure a drive for about *seconds*.

    With *writes*, parts of the drive behind the first MiB are overwritten. Writing comes first: a drive
    never written answers reads without flash access.
    """
    memory = HugeMemory(_AT_ONCE * MIB, prefault=True)
    # Random bytes in each page: drives that skip zeroes or deduplicate would appear too fast.
    memory.array[:] = np.random.default_rng(0).integers(0, 256, _AT_ONCE * MIB, np.uint8)
    probe = _Probe(drive, memory)
    parts = 3 if writes else 2
    try:
        written_s = await probe.measure_stream(seconds / parts, drive.submit_write) if writes else 0.0
        read_s = await probe.measure_stream(seconds / parts, drive.submit_read)
        waits = await probe.measure_short_reads(seconds / parts)
    except BaseException:
        memory.leak()  # an I/O may still use the memory
        raise
    memory.close()
    p50, p99 = np.percentile(waits, (50, 99)).tolist() if waits else (0.0, 0.0)
    trouble = f"{probe.failed} of its I/Os failed" if probe.failed else ""
    return ProbeResult(read_s, written_s, p50, p99, probe.failed, trouble)


class _Probe:
    def __init__(self, drive: Drive, memory: HugeMemory) -> None:
        self._drive = drive
        self._memory = memory
        self._dice = random.Random(1)  # noqa: S311 (positions, no secret)
        self.failed = 0

    async def measure_stream(
        self, seconds: float, submit: Callable[[Pieces], asyncio.Future[NDArray[np.bool_]]]
    ) -> float:
        """Return bytes per second of 1 MiB I/Os at random positions, four at once."""
        places = max(1, (self._drive.size_bytes - FIRST_SEGMENT_OFFSET) // MIB)
        began_s, moved_bytes = time.monotonic(), 0
        while (took_s := time.monotonic() - began_s) < seconds:
            at = [FIRST_SEGMENT_OFFSET + self._dice.randrange(places) * MIB for _ in range(_AT_ONCE)]
            pieces = Pieces(
                self._memory.array,
                np.arange(_AT_ONCE, dtype=np.int64) * MIB,
                np.array(at, np.int64),
                np.full(_AT_ONCE, MIB, np.uint32),
            )
            good = await asyncio.shield(submit(pieces))
            moved_bytes += int(good.sum()) * MIB
            self.failed += int((~good).sum())
            if not good.any():
                break
        return moved_bytes / max(took_s, time.monotonic() - began_s)

    async def measure_short_reads(self, seconds: float) -> list[float]:
        """Return the duration of single page reads in sequence, in seconds."""
        pages, waits = self._drive.size_bytes // PAGE_BYTES, list[float]()
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and len(waits) < _SHORT_READS_MAX:
            page = self._memory.array[:PAGE_BYTES]
            began_s = time.monotonic()
            place = self._dice.randrange(pages) * PAGE_BYTES
            good = await asyncio.shield(self._drive.submit_read(Pieces.one(page, drive_offset=place)))
            if not good.all():
                self.failed += 1
                break
            waits.append(time.monotonic() - began_s)
        return waits
