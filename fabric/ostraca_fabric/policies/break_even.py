"""Break-even length: the shortest prefix that loads faster than it is recomputed.

Loading ``n`` tokens takes ``latency_s + n x token_bytes / load_bytes_per_s``, recomputing takes ``n /
recompute_tokens_per_s``. Both are equal at ::

    n = latency_s / (1 / recompute_tokens_per_s - token_bytes / load_bytes_per_s)

A shorter chain is not worth its flash. A longer chain is worth flash as a whole: the first blocks are loaded
in one go with the rest.
"""

from __future__ import annotations

import math

from ostraca_fabric.errors import UsageError


def break_even_tokens(
    *, recompute_tokens_per_s: float, load_bytes_per_s: float, latency_s: float, token_bytes: float
) -> int | None:
    """Return the shortest prefix worth loading, in tokens; None if loading never pays.

    *token_bytes*: KV of one token over all layers, ranks and groups loaded at *load_bytes_per_s*. Raises
    UsageError for impossible values.
    """
    if min(recompute_tokens_per_s, load_bytes_per_s, token_bytes) <= 0 or latency_s < 0:
        raise UsageError("rates and sizes are above zero, and a latency is not negative")
    saved_s = 1 / recompute_tokens_per_s - token_bytes / load_bytes_per_s
    return max(1, math.ceil(latency_s / saved_s)) if saved_s > 0 else None
