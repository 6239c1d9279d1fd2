"""Verdicts of steps, from reports of agents and of the enclosure's daemon. Pure.

A step is done, has failed with advice, or must be repeated later. Disagreement is a failure: agents with
different views of the drives are connected to different enclosures.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ostraca_admin.model import ChosenDrive, EnclosureSpec, RegistrationStatus
from ostraca_fabric.errors import OstracaError, UsageError
from ostraca_fabric.model.extent import Geometry, segment_bytes_for
from ostraca_fabric.model.ids import AgentId
from ostraca_fabric.model.inventory import EnclosureReport
from ostraca_fabric.model.volume import VolumeRecord
from ostraca_fabric.ports.paths import Stage
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.wire.flash_work import Content, DiscoveredDrive, DiscoveredDrives

DRIVES_MAX = 64
"""Most drives of an enclosure, since the record is a single value in etcd."""


@dataclass(frozen=True, slots=True)
class StepDone:
    """The step is done."""

    message: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepFailed:
    """The step and the operation have failed; the message has advice."""

    message: str
    detail: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepPending:
    """The step is unfinished; repeat after *retry_s*."""

    message: str
    retry_s: float
    progress: float | None = None
    ends_in_s: float | None = None
    detail: dict[str, Any] = field(default_factory=dict)


Verdict = StepDone | StepFailed | StepPending


def reach_verdict(answers: Mapping[AgentId, DiscoveredDrives | OstracaError]) -> Verdict:
    """Return whether every agent reaches the enclosure."""
    if not answers:
        return StepFailed(
            "the fabric has no agent, and only agents connect to enclosures: start an agent, then retry"
        )
    return _combine(answers, {Stage.REACH}, "reach the enclosure", "cannot reach the enclosure")


def authentication_verdict(answers: Mapping[AgentId, DiscoveredDrives | OstracaError]) -> Verdict:
    """Return whether the enclosure admits all hosts, over suitable paths."""
    return _combine(answers, {Stage.AUTHENTICATE, Stage.FIT}, "are admitted", "are not admitted")


def choose_drives(
    answers: Mapping[AgentId, DiscoveredDrives | OstracaError],
    spec: EnclosureSpec,
    status: RegistrationStatus,
    new_format_id: Callable[[], str],
) -> tuple[Verdict, RegistrationStatus]:
    """Choose the drives to use: the named drives or all, with a name for each new drive.

    Drives chosen by an earlier try and now left out are removed.
    """
    seen = visible_drives(answers)
    if isinstance(seen, StepFailed):
        return seen, status
    wanted = spec.drives or tuple(sorted(seen))
    missing = [nguid for nguid in wanted if nguid not in seen]
    if missing:
        return StepFailed(
            f"drives not visible: {', '.join(missing)}; visible: {', '.join(sorted(seen)) or 'none'}. List "
            "visible drives, or export the missing drives by the enclosure daemon"
        ), status
    if not wanted:
        return StepFailed("no drive is visible: export drives by `ostraca serve enclosure`"), status
    if len(wanted) > DRIVES_MAX:
        return StepFailed(
            f"{len(wanted)} drives exceed the limit of {DRIVES_MAX} for an enclosure: list fewer drives"
        ), status
    kept = tuple(drive for drive in status.drives if drive.nguid in wanted)
    after = msgspec.structs.replace(status, drives=kept)
    for nguid in wanted:
        if not any(drive.nguid == nguid for drive in kept):
            after = with_drive(after, seen[nguid], new_format_id())
    names = {drive.nguid: drive.name for drive in after.drives}
    return StepDone(f"{counted(len(wanted), 'drive')} chosen", {"drives": names}), after


def with_drive(status: RegistrationStatus, seen: DiscoveredDrive, format_id: str) -> RegistrationStatus:
    """Return the status with one more drive, under a name never used before."""
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


def format_verdict(
    drives: Sequence[ChosenDrive],
    seen: Mapping[str, DiscoveredDrive],
    *,
    wipe: frozenset[str],
    segment_bytes: int,
    report: EnclosureReport | None,
    volumes: Sequence[VolumeRecord],
) -> Verdict:
    """Check that drives are empty or to be wiped, and large enough for all volumes."""
    problems, doubts = list[str](), list[str]()
    reported = {drive.nguid: drive for drive in report.drives} if report is not None else {}
    for drive in drives:
        found = seen.get(drive.nguid)
        if found is None:
            problems.append(f"{drive.nguid} is no longer visible")
            continue
        if (problem := _problem(drive, found, wipe)) or (
            problem := _too_small(found, segment_bytes, volumes)
        ):
            described = f"{found.model or 'drive'} {found.serial}".rstrip()
            problems.append(f"{drive.nguid} ({described}): {problem}")
        if drive.nguid in reported:
            doubts += [f"{drive.nguid}: {doubt}" for doubt in reported[drive.nguid].doubts]
    detail: dict[str, Any] = {"doubts": doubts} if doubts else {}
    if problems:
        return StepFailed("; ".join(problems), detail)
    return StepDone(
        f"{counted(len(drives), 'drive')} usable"
        + (f", with {counted(len(doubts), 'doubt')}" if doubts else ""),
        detail,
    )


def choose_replacement(
    seen: Mapping[str, DiscoveredDrive], status: RegistrationStatus, wanted: str
) -> DiscoveredDrive | StepFailed:
    """Return the replacement: the named drive, or the only unused drive."""
    used = {drive.nguid for drive in status.drives}
    free = {nguid: drive for nguid, drive in seen.items() if nguid not in used}
    if wanted and wanted not in seen:
        return StepFailed(
            f"drive {wanted} is not visible: insert the drive, and export it by the enclosure daemon"
        )
    if wanted and wanted in used:
        return StepFailed(f"drive {wanted} is already in use: name another drive")
    if wanted:
        return free[wanted]
    if len(free) != 1:
        advice = f"name one of {', '.join(sorted(free))}" if free else "insert a drive, then retry"
        return StepFailed(
            f"{len(free)} unused drives are visible, and a replacement needs exactly 1: {advice}"
        )
    return next(iter(free.values()))


def choose_additions(
    seen: Mapping[str, DiscoveredDrive],
    status: RegistrationStatus,
    wanted: Sequence[str],
    new_format_id: Callable[[], str],
) -> tuple[Verdict, RegistrationStatus]:
    """Choose the drives to add: the named drives, or all other visible drives.

    A drive chosen by an earlier try keeps its name if chosen again, and is removed otherwise. Named drives
    already in use are accepted, so that a request may be repeated.
    """
    used = tuple(drive for drive in status.drives if not drive.is_coming)
    earlier = {drive.nguid: drive for drive in status.drives if drive.is_coming}
    names = {drive.nguid: drive.name for drive in used}
    missing = [nguid for nguid in wanted if nguid not in seen]
    if missing:
        return StepFailed(
            f"drives not visible: {', '.join(missing)}: insert them, and export them by the enclosure daemon"
        ), status
    coming = [nguid for nguid in wanted or sorted(seen) if nguid not in names]
    if not coming and not wanted:
        return StepFailed(
            f"all {len(seen)} visible drives are in use: insert a drive, and export it by the enclosure "
            "daemon"
        ), status
    if len(used) + len(coming) > DRIVES_MAX:
        return StepFailed(
            f"{len(used) + len(coming)} drives exceed the limit of {DRIVES_MAX} for an enclosure: list fewer"
        ), status
    after = msgspec.structs.replace(status, drives=used)
    for nguid in coming:
        if nguid in earlier:
            after = msgspec.structs.replace(after, drives=(*after.drives, earlier[nguid]))
        else:
            after = with_drive(after, seen[nguid], new_format_id())
    if not coming:
        return StepDone(f"already in use: {', '.join(wanted)}: no change"), after
    new = {drive.nguid: drive.name for drive in after.drives if drive.is_coming}
    names_text = ", ".join(f"{nguid} as {name}" for nguid, name in new.items())
    return StepDone(f"{counted(len(new), 'drive')} chosen: {names_text}", {"drives": new}), after


def _agreed(
    answers: Mapping[AgentId, DiscoveredDrives | OstracaError],
) -> dict[str, DiscoveredDrive] | StepFailed:
    """Return the drives seen by all agents, by NGUID."""
    by_agent = {agent: answer for agent, answer in answers.items() if isinstance(answer, DiscoveredDrives)}
    sights = defaultdict(list)
    for agent, answer in by_agent.items():
        sights[frozenset((drive.nguid, drive.size_bytes) for drive in answer.drives)].append(agent)
    if len(sights) > 1:
        views = "; ".join(
            f"{', '.join(agents)}: {counted(len(sight), 'drive')}" for sight, agents in sights.items()
        )
        return StepFailed(
            f"agents see different drives ({views}): check that all controllers belong to the same enclosure"
        )
    first = next(iter(by_agent.values()))
    return {drive.nguid: drive for drive in first.drives}


def visible_drives(
    answers: Mapping[AgentId, DiscoveredDrives | OstracaError],
) -> dict[str, DiscoveredDrive] | StepFailed:
    """Return the drives seen by all agents, by NGUID, or the failure."""
    verdict = _combine(answers, set(Stage), "list the drives", "cannot list the drives")
    return verdict if isinstance(verdict, StepFailed) else _agreed(answers)


def _trouble(answer: DiscoveredDrives | OstracaError, stages: set[Stage]) -> str:
    """Return the problem of an agent at these stages; silence counts as the first stage."""
    if isinstance(answer, OstracaError):
        return f"no answer: {answer}"
    if not answer.trouble:
        return ""
    is_known = answer.stage in {stage.value for stage in Stage}
    return answer.trouble if not is_known or Stage(answer.stage) in stages else ""


def _combine(
    answers: Mapping[AgentId, DiscoveredDrives | OstracaError], stages: set[Stage], good: str, bad: str
) -> StepDone | StepFailed:
    """Return whether no agent has a problem at these stages."""
    problems = {
        agent: problem for agent, answer in sorted(answers.items()) if (problem := _trouble(answer, stages))
    }
    if problems:
        each = "; ".join(f"{agent}: {problem}" for agent, problem in problems.items())
        return StepFailed(
            f"{len(problems)} of {len(answers)} agents {bad}: {each}", {"agents": dict(problems)}
        )
    return StepDone(f"{len(answers)} of {len(answers)} agents {good}")


def _problem(drive: ChosenDrive, found: DiscoveredDrive, wipe: frozenset[str]) -> str:
    if found.size_bytes != drive.size_bytes:
        return (
            f"size changed from {drive.size_bytes} to {found.size_bytes} bytes: check which drive is inserted"
        )
    if found.content is Content.UNREADABLE:
        return f"{found.says or 'unreadable'}: replace or omit the drive"
    is_ours = found.content is Content.OURS and found.format_id == drive.format_id
    if found.content is Content.BLANK or is_ours or drive.nguid in wipe:
        return ""
    return (
        f"{found.says or found.content.value}. Omit the drive, or list it under `wipe` to lose all contents"
    )


def _too_small(found: DiscoveredDrive, segment_bytes: int, volumes: Sequence[VolumeRecord]) -> str:
    try:
        geometry = Geometry.planned(
            found.size_bytes, segment_bytes=segment_bytes or segment_bytes_for(found.size_bytes)
        )
    except UsageError as error:
        return str(error)
    largest = max((volume.block_bytes for volume in volumes), default=0)
    if largest > geometry.data_bytes:
        return (
            f"blocks of a volume have {largest} bytes, and segments of this drive hold at most "
            f"{geometry.data_bytes}: use a larger drive, or a larger segment_bytes"
        )
    return ""
