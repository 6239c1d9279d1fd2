"""Connection attempts that the kernel continues after a timeout here.

Linux makes one controller at a time, and no action ends an attempt: signals have no effect, and
``delete_controller`` is refused until the controller exists. An enclosure that refuses a secret may end
the connection before its answer arrives. Over RDMA the host then repeats the request for six times
``nvme_core.admin_timeout``, without an answer. Meanwhile the progress of the attempt is visible, and other
attempts wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ostraca_dpu_agent.adapters.nvme_of.refusals import AttemptState
from ostraca_dpu_agent.adapters.nvme_of.sysfs import Connecting, NvmeSysfs, leads_to
from ostraca_fabric.model.target import Controller
from ostraca_fabric.ports.paths import PathError


@dataclass(frozen=True, slots=True)
class ConnectionAttempt:
    """Parameters of a connection attempt."""

    nqn: str
    controller: Controller
    addresses: tuple[str, ...]
    host: str
    secret: str = field(repr=False)


class UnfinishedAttempts:
    """Unfinished attempts of one host. Reads ``/sys``: call on a thread."""

    def __init__(self, sysfs: NvmeSysfs) -> None:
        """Read attempts from *sysfs*."""
        self._sysfs = sysfs
        self._errors: dict[str, tuple[ConnectionAttempt, PathError]] = {}
        """By name of an abandoned controller: its attempt and reported error."""

    def progress_of(self, attempt: ConnectionAttempt, others: frozenset[str]) -> AttemptState:
        """Return the progress of an attempt that was just abandoned.

        *others*: controllers that existed before the attempt.
        """
        under_way = self._under_way()
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
        under_way = {each.name: each for each in self._under_way()}
        for name, (earlier, error) in list(self._errors.items()):
            if name not in under_way:
                self._errors.pop(name, None)
            elif earlier == attempt and _matches(under_way[name], attempt):
                return PathError(error.stage, str(error))
        return None

    def _under_way(self) -> list[Connecting]:
        return [each for each in self._sysfs.connecting() if not each.has_been]


def _matches(found: Connecting, attempt: ConnectionAttempt) -> bool:
    return found.host == attempt.host and leads_to(found, attempt.controller, attempt.addresses)
