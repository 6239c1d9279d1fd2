"""Why the admin service did not do what a command asked for::

AdminAwayError     nobody answers there, or the service can't reach the fabric's store now
AdminRefusedError  the service refused; its ``status`` is HTTP's
├── NotNowError        things are not so that it could be done, or were changed since: nothing was done
└── BadRequestError    what was asked for makes no sense (also a UsageError)
OperationError     long work that was watched has failed, or was cancelled
"""

from __future__ import annotations

from ostraca_fabric.errors import ConnectError, OstracaError, UsageError


class AdminAwayError(ConnectError):
    """No admin service answers at the URL, or not now. Asked again later, it may."""


class AdminRefusedError(OstracaError):
    """The admin service refused; the message is its own."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotNowError(AdminRefusedError):
    """It is not so that this could be done now, or it was changed since its ETag was read."""


class BadRequestError(AdminRefusedError, UsageError):
    """The admin service can make nothing of what it was sent."""


class OperationError(OstracaError):
    """Long work has failed, or was cancelled."""
