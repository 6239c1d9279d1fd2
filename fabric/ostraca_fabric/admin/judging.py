"""What a step of long work comes to, from what agents and the enclosure's own daemon say. Pure.

A step is done, has failed and says what to do, or is to be looked at again later. Nothing is guessed: agents
that do not agree on an enclosure's drives have different enclosures before them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from ostraca_fabric.admin.model import ChosenDrive
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.flash.geometry import Geometry, segment_bytes_for
from ostraca_fabric.ports.paths import Stage
from ostraca_fabric.wire.flash_work import Content, Looked

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ostraca_fabric.admin.model import EnclosureSpec, EnclosureStatus
    from ostraca_fabric.ids import AgentId
    from ostraca_fabric.inventory import EnclosureReport
    from ostraca_fabric.volume import VolumeRecord
    from ostraca_fabric.wire.flash_work import SeenDrive

DRIVES_MAX = 64
"""Of one enclosure: its record is one value in etcd."""


@dataclass(frozen=True, slots=True)
class Done:
    """The step is done."""

    message: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Failed:
    """The step has failed, and so has its long work; the message says what to do."""

    message: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Again:
    """Not yet: look again in *after_s*."""

    message: str
    after_s: float
    progress: float | None = None
    ends_in_s: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Verdict = Done | Failed | Again


def reached(answers: Mapping[AgentId, Looked | OstracaError], agents: int) -> Verdict:
    """Whether every agent reaches the enclosure."""
    if not agents:
        return Failed("no agent is in the fabric, and only agents reach enclosures: start one, and ask again")
    told = {agent: _trouble(answer, {Stage.REACH}) for agent, answer in answers.items()}
    return _of_all(told, agents, "reaches it", "cannot reach it")


def authenticated(answers: Mapping[AgentId, Looked | OstracaError], agents: int) -> Verdict:
    """Whether it lets every agent's host in, and their paths are fit."""
    told = {agent: _trouble(answer, {Stage.AUTHENTICATE, Stage.FIT}) for agent, answer in answers.items()}
    return _of_all(told, agents, "is let in", "is not let in")


def identified(
    answers: Mapping[AgentId, Looked | OstracaError],
    spec: EnclosureSpec,
    status: EnclosureStatus,
    new_format_id: Callable[[], str],
) -> tuple[Verdict, EnclosureStatus]:
    """Which of its drives are used: those that were named, or all; with names for those that have none.

    Drives that an earlier try had chosen, and that are left out now, are chosen no more.
    """
    told = {agent: _trouble(answer, set(Stage)) for agent, answer in answers.items()}
    if any(told.values()):
        return _of_all(told, len(told), "knows its drives", "does not know its drives"), status
    seen = _agreed(answers)
    if isinstance(seen, Failed):
        return seen, status
    wanted = spec.drives or tuple(sorted(seen))
    missing = [nguid for nguid in wanted if nguid not in seen]
    if missing:
        return Failed(
            f"it shows no drive {', '.join(missing)}: it has {', '.join(sorted(seen)) or 'none at all'}. "
            "Name those, or let its daemon export what is missing"
        ), status
    if not wanted:
        return Failed("it shows no drive: let its daemon export some (`ostraca serve enclosure`)"), status
    if len(wanted) > DRIVES_MAX:
        return Failed(f"it shows {len(wanted)} drives, and an enclosure has {DRIVES_MAX} at most"), status
    kept = tuple(drive for drive in status.drives if drive.nguid in wanted)
    after = msgspec.structs.replace(status, drives=kept)
    for nguid in wanted:
        if not any(drive.nguid == nguid for drive in kept):
            after = chosen(after, seen[nguid], new_format_id())
    names = {drive.nguid: drive.name for drive in after.drives}
    return Done(f"{len(wanted)} drives are to be used", {"drives": names}), after


def chosen(status: EnclosureStatus, seen: SeenDrive, format_id: str) -> EnclosureStatus:
    """Return it with one more drive, under a name that no drive of it had before."""
    drive = ChosenDrive(
        f"drive-{status.next_drive}",
        seen.nguid,
        format_id,
        seen.size_bytes,
        seen.model,
        seen.serial,
        is_coming=True,
    )
    return msgspec.structs.replace(status, drives=(*status.drives, drive), next_drive=status.next_drive + 1)


def may_be_formatted(
    drives: Sequence[ChosenDrive],
    seen: Mapping[str, SeenDrive],
    *,
    wipe: frozenset[str],
    segment_bytes: int,
    report: EnclosureReport | None,
    volumes: Sequence[VolumeRecord],
) -> Verdict:
    """Preflight: whether drives are empty, or named to be wiped, and large enough for what there is."""
    problems, doubts = list[str](), list[str]()
    said = {drive.nguid: drive for drive in report.drives} if report is not None else {}
    for drive in drives:
        found = seen.get(drive.nguid)
        if found is None:
            problems.append(f"{drive.nguid} is not there any more")
            continue
        if (problem := _problem(drive, found, wipe)) or (
            problem := _too_small(found, segment_bytes, volumes)
        ):
            problems.append(f"{drive.nguid} ({found.model or 'drive'} {found.serial}): {problem}".rstrip())
        if drive.nguid in said:
            doubts += [f"{drive.nguid}: {doubt}" for doubt in said[drive.nguid].doubts]
    detail: dict[str, Any] = {"doubts": doubts} if doubts else {}
    if problems:
        return Failed("; ".join(problems), detail)
    return Done(
        f"{len(drives)} drives can be used" + (f", with {len(doubts)} doubts" if doubts else ""), detail
    )


def replacement_of(seen: Mapping[str, SeenDrive], status: EnclosureStatus, wanted: str) -> SeenDrive | Failed:
    """Return the drive that comes for another: the one that was named, or the only one that is not used."""
    used = {drive.nguid for drive in status.drives}
    free = {nguid: drive for nguid, drive in seen.items() if nguid not in used}
    if wanted and wanted not in seen:
        return Failed(f"it shows no drive {wanted}: put it in, and let its daemon export it")
    if wanted and wanted in used:
        return Failed(f"drive {wanted} is used already: name another")
    if wanted:
        return free[wanted]
    if len(free) != 1:
        which = f"it shows {', '.join(sorted(free))}: name one" if free else "put one in, and ask again"
        return Failed(f"there are {len(free)} drives that could come for it; {which}")
    return next(iter(free.values()))


def added(
    seen: Mapping[str, SeenDrive],
    status: EnclosureStatus,
    wanted: Sequence[str],
    new_format_id: Callable[[], str],
) -> tuple[Verdict, EnclosureStatus]:
    """Which drives are added to those that it uses: the named ones, or all others that it shows.

    Those that an earlier try had chosen keep their names where they are chosen again, and are chosen no more
    where they are not. Named ones that it uses already are no trouble: the same may be asked for twice.
    """
    used = tuple(drive for drive in status.drives if not drive.is_coming)
    earlier = {drive.nguid: drive for drive in status.drives if drive.is_coming}
    names = {drive.nguid: drive.name for drive in used}
    missing = [nguid for nguid in wanted if nguid not in seen]
    if missing:
        return Failed(
            f"it shows no drive {', '.join(missing)}: put it in, and let its daemon export it"
        ), status
    coming = [nguid for nguid in wanted or sorted(seen) if nguid not in names]
    if not coming and not wanted:
        return Failed(
            f"it shows {len(seen)} drives, and uses them all: put one in, and let its daemon export it"
        ), status
    if len(used) + len(coming) > DRIVES_MAX:
        return Failed(
            f"it would have {len(used) + len(coming)} drives, and an enclosure has {DRIVES_MAX} at most"
        ), status
    after = msgspec.structs.replace(status, drives=used)
    for nguid in coming:
        if nguid in earlier:
            after = msgspec.structs.replace(after, drives=(*after.drives, earlier[nguid]))
        else:
            after = chosen(after, seen[nguid], new_format_id())
    if not coming:
        return Done(f"it uses {', '.join(wanted)} already: nothing is added"), after
    new = {drive.nguid: drive.name for drive in after.drives if drive.is_coming}
    come = ", ".join(f"{nguid} as {name}" for nguid, name in new.items())
    return Done(f"{len(new)} drives come in: {come}", {"drives": new}), after


def _agreed(answers: Mapping[AgentId, Looked | OstracaError]) -> dict[str, SeenDrive] | Failed:
    """Return the drives that all agents see, by NGUID."""
    by_agent = {agent: answer for agent, answer in answers.items() if isinstance(answer, Looked)}
    sights = defaultdict(list)
    for agent, answer in by_agent.items():
        sights[frozenset((drive.nguid, drive.size_bytes) for drive in answer.drives)].append(agent)
    if len(sights) > 1:
        told = "; ".join(f"{', '.join(agents)} see {len(sight)}" for sight, agents in sights.items())
        return Failed(
            f"agents do not see the same drives ({told}): do its controllers lead to one enclosure?"
        )
    first = next(iter(by_agent.values()))
    return {drive.nguid: drive for drive in first.drives}


def seen_by_all(answers: Mapping[AgentId, Looked | OstracaError]) -> dict[str, SeenDrive] | Failed:
    """Return the drives that all agents see, by NGUID; why there are none to speak of."""
    told = {agent: _trouble(answer, set(Stage)) for agent, answer in answers.items()}
    verdict = _of_all(told, len(told), "knows its drives", "does not know its drives")
    return verdict if isinstance(verdict, Failed) else _agreed(answers)


def _trouble(answer: Looked | OstracaError, stages: set[Stage]) -> str:
    """Say what kept an agent at one of these stages; one that does not answer was kept at the first."""
    if isinstance(answer, OstracaError):
        return f"it does not answer: {answer}"
    if not answer.trouble:
        return ""
    is_known = answer.stage in {stage.value for stage in Stage}
    return answer.trouble if not is_known or Stage(answer.stage) in stages else ""


def _of_all(told: Mapping[AgentId, str], agents: int, good: str, bad: str) -> Done | Failed:
    troubled = {agent: why for agent, why in sorted(told.items()) if why}
    if troubled:
        each = "; ".join(f"{agent}: {why}" for agent, why in troubled.items())
        return Failed(f"of {agents} agents {len(troubled)} {bad}: {each}", {"agents": dict(troubled)})
    return Done(f"each of {agents} agents {good}")


def _problem(drive: ChosenDrive, found: SeenDrive, wipe: frozenset[str]) -> str:
    if found.size_bytes != drive.size_bytes:
        return f"it has {found.size_bytes} bytes now, and had {drive.size_bytes}: is it another drive?"
    if found.content is Content.UNREADABLE:
        return f"{found.says or 'it cannot be read'}: replace it, or leave it out"
    is_ours = found.content is Content.OURS and found.format_id == drive.format_id
    if found.content is Content.BLANK or is_ours or drive.nguid in wipe:
        return ""
    return f"{found.says or found.content.value}. Leave it out, or name it under `wipe` if all of that may go"


def _too_small(found: SeenDrive, segment_bytes: int, volumes: Sequence[VolumeRecord]) -> str:
    try:
        geometry = Geometry.planned(
            found.size_bytes, segment_bytes=segment_bytes or segment_bytes_for(found.size_bytes)
        )
    except UsageError as error:
        return str(error)
    largest = max((volume.block_bytes for volume in volumes), default=0)
    if largest > geometry.data_bytes:
        return (
            f"its segments would hold no block above {geometry.data_bytes} bytes, and a volume has blocks of "
            f"{largest}: take a larger drive, or a larger segment_bytes"
        )
    return ""
