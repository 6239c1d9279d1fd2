"""Errors as values: what another process of a pool gets of them."""

import pickle

import pytest

from ostraca_fabric.errors import (
    LayoutMismatchError,
    OlderAgentError,
    OstracaError,
    OtherFabricError,
    RefusedError,
    UsageError,
)


@pytest.mark.parametrize(
    "error",
    [
        RefusedError("overloaded", "retry later"),
        LayoutMismatchError("layout_mismatch", "another layout"),
        OlderAgentError("no regions"),
        OtherFabricError("another fabric", bytes(16)),
        UsageError("pass a number"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_crosses_to_another_process(error: OstracaError) -> None:
    found = pickle.loads(pickle.dumps(error))
    assert (type(found), str(found), vars(found)) == (type(error), str(error), vars(error))
