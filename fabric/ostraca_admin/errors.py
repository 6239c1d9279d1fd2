"""Errors of the admin service.

::

    AdminError
    ├── NotFoundError      no object of this name
    ├── ConflictError      a conflicting state, change or operation
    ├── UnansweredError    no agent answers now
    └── PreconditionError  changed since the ETag was read
"""

from __future__ import annotations

from ostraca_fabric.errors import OstracaError


class AdminError(OstracaError):
    """Refusal of a change; the message has advice for the operator."""


class NotFoundError(AdminError):
    """No object of this name exists."""


class ConflictError(AdminError):
    """The present state does not allow the request."""


class UnansweredError(AdminError):
    """No agent able to answer or do the work responds now."""


class PreconditionError(AdminError):
    """The object has changed since the caller's read: read again, then decide anew."""
