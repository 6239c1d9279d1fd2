"""Entries of vLLM's configuration, and the size of chunks."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from ostraca.connectors.transfers.settings import WEIGHTS_FILE_BYTES_MAX
from ostraca.connectors.vllm.plugin import register
from ostraca.connectors.vllm.settings import TierSettings
from ostraca.connectors.vllm.shape import check_chunk_bytes
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UsageError, match="no setting 'lookup_deadline'; did you mean lookup_deadline_s"):
        TierSettings.of({"lookup_deadline": 1})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"load_deadline_s": "5"}, "load_deadline_s"),
        ({"load_deadline_s": 0}, "load_deadline_s is 0"),
        ({"pin_s": -1}, "pin_s is -1"),
        ({"pin_s": 20_000}, "pin_s is 20000.0: give at most 3600; pass seconds, not milliseconds"),
        ({"load_deadline_s": 3600.1}, "load_deadline_s is 3600.1: give at most 3600"),
        ({"connect_retry_s": math.inf}, "connect_retry_s is inf: give at most 3600"),
        ({"close_deadline_s": 1e30}, "close_deadline_s is 1e"),
        ({"pin_s": math.nan}, "pin_s is nan"),
        ({"lookup_deadline_s": math.nan}, "lookup_deadline_s is nan"),
        ({"locality": "NEAR"}, "LOCAL, REMOTE, or leave it out"),
        ({"transports": ["rdma"]}, "transports is .*: name at least one of nixl, inline, in a list"),
        ({"arena_bytes": 1 << 20}, "arena_bytes is 1048576: give at least 16777216"),
        ({"arena_bytes": 1000}, "arena_bytes is 1000: give at least 16777216"),
        (
            {"arena_bytes": 20_000_000},
            "arena_bytes is 20000000: give a multiple of 4096, or at least 33554432",
        ),
        ({"agents": 7}, "agents"),
        ({"agents": "http://host"}, "http://host"),
    ],
)
def test_a_wrong_setting_is_refused_by_its_name(config: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        TierSettings.of(config)


@pytest.mark.parametrize("arena_bytes", [16 << 20, (16 << 20) + 4096, 32 << 20, 100_000_000])
def test_the_largest_block_fits_into_every_arena(arena_bytes: int) -> None:
    client = TierSettings(arena_bytes=arena_bytes).client()
    assert BLOCK_BYTES_MAX <= client.chunk_bytes <= client.arena_bytes == arena_bytes


def test_an_hour_is_a_duration_and_rates_have_no_limit_of_durations() -> None:
    assert TierSettings(pin_s=3600.0, recheck_chunks_per_s=20_000, prefill_tokens_per_s=1e9).pin_s == 3600.0


def test_the_fingerprint_of_weights_is_revision_and_digest_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "index.json"
    file.write_bytes(b"1")
    plain = TierSettings(weights_file=str(file))
    first = plain.weights()
    assert first == plain.weights() == TierSettings(weights_file=str(file)).weights()
    assert replace(plain, revision="r").weights() == f"r/{first}"
    file.write_bytes(b"2")
    assert first != plain.weights()
    assert TierSettings(revision="r").weights() == "r"


def test_a_file_of_weights_must_be_readable_and_small(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing can't be read: No such file"):
        TierSettings(weights_file=str(tmp_path / "missing")).weights()
    large = tmp_path / "weights"
    with large.open("wb") as file:
        file.truncate(WEIGHTS_FILE_BYTES_MAX + 1)
    with pytest.raises(UsageError, match="name a manifest or index"):
        TierSettings(weights_file=str(large)).weights()


def test_keys_for_dynamos_router_pass_through() -> None:
    entry = {"router_capabilities": ["router_hint"], "control_ports": [1], "control_advertise_host": "h"}
    assert TierSettings.of(entry | {"tenant": "t"}) == TierSettings(tenant="t")


def test_the_plug_in_does_no_harm_where_vllm_is_missing() -> None:
    register()


def test_one_agent_may_be_named_without_a_list() -> None:
    assert TierSettings.of({"agents": "unix:///a"}) == TierSettings.of({"agents": ["unix:///a"]})
    assert TierSettings.of({}) == TierSettings()


def test_chunks_that_are_too_large_for_a_block_are_refused_with_what_to_change() -> None:
    check_chunk_bytes(16 << 20)
    with pytest.raises(UsageError, match="lower blocks_per_chunk or block_size"):
        check_chunk_bytes((16 << 20) + 1)
