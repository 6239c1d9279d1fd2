"""Conditions on vLLM's chunks and block hashes.

Hashes with a random seed differ in each process: no other engine finds the stored blocks, without any error.
Unless PYTHONHASHSEED is set, vLLM draws a random seed: before 0.29 always, and since then for its xxhash
algorithms, with hashes shorter than SHA-256. Any value of PYTHONHASHSEED changes the hashes of all
algorithms, so an engine with a value finds no blocks of an engine without.
"""

from __future__ import annotations

from collections.abc import Mapping

from ostraca.connectors.transfers.hash_seed import VARIABLE
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX


def check_chunk_bytes(chunk_bytes: int) -> None:
    """Refuse chunks too large for a block, with a remedy. Raises UsageError."""
    if chunk_bytes > BLOCK_BYTES_MAX:
        raise UsageError(
            f"a chunk of vLLM's offloading has {chunk_bytes} bytes, and a block of Ostraca at most "
            f"{BLOCK_BYTES_MAX}: lower blocks_per_chunk or block_size in kv_connector_extra_config"
        )


_ALIKE_SINCE = (0, 29)
_XXHASH_BYTES = 16
_RANDOM = ("", "random")
_DEFAULT_SEED = "vllm-none-hash"
"""vLLM's seed of SHA-256 if the variable is not set. Before 0.29 a random seed, with a warning of its own."""

_EMPTY_SEED = "empty"
"""Stands for an empty text, which is a seed of its own."""


def hash_seed_problem(version: str, hash_bytes: int, environment: Mapping[str, str]) -> str:
    """Return why other processes can't find this engine's blocks, and a remedy.

    Empty if they can. *version* is vLLM's, or empty if irrelevant.
    """
    seed = environment.get(VARIABLE, "")
    is_old, is_short = _release(version) < _ALIKE_SINCE, hash_bytes == _XXHASH_BYTES
    if seed not in _RANDOM or not (is_old or is_short):
        return ""
    whose = "the xxhash algorithms" if is_short else f"vLLM {version}"
    given = f"is {seed!r}" if seed else "is not set"
    return (
        f"block hashes of {whose} differ in each process, as {VARIABLE} {given}: other engines, and "
        f"this engine after a restart, find no stored blocks. Set {VARIABLE} to the same number "
        "everywhere"
    )


def _release(version: str) -> tuple[int, ...]:
    """Read the first two numbers of a version; without numbers, count as new."""
    numbers = version.split(".")[:2]
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else _ALIKE_SINCE


def common_seed(hash_bytes: int, environment: Mapping[str, str]) -> str:
    """Return the seed of this engine's hashes, which all engines must share; empty if the seed is random.

    vLLM hashes the variable's text: 0 and 00 are different seeds.
    """
    seed = environment.get(VARIABLE)
    if hash_bytes == _XXHASH_BYTES:
        return "" if seed is None or seed in _RANDOM else seed
    if seed is None:
        return _DEFAULT_SEED
    return seed or _EMPTY_SEED
