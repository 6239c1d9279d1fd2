"""Reasons for failed and unfinished connections, derived from Linux's messages.

For most refusals by the other end the kernel returns one error, EIO. Details appear only in the kernel
log, in words that have hardly changed since their introduction. The log is therefore evaluated first, and
the error code if the log is unreadable.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ostraca_dpu_agent.adapters.nvme_of.kernel import KernelError
from ostraca_dpu_agent.adapters.nvme_of.sysfs import FoundController, NvmeSysfs, leads_to
from ostraca_fabric.model.target import Controller, TargetTransport
from ostraca_fabric.ports.paths import PathError, Stage

_NOT_ALLOWED = ("is not allowed, hostnqn", "Connect Invalid Data Parameter, hostnqn")
_ANOTHER = ("Connect Invalid Data Parameter, subsysnqn",)
_NOT_AUTHENTICATED = ("authentication",)
_AUTHENTICATED = (": authenticated",)
_BUSY = ("controller is busy or not available",)
_SECRET_ERRORS = (errno.ENOKEY, errno.EKEYREJECTED, errno.EKEYEXPIRED)
_CHECK = "check the enclosure's daemon and the network"
_REASONS = {
    errno.ECONNREFUSED: "connection refused",
    errno.ECONNRESET: "connection reset",
    errno.EHOSTUNREACH: "no host at this address",
    errno.ENETUNREACH: "no route to this network",
    errno.ETIMEDOUT: "no answer",
    errno.EAGAIN: "the listener does not answer as NVMe-oF",
    errno.EADDRNOTAVAIL: "no device of this host reaches this address",
    errno.ENODEV: "no device of this host reaches this address",
    errno.EHOSTDOWN: "no host at this address",
    errno.EPROTO: "the listener does not speak NVMe-oF",
}


_STAGES = tuple(Stage)


@dataclass(frozen=True, slots=True)
class AttemptState:
    """State of an abandoned connection attempt, as seen on the host."""

    name: str = ""
    """Name of the controller while the kernel continues; else empty."""

    has_answered: bool = False
    """Whether the other end accepted the connection."""

    behind: str = ""
    """Earlier controller still being made; no request was sent for this attempt."""

    behind_s: float = 0.0
    """Possible remaining time of the earlier attempt."""


def furthest_error(errors: Sequence[PathError]) -> PathError:
    """Return a common error for one or more failed controllers.

    The stage is the furthest reached by any controller: an enclosure that refuses this host is present,
    even if other controllers are not.
    """
    stage = max((error.stage for error in errors), key=_STAGES.index)
    first = [error for error in errors if error.stage is stage]
    others = [error for error in errors if error.stage is not stage]
    return PathError(stage, "; ".join(dict.fromkeys(str(error) for error in (*first, *others))))


def refusal(
    controller: Controller,
    nqn: str,
    host: str,
    error: KernelError,
    *,
    has_secret: bool,
    late: AttemptState | None = None,
) -> PathError:
    """Return the error for a controller that the kernel did not connect.

    *late*: state of the attempt after a timeout, else None.
    """
    if (unsent := _unsent(controller, error, late)) is not None:
        return unsent
    log, is_late, late = "\n".join(error.log), error.code == errno.ETIME, late or AttemptState()
    code, reason = errno.errorcode.get(error.code, str(error.code)), _REASONS.get(error.code, "")
    detail = f"; kernel log: {error.log[-1]}" if error.log else ""
    secret = "this secret" if has_secret else "no secret"
    is_secret_wrong = _contains(log, _NOT_AUTHENTICATED) or error.code in _SECRET_ERRORS
    may_be_refused = has_secret and not _contains(log, _AUTHENTICATED)
    causes = (
        (
            _contains(log, _NOT_ALLOWED),
            Stage.AUTHENTICATE,
            f"rejects this host: add {host} to the hosts of the enclosure",
        ),
        (
            _contains(log, _ANOTHER),
            Stage.IDENTIFY,
            f"has no subsystem {nqn}: check the name, --nqn and the controllers",
        ),
        (
            is_secret_wrong,
            Stage.AUTHENTICATE,
            f"rejects {host} with {secret}: configure the enclosure's secret for this host",
        ),
        (_contains(log, _BUSY), Stage.REACH, "accepts no further hosts: raise the limit of hosts"),
        (
            # Linux's target ends a refused host's connection, often before the answer is sent.
            is_late and late.has_answered and may_be_refused,
            Stage.AUTHENTICATE,
            (
                f"accepted the connection of {host}, and did not finish authentication in time, as after a "
                "wrong secret: configure the enclosure's secret for this host; the enclosure's kernel log "
                "has the reason"
            ),
        ),
        (
            is_late and late.has_answered,
            Stage.REACH,
            f"accepted the connection of {host}, then fell silent: see its kernel log",
        ),
        (is_late, Stage.REACH, f"is not reachable: no end in time (ETIME); {_CHECK}"),
        (bool(reason), Stage.REACH, f"is not reachable: {reason} ({code}); {_CHECK}"),
        (
            error.code == errno.EIO,
            Stage.AUTHENTICATE,
            (
                f"answers, but rejects this host: add {host} to the hosts of the enclosure, or correct the "
                f"secret or the subsystem {nqn}; the kernel log has the reason{detail}"
            ),
        ),
        (True, Stage.FIT, f"failed in this host's kernel: {os.strerror(error.code)} ({code}){detail}"),
    )
    stage, why = next((stage, why) for applies, stage, why in causes if applies)
    return PathError(stage, f"{controller} {why}")


def _unsent(controller: Controller, error: KernelError, late: AttemptState | None) -> PathError | None:
    """Return the error if no request was sent to the enclosure, else None."""
    if error.during == "open":
        if error.code in (errno.EACCES, errno.EPERM):
            return PathError(Stage.FIT, "no permission for /dev/nvme-fabrics: run the agent as root")
        module = "nvme-rdma" if controller.transport is TargetTransport.RDMA else "nvme-tcp"
        return PathError(
            Stage.FIT,
            f"the kernel of this host has no NVMe-oF ({os.strerror(error.code)}: /dev/nvme-fabrics): "
            f"modprobe {module}",
        )
    if error.code == errno.ETIME and late is not None and late.behind:
        return PathError(
            Stage.REACH,
            f"{controller} was not tried: the kernel of this host connects one path at a time, and is busy "
            f"with {late.behind} for up to {late.behind_s:.0f} s, as after a refused secret "
            "(nvme_core.admin_timeout per attempt): try again later",
        )
    if error.during == "options":
        return PathError(
            Stage.FIT,
            f"the kernel of this host did not report support for secrets of {controller} "
            f"({os.strerror(error.code)}): check the load of this host",
        )
    return None


def _contains(log: str, words: tuple[str, ...]) -> bool:
    return any(word in log for word in words)


@dataclass(frozen=True, slots=True)
class ConnectionAttempt:
    """Parameters of a connection attempt."""

    nqn: str
    controller: Controller
    addresses: tuple[str, ...]
    host: str
    secret: str = field(repr=False)


class UnfinishedAttempts:
    """Unfinished attempts of one host. Reads ``/sys``: call on a thread.

    Linux makes one controller at a time, and no action ends an attempt: signals have no effect, and
    ``delete_controller`` is refused until the controller exists. An enclosure that refuses a secret may end
    the connection before its answer arrives. Over RDMA the host then repeats the request for six times
    ``nvme_core.admin_timeout``, without an answer. Meanwhile the progress of the attempt is visible, and
    other attempts wait.
    """

    def __init__(self, sysfs: NvmeSysfs) -> None:
        """Read attempts from *sysfs*."""
        self._sysfs = sysfs
        self._errors: dict[str, tuple[ConnectionAttempt, PathError]] = {}
        """By name of an abandoned controller: its attempt and reported error."""

    def progress_of(self, attempt: ConnectionAttempt, others: frozenset[str]) -> AttemptState:
        """Return the progress of an attempt that was just abandoned.

        *others*: controllers that existed before the attempt.
        """
        under_way = self._sysfs.first_attempts()
        behind = [each.name for each in under_way if each.name in others]
        own = [each for each in under_way if each.name not in others and _matches(each, attempt)]
        return AttemptState(
            name=own[0].name if own else "",
            has_answered=any(each.has_answered for each in own),
            behind=behind[0] if behind else "",
            behind_s=self._sysfs.refused_s(),
        )

    def remember(self, state: AttemptState, attempt: ConnectionAttempt, error: PathError) -> None:
        """Keep an error, to repeat while the kernel continues this attempt."""
        if state.name and state.has_answered:
            self._errors[state.name] = attempt, error

    def error_of(self, attempt: ConnectionAttempt) -> PathError | None:
        """Return the error of an earlier attempt that the kernel still continues.

        A repetition with the same secret could only give the same result. None if there is no such
        attempt.
        """
        under_way = {each.name: each for each in self._sysfs.first_attempts()}
        for name, (earlier, error) in list(self._errors.items()):
            if name not in under_way:
                self._errors.pop(name, None)
            elif earlier == attempt and _matches(under_way[name], attempt):
                return PathError(error.stage, str(error))
        return None


def _matches(found: FoundController, attempt: ConnectionAttempt) -> bool:
    return found.host == attempt.host and leads_to(found, attempt.controller, attempt.addresses)
