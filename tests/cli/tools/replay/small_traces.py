"""Small traces, written by hand or drawn."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ostraca_cli.tools.replay.trace import Request, Trace


def trace_of(*chains: Sequence[int], every_ms: float = 1000.0) -> Trace:
    """Return requests for these chains, one after the other."""
    return Trace.of(
        [Request(number * every_ms, 512 * len(chain), 1, list(chain)) for number, chain in enumerate(chains)]
    )


def traces(*, blocks_max: int = 30) -> st.SearchStrategy[Trace]:
    """Return traces of up to 60 requests for up to 8 blocks each, in any order.

    No request names a block twice: a hash commits to all earlier tokens.
    """
    chain = st.lists(st.integers(0, blocks_max), max_size=8, unique=True)
    some = st.lists(chain, min_size=1, max_size=60).filter(any)
    return some.map(lambda chains: trace_of(*chains))
