"""The break-even length: the shortest prefix that is loaded faster than it is computed again.

Loading ``n`` tokens takes ``latency_s + n x token_bytes / load_bytes_per_s``, computing them
``n / recompute_tokens_per_s``. They are equal at ::

    n = latency_s / (1 / recompute_tokens_per_s - token_bytes / load_bytes_per_s)

A chain shorter than that is not worth its flash. A longer one is worth it whole: its first blocks are loaded
in one go with the rest.
"""

from __future__ import annotations

import math

from ostraca_fabric.errors import UsageError


def break_even_tokens(
    *, recompute_tokens_per_s: float, load_bytes_per_s: float, latency_s: float, token_bytes: float
) -> int | None:
    """Return the shortest prefix worth loading, in tokens; None where loading never pays.

    *token_bytes*: KV of one token over all layers, ranks and groups that are loaded at *load_bytes_per_s*.
    Raises UsageError for values that nothing can have.
    """
    if min(recompute_tokens_per_s, load_bytes_per_s, token_bytes) <= 0 or latency_s < 0:
        message = "rates and sizes are above zero, and a latency is not negative"
        raise UsageError(message)
    saved_s = 1 / recompute_tokens_per_s - token_bytes / load_bytes_per_s
    if saved_s <= 0:
        return None
    return max(1, math.ceil(latency_s / saved_s))
