"""Errors of requests to the admin service.

Hierarchy::

    AdminUnavailableError  no admin service answers, or the service cannot reach etcd now
    AdminRefusedError      the service refused; ``status`` is the HTTP status
    ├── StateConflictError the present state forbids the request, or changed since; nothing was done
    └── BadRequestError    the request is invalid (also a UsageError)
    OperationError         a watched operation failed or was cancelled
"""

from __future__ import annotations

from ostraca_fabric.errors import ConnectError, OstracaError, UsageError


class AdminUnavailableError(ConnectError):
    """Absence of the admin service at the URL; a later retry may succeed."""


class AdminRefusedError(OstracaError):
    """Refusal by the admin service, with the message of the service."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StateConflictError(AdminRefusedError):
    """Refusal due to the present state, or to a change since the ETag was read."""


class BadRequestError(AdminRefusedError, UsageError):
    """Refusal of an invalid request."""


class OperationError(OstracaError):
    """Failure or cancellation of a long operation."""
