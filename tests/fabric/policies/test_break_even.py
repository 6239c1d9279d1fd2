from __future__ import annotations

import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ostraca_fabric.errors import UsageError
from ostraca_fabric.policies.break_even import break_even_tokens

POSITIVE = st.floats(1e-3, 1e12)


def test_the_worked_example() -> None:
    """A 70B model in BF16: 320 KiB a token, 11,900 tokens a second to compute, 12.5 GB/s to load."""
    assert (
        break_even_tokens(
            recompute_tokens_per_s=11_900, load_bytes_per_s=12.5e9, latency_s=0.010, token_bytes=320 << 10
        )
        == 173
    )


def test_loading_slower_than_computing_never_pays() -> None:
    slow = {"recompute_tokens_per_s": 50_000.0, "latency_s": 0.001, "token_bytes": 320 << 10}
    assert break_even_tokens(load_bytes_per_s=7e9, **slow) is None
    assert break_even_tokens(load_bytes_per_s=50_000.0 * (320 << 10), **slow) is None
    assert break_even_tokens(load_bytes_per_s=70e9, **slow) is not None


@given(POSITIVE, POSITIVE, st.floats(0, 100), POSITIVE)
def test_it_is_the_first_length_whose_load_is_no_slower(
    recompute: float, load: float, latency_s: float, token_bytes: float
) -> None:
    tokens = break_even_tokens(
        recompute_tokens_per_s=recompute, load_bytes_per_s=load, latency_s=latency_s, token_bytes=token_bytes
    )
    saved_s = 1 / recompute - token_bytes / load
    if tokens is None:
        assert saved_s <= 0
        return
    assert saved_s > 0
    assume(tokens < 1e9)
    assume(saved_s * recompute > 1e-9)
    assert tokens * saved_s >= latency_s or math.isclose(tokens * saved_s, latency_s, rel_tol=1e-6)
    assert tokens == 1 or (tokens - 1) * saved_s < latency_s


@pytest.mark.parametrize("wrong", ["recompute_tokens_per_s", "load_bytes_per_s", "token_bytes"])
def test_rates_and_sizes_are_positive(wrong: str) -> None:
    good = {"recompute_tokens_per_s": 1.0, "load_bytes_per_s": 1.0, "latency_s": 0.0, "token_bytes": 1.0}
    with pytest.raises(UsageError):
        break_even_tokens(**(good | {wrong: 0.0}))
    with pytest.raises(UsageError):
        break_even_tokens(**(good | {"latency_s": -1.0}))
