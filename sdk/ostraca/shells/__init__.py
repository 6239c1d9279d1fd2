"""Shells: who waits for an operation. What it does is the same in all of them, in ``jobs`` and ``batches``.

- ``blocking``: the caller's own thread;
- ``driver``: one thread of the client, for callers that submit and take what is done (``Client.submit``,
  ``Client.take_done``);
- ``ostraca.aio``: an event loop, on top of the driver.
"""
