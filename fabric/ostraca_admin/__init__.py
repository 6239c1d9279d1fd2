"""Admin service: records operators' changes of a fabric, and runs long operations.

- ``model``: the records
- ``enclosure_service``, ``tenant_service``, ``override_service``: check and record changes
- ``worker``: runs the ``workflows.steps`` of long operations; ``onboarding`` has the steps for new drives,
  ``preflight`` and ``drain`` (pure) their verdicts
- ``api``: the REST interface

All state is in the fabric's records, so any number of admin services may run, and any may crash.
"""
