"""What may be asked for when: of a registration, and of long work. Pure; refusals say what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ostraca_fabric.admin.errors import ConflictError, PreconditionError
from ostraca_fabric.admin.model import Kind, Phase, State
from ostraca_fabric.errors import UsageError
from ostraca_fabric.ids import EnclosureId, checked_name
from ostraca_fabric.ports.records import ABSENT
from ostraca_fabric.target import check_nguid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ostraca_fabric.admin.model import EnclosureSpec, Kept, Operation


def check_spec(spec: EnclosureSpec) -> None:
    """Refuse what can't be an enclosure. Raises UsageError."""
    checked_name("enclosure", spec.name)
    if spec.failure_domain:
        checked_name("failure domain", spec.failure_domain)
    if spec.secret:
        checked_name("secret", spec.secret)
    for nguid in (*spec.drives, *spec.wipe):
        check_nguid(nguid)
    if len({*spec.drives}) != len(spec.drives):
        message = "a drive is named twice: name each once"
        raise UsageError(message)
    spec.target()


def check_addition(drives: Sequence[str], wipe: Sequence[str]) -> None:
    """Refuse what can't be added to an enclosure. Raises UsageError."""
    for nguid in (*drives, *wipe):
        check_nguid(nguid)
    if len({*drives}) != len(drives):
        message = "a drive is named twice: name each once"
        raise UsageError(message)
    if drives and (others := {*wipe} - {*drives}):
        raise UsageError(
            f"{', '.join(sorted(others))} may be wiped, but is not added: name it as a drive, too"
        )


def may_try_again(operation: Operation) -> bool:
    """Whether the same registration again begins anew: its onboarding has failed."""
    return operation.kind is Kind.ONBOARD and operation.state is State.FAILED


def check_match(if_match: int | None, revision: int | None) -> None:
    """Refuse a change of what is no longer in the revision that was asked for. Raises PreconditionError."""
    if if_match is not None and if_match != (ABSENT if revision is None else revision):
        message = "it was changed since its ETag was read: read it again, and decide anew"
        raise PreconditionError(message)


def check_changeable(known: Kept, spec: EnclosureSpec) -> None:
    """Refuse to make another enclosure of one that is registered, or to change one under way."""
    if known.operation.state is State.RUNNING:
        raise ConflictError(
            f"{known.operation.kind.value} of enclosure {spec.name} runs (operation {known.operation.id}): "
            "wait for it, or retire it"
        )
    if known.status.phase is Phase.ONBOARDING:
        if known.spec.nqn != spec.nqn and any(drive.shard_bytes for drive in known.status.drives):
            raise ConflictError(f"drives of {known.spec.nqn} were formatted already: retire it first")
        return
    if (known.spec.nqn, known.spec.drives) != (spec.nqn, spec.drives):
        raise ConflictError(
            f"enclosure {spec.name} is {known.spec.nqn} with its drives: retire it first, or register this "
            "one under another name; single drives are added (`:expand`) and replaced"
        )


def may_cancel(kind: Kind, running: Kind, *, force: bool) -> bool:
    """Whether long work of a kind ends another that runs."""
    return (kind is Kind.UNDRAIN and running is Kind.DRAIN) or (
        kind is Kind.RETIRE and (running is Kind.ONBOARD or force)
    )


def not_now(kind: Kind, enclosure: EnclosureId, phase: Phase) -> str:
    """Say why long work of a kind is not for an enclosure in this phase, and what to do."""
    what = {
        Kind.DRAIN: "only one that is ready is drained",
        Kind.UNDRAIN: "only one that is drained takes blocks again",
        Kind.RETIRE: "drain it first, or force it, and its blocks are lost",
        Kind.REPLACE: "its drives are replaced once it is ready",
        Kind.EXPAND: "drives are added to one that is ready: undrain it first",
        Kind.ONBOARD: "it is in the fabric",
        Kind.ERASE: "tenants and volumes are erased, not enclosures",
    }[kind]
    return f"enclosure {enclosure} is {phase.value}: {what}"
