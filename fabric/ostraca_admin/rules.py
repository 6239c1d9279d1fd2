"""Preconditions of registrations and operations. Pure; refusals contain advice."""

from __future__ import annotations

from collections.abc import Sequence

from ostraca_admin.errors import ConflictError, PreconditionError
from ostraca_admin.model import (
    EnclosurePhase,
    EnclosureSpec,
    Operation,
    OperationKind,
    OperationState,
    Registration,
)
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.ids import EnclosureId, checked_name
from ostraca_fabric.model.target import check_nguid
from ostraca_fabric.ports.records import ABSENT


def check_spec(spec: EnclosureSpec) -> None:
    """Check a registration. Raises UsageError."""
    checked_name("enclosure", spec.name)
    if spec.failure_domain:
        checked_name("failure domain", spec.failure_domain)
    if spec.secret:
        checked_name("secret", spec.secret)
    for nguid in (*spec.drives, *spec.wipe):
        check_nguid(nguid)
    if len({*spec.drives}) != len(spec.drives):
        raise UsageError("a drive is listed twice: list each drive once")
    spec.target()


def check_addition(drives: Sequence[str], wipe: Sequence[str]) -> None:
    """Check the drives to add to an enclosure. Raises UsageError."""
    for nguid in (*drives, *wipe):
        check_nguid(nguid)
    if len({*drives}) != len(drives):
        raise UsageError("a drive is listed twice: list each drive once")
    if drives and (others := {*wipe} - {*drives}):
        raise UsageError(
            f"drives to wipe that are not added: {', '.join(sorted(others))}: list them under `drives`, too"
        )


def may_try_again(operation: Operation) -> bool:
    """Return whether a repeated registration starts anew, after a failed onboarding."""
    return operation.kind is OperationKind.ONBOARD and operation.state is OperationState.FAILED


def check_match(if_match: int | None, revision: int | None) -> None:
    """Check the revision against If-Match. Raises PreconditionError."""
    if if_match is not None and if_match != (ABSENT if revision is None else revision):
        raise PreconditionError("changed since the ETag in If-Match: read the resource again, then decide")


def check_changeable(known: Registration, spec: EnclosureSpec) -> None:
    """Refuse to change a registered enclosure's identity, or during an operation.

    Raises ConflictError.
    """
    if known.operation.state is OperationState.RUNNING:
        raise ConflictError(
            f"operation {known.operation.id} ({known.operation.kind.value}) of enclosure {spec.name} is "
            "running: wait for its end, or retire the enclosure"
        )
    if known.status.phase is EnclosurePhase.ONBOARDING:
        if known.spec.nqn != spec.nqn and any(drive.shard_bytes for drive in known.status.drives):
            raise ConflictError(
                f"drives of {known.spec.nqn} are already formatted: retire enclosure {spec.name} first"
            )
        return
    if (known.spec.nqn, known.spec.drives) != (spec.nqn, spec.drives):
        raise ConflictError(
            f"enclosure {spec.name} is registered as {known.spec.nqn}, with other parameters: retire it "
            "first, or use another name; single drives can be added (`:expand`) and replaced"
        )


def may_cancel(kind: OperationKind, running: OperationKind, *, force: bool) -> bool:
    """Return whether a new operation of *kind* cancels the running operation."""
    return (kind is OperationKind.UNDRAIN and running is OperationKind.DRAIN) or (
        kind is OperationKind.RETIRE and (running is OperationKind.ONBOARD or force)
    )


_ALLOWED = {
    OperationKind.DRAIN: {EnclosurePhase.READY, EnclosurePhase.DRAINING},
    OperationKind.UNDRAIN: {EnclosurePhase.DRAINING, EnclosurePhase.DRAINED},
    OperationKind.RETIRE: {EnclosurePhase.DRAINED, EnclosurePhase.ONBOARDING},
    OperationKind.REPLACE: {EnclosurePhase.READY, EnclosurePhase.DRAINING, EnclosurePhase.DRAINED},
    OperationKind.EXPAND: {EnclosurePhase.READY},
}
"""Phases in which an operation on a registered enclosure may start."""

_ADVICE = {
    OperationKind.DRAIN: "a drain needs a ready enclosure",
    OperationKind.UNDRAIN: "only a drained or draining enclosure can be undrained",
    OperationKind.RETIRE: "drain it first, or force the retirement and lose its blocks",
    OperationKind.REPLACE: "wait for the end of onboarding before replacing drives",
    OperationKind.EXPAND: "drives can be added only to a ready enclosure: onboard or undrain it first",
}


def check_phase(kind: OperationKind, enclosure: EnclosureId, phase: EnclosurePhase, *, force: bool) -> None:
    """Raise ConflictError with advice if an enclosure in this phase refuses an operation."""
    may_skip = kind is OperationKind.RETIRE and force
    if phase not in _ALLOWED[kind] and not may_skip:
        raise ConflictError(f"enclosure {enclosure} is {phase.value}: {_ADVICE[kind]}")
