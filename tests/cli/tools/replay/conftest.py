"""Traces for tests of `ostraca replay`."""

from pathlib import Path

import pytest

from ostraca_cli.tools.replay.trace import Trace, read_trace

PUBLIC = Path(__file__).parents[5] / "shared" / "traces" / "mooncake_fast25" / "conversation_trace.jsonl"


@pytest.fixture(scope="session")
def public_trace() -> Trace:
    """Mooncake's conversation trace, if a copy lies beside the repository."""
    if not PUBLIC.exists():
        pytest.skip("no public trace lies beside the repository, in ../shared/traces")
    return read_trace(PUBLIC)
