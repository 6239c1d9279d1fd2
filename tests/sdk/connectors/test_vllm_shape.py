"""Detection of vLLM's block hashes with a seed for each process."""

from __future__ import annotations

import pytest

from ostraca.connectors.transfers.hash_seed import VARIABLE
from ostraca.connectors.vllm.shape import common_seed, hash_seed_problem


@pytest.mark.parametrize(
    ("version", "hash_bytes", "seed", "differs"),
    [
        ("0.28.3", 32, None, True),
        ("0.28.3", 32, "random", True),
        ("0.28.3", 32, "", True),
        ("0.28.3", 32, "0", False),
        ("0.28.3.dev1+gabc", 32, "42", False),
        ("0.28.3.dev1+gabc", 32, None, True),
        ("0.29.0", 32, None, False),
        ("0.33.1", 32, "random", False),
        ("0.33.1", 16, None, True),
        ("0.33.1", 16, "7", False),
        ("1.0.0", 32, None, False),
        ("dev", 32, None, False),
        ("", 16, "random", True),
    ],
)
def test_a_random_seed_is_told_where_hashes_depend_on_it(
    version: str, hash_bytes: int, seed: str | None, *, differs: bool
) -> None:
    why = hash_seed_problem(version, hash_bytes, {} if seed is None else {VARIABLE: seed})
    assert bool(why) == differs
    if differs:
        assert f"{VARIABLE} is {repr(seed) if seed else 'not set'}" in why
        assert f"Set {VARIABLE} to the same number" in why


@pytest.mark.parametrize(
    ("hash_bytes", "seed", "common"),
    [
        (16, "7", "7"),
        (16, "random", ""),
        (16, None, ""),
        (32, "7", "7"),
        (32, "random", "random"),
        (32, None, "vllm-none-hash"),
    ],
)
def test_engines_must_agree_on_a_fixed_seed_of_their_hashes(
    hash_bytes: int, seed: str | None, common: str
) -> None:
    assert common_seed(hash_bytes, {} if seed is None else {VARIABLE: seed}) == common


def test_an_empty_seed_and_none_are_different_seeds_of_sha256() -> None:
    seeds = {common_seed(32, environment) for environment in ({}, {VARIABLE: ""}, {VARIABLE: "0"})}
    assert len(seeds) == 3
    assert all(seeds)
