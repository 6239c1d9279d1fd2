"""What an operator has this agent do with drives that are not in the map yet: look, measure, format.

Nothing here touches a drive of the map, whoever asks, and a drive that holds anything is formatted only by
who says that it may be. One drive is worked on by one request at a time.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from ostraca_dpu_agent.paths.contents import contents_of, formatted
from ostraca_dpu_agent.paths.probe import probed
from ostraca_fabric.adapters.file_drive import FileDrive
from ostraca_fabric.errors import OstracaError, RefusedError, UsageError
from ostraca_fabric.ids import ID_BYTES, DriveId, EnclosureId, drive_id
from ostraca_fabric.ports.paths import PathError
from ostraca_fabric.target import Target, parse_controller
from ostraca_fabric.wire.flash_work import (
    BUSY,
    Content,
    FlashAnswer,
    FlashAsk,
    Format,
    Formatted,
    Look,
    Looked,
    Probe,
    Probed,
    read_ask,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ostraca_dpu_agent.paths.keeper import PathKeeper
    from ostraca_fabric.fabric_map import FabricMap
    from ostraca_fabric.ports.paths import Namespace
    from ostraca_fabric.wire.flash_work import TargetText

log = logging.getLogger(__name__)

_LOOK_DEADLINE_S = 60.0
_PROBE_S_MAX = 60.0


class FlashWorker:
    """One agent's."""

    def __init__(self, keeper: PathKeeper, newest_map: Callable[[], FabricMap]) -> None:
        """Work through the paths that *keeper* has."""
        self._keeper = keeper
        self._newest_map = newest_map
        self._busy: set[str] = set()
        """NGUIDs of drives that are being measured or formatted."""

    async def answer(self, body: bytes, deadline_s: float) -> FlashAnswer:
        """Do what *body* asks for, as msgpack.

        Raises MalformedError, UsageError for what makes no sense, and RefusedError where the drive is in the
        map or is being worked on, or *deadline_s* is over.
        """
        ask = read_ask(body)
        try:
            async with asyncio.timeout(min(deadline_s, _LOOK_DEADLINE_S + _PROBE_S_MAX)):
                return await self._answer(ask)
        except TimeoutError:
            raise RefusedError("late", "it was not done in the time that was given") from None

    async def _answer(self, ask: FlashAsk) -> FlashAnswer:
        target = _target(ask.target)
        self._keeper.hold(target)
        match ask:
            case Look():
                return await self._look(target)
            case Probe():
                return await self._probe(target, ask)
            case Format():
                return await self._format(target, ask)
            case _:
                assert_never(ask)

    async def _look(self, target: Target) -> Looked:
        host = self._keeper.paths.host
        try:
            namespaces = await self._connect(target)
            states = await self._keeper.paths.states(target)
        except PathError as error:
            return Looked(host, stage=error.stage.value, trouble=str(error))
        fabric = self._newest_map().fabric
        drives = await asyncio.gather(
            *(asyncio.to_thread(contents_of, namespace, fabric) for namespace in namespaces)
        )
        return Looked(host, tuple(drives), sum(state.is_live for state in states), len(states))

    async def _probe(self, target: Target, ask: Probe) -> Probed:
        if not 0 < ask.seconds <= _PROBE_S_MAX:
            raise UsageError(f"a drive is measured for up to {_PROBE_S_MAX:.0f} s, not {ask.seconds}")
        namespace = await self._namespace(target, ask.nguid)
        if isinstance(namespace, str):
            return Probed(trouble=namespace)
        if ask.writes:
            self._check_is_free(ask.nguid)
            seen = await asyncio.to_thread(contents_of, namespace, self._newest_map().fabric)
            if seen.content is not Content.OURS:
                return Probed(
                    trouble=f"nothing is written to it, for it is not ours: {seen.says or 'it is blank'}"
                )
        self._begin(ask.nguid)
        try:
            drive = FileDrive.open(_name(ask.nguid), namespace.device)
            try:
                return await probed(drive, seconds=ask.seconds, writes=ask.writes)
            finally:
                await asyncio.to_thread(drive.close)
        except OstracaError as error:
            return Probed(trouble=str(error))
        finally:
            self._busy.discard(ask.nguid)

    async def _format(self, target: Target, ask: Format) -> Formatted:
        drive = drive_id(EnclosureId(ask.enclosure), ask.drive)
        format_id = _format_id(ask.format_id)
        if not {*ask.replaces} <= {Content.BLANK, Content.OURS, Content.OTHER, Content.FOREIGN}:
            message = "what can't be read is not formatted"
            raise UsageError(message)
        namespace = await self._namespace(target, ask.nguid)
        if isinstance(namespace, str):
            return Formatted(trouble=namespace)
        self._begin(ask.nguid)
        try:
            self._check_is_free(ask.nguid, but_for=drive)
            fabric = self._newest_map().fabric
            log.info("Formats %s as %s", namespace.device, drive)
            record = await asyncio.to_thread(
                formatted,
                namespace,
                fabric,
                drive,
                format_id,
                replaces=frozenset(ask.replaces),
                segment_bytes=ask.segment_bytes,
                may_begin=lambda: self._is_free(ask.nguid, but_for=drive),
            )
        except OstracaError as error:
            return Formatted(trouble=str(error))
        finally:
            self._busy.discard(ask.nguid)
        return Formatted(record.id, record.size_bytes, record.weight, record.block_bytes_max)

    async def _connect(self, target: Target) -> tuple[Namespace, ...]:
        try:
            secret = self._keeper.secret_of(target.secret)
        except OstracaError as error:
            raise RefusedError("secret", str(error)) from error
        return await self._keeper.paths.connect(target, secret)

    async def _namespace(self, target: Target, nguid: str) -> Namespace | str:
        """Return a drive of a target; why there is none, where that is so."""
        try:
            found = {each.nguid: each for each in await self._connect(target)}
        except PathError as error:
            return str(error)
        return found.get(nguid) or f"{target.nqn} shows no drive {nguid}: is it in, and exported?"

    def _begin(self, nguid: str) -> None:
        if nguid in self._busy:
            raise RefusedError(BUSY, f"drive {nguid} is being worked on: ask again")
        self._busy.add(nguid)

    def _is_free(self, nguid: str, *, but_for: DriveId | None = None) -> bool:
        return not any(
            drive.nguid == nguid and drive.id != but_for
            for enclosure in self._newest_map().enclosures.values()
            for drive in enclosure.drives
        )

    def _check_is_free(self, nguid: str, *, but_for: DriveId | None = None) -> None:
        if not self._is_free(nguid, but_for=but_for):
            raise RefusedError(
                "in_the_map", f"drive {nguid} is in the map, and holds blocks: it is left alone"
            )


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


def _name(nguid: str) -> DriveId:
    return DriveId(f"looked-at/{nguid}")
