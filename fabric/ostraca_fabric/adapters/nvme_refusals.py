"""Why a controller was not connected, from what Linux says of it. Pure.

The kernel returns one error for most refusals that come from the other end (EIO) and explains itself only in
its log, in words that have hardly changed since it has them; so the log is asked first, and the error where
the log may not be read.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ostraca_fabric.ports.paths import PathError, Stage
from ostraca_fabric.target import Transport

if TYPE_CHECKING:
    from ostraca_fabric.adapters.nvme_kernel import KernelError
    from ostraca_fabric.target import Controller

_NOT_ALLOWED = ("is not allowed, hostnqn", "Connect Invalid Data Parameter, hostnqn")
_ANOTHER = ("Connect Invalid Data Parameter, subsysnqn",)
_NOT_AUTHENTICATED = ("authentication",)
_AUTHENTICATED = (": authenticated",)
_BUSY = ("controller is busy or not available",)
_SECRET_ERRORS = (errno.ENOKEY, errno.EKEYREJECTED, errno.EKEYEXPIRED)
_WAYS = {
    errno.ECONNREFUSED: "nothing listens there",
    errno.ECONNRESET: "it does not take the connection",
    errno.EHOSTUNREACH: "no host answers there",
    errno.ENETUNREACH: "no network leads there",
    errno.ETIMEDOUT: "nothing answers there",
    errno.EAGAIN: "something listens there, and does not answer as NVMe-oF",
    errno.EADDRNOTAVAIL: "no device of this host leads there",
    errno.ENODEV: "no device of this host leads there",
    errno.EHOSTDOWN: "no host answers there",
    errno.EPROTO: "what listens there does not speak NVMe-oF",
}


@dataclass(frozen=True, slots=True)
class Late:
    """What the host shows of a controller that was given up."""

    name: str = ""
    """Of the controller, while the kernel is still at it."""

    has_answered: bool = False
    """The other end took the connection."""

    behind: str = ""
    """The controller that was asked for before, and is under way still: nothing was sent for this one."""

    behind_s: float = 0.0
    """For how long it may be."""


def refusal(
    controller: Controller,
    nqn: str,
    host: str,
    error: KernelError,
    *,
    has_secret: bool,
    late: Late | None = None,
) -> PathError:
    """Return what to tell of a controller that the kernel did not connect; with *late*, not in time."""
    if (unasked := _not_asked(controller, error, late)) is not None:
        return unasked
    said = "\n".join(error.log)
    if _any(_NOT_ALLOWED, said):
        stage, why = (
            Stage.AUTHENTICATE,
            (
                f"does not let this host in: its allow-list does not name {host}: add it to the hosts of "
                "that enclosure"
            ),
        )
    elif _any(_ANOTHER, said):
        stage, why = (
            Stage.IDENTIFY,
            (f"has no subsystem {nqn}: name the controllers of the enclosure that is meant"),
        )
    elif _any(_NOT_AUTHENTICATED, said) or error.code in _SECRET_ERRORS:
        stage, why = (
            Stage.AUTHENTICATE,
            (
                f"does not let {host} in with {'this secret' if has_secret else 'no secret'}: give this "
                "host the secret that the enclosure has for it"
            ),
        )
    elif _any(_BUSY, said):
        stage, why = Stage.REACH, "has no room for another host now: raise how many it may have"
    elif error.code == errno.ETIME:
        has_said_yes = _any(_AUTHENTICATED, said)
        stage, why = _not_in_time(host, late or Late(), is_secret_open=has_secret and not has_said_yes)
    elif error.code in _WAYS:
        stage, why = (
            Stage.REACH,
            (
                f"can't be reached: {_WAYS[error.code]} ({_name(error.code)}); see that the enclosure's "
                "daemon runs, and that this host's network leads to it"
            ),
        )
    elif error.code == errno.EIO:
        stage, why = (
            Stage.AUTHENTICATE,
            (
                f"answers and does not take this host: its allow-list does not name {host}: add it; or its "
                f"secret is another, or it has no subsystem {nqn}: the kernel's log says which"
                + _tail(error.log)
            ),
        )
    else:
        stage, why = (
            Stage.FIT,
            (
                f"can't be connected by this host's kernel: {os.strerror(error.code)} ({_name(error.code)})"
                + _tail(error.log)
            ),
        )
    return PathError(stage, f"{controller} {why}")


def _not_in_time(host: str, late: Late, *, is_secret_open: bool) -> tuple[Stage, str]:
    see = "see that the enclosure's daemon runs, and that this host's network leads to it"
    if late.has_answered and is_secret_open:
        # Linux's target ends the connection of whom it refuses, often before its answer has gone out.
        return Stage.AUTHENTICATE, (
            f"took the connection of {host}, and has not ended authentication in time, as one does that has "
            "another secret for it: give this host the secret that the enclosure has for it; the enclosure's "
            "kernel log has the reason"
        )
    if late.has_answered:
        return (
            Stage.REACH,
            f"took the connection of {host}, and answers no more: see its kernel's log",
        )
    return Stage.REACH, f"can't be reached: it has not ended in time (ETIME); {see}"


def _not_asked(controller: Controller, error: KernelError, late: Late | None) -> PathError | None:
    """Return what to tell where nothing was sent to the enclosure; None where something may have been."""
    if error.during == "open":
        return _cannot_ask(controller, error)
    if error.code == errno.ETIME and late is not None and late.behind:
        return PathError(
            Stage.REACH,
            f"{controller} was not tried: this host's kernel makes one path after the other, and is busy "
            f"with {late.behind} for up to {late.behind_s:.0f} s, as where a secret is refused "
            "(nvme_core.admin_timeout, for each time that it asks): ask again then",
        )
    if error.during == "options":
        return PathError(
            Stage.FIT,
            f"this host does not say whether its kernel can show {controller} a secret "
            f"({os.strerror(error.code)}): has it too much to do?",
        )
    return None


def _cannot_ask(controller: Controller, error: KernelError) -> PathError:
    if error.code in (errno.EACCES, errno.EPERM):
        return PathError(Stage.FIT, "this process may not connect NVMe-oF: /dev/nvme-fabrics is root's")
    module = "nvme-rdma" if controller.transport is Transport.RDMA else "nvme-tcp"
    return PathError(
        Stage.FIT,
        f"this host's kernel has no NVMe-oF ({os.strerror(error.code)}: /dev/nvme-fabrics): modprobe "
        f"{module}",
    )


def _any(words: tuple[str, ...], said: str) -> bool:
    return any(word in said for word in words)


def _tail(log: tuple[str, ...]) -> str:
    return f"; it says: {log[-1]}" if log else ""


def _name(code: int) -> str:
    return errno.errorcode.get(code, str(code))
