"""Why a change is not taken::

AdminError
├── NotFoundError      there is nothing of that name
├── ConflictError      it is not so that this could be done: somebody was first, or something runs
├── UnansweredError    no agent answers now
└── PreconditionError  it was changed since its ETag was read
"""

from __future__ import annotations

from ostraca_fabric.errors import OstracaError


class AdminError(OstracaError):
    """A change was not taken; the message says what to do."""


class NotFoundError(AdminError):
    """There is nothing of that name."""


class ConflictError(AdminError):
    """It is not so that this could be done now."""


class UnansweredError(AdminError):
    """No agent that could say it, or do it, answers now."""


class PreconditionError(AdminError):
    """It was changed since it was read: read it again, and decide anew."""
