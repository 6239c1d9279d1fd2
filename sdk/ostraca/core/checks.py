"""Arguments that can be judged by themselves."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from ostraca_fabric.chain import Chain
from ostraca_fabric.errors import UsageError
from ostraca_fabric.outcome import Ack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


def checked_seconds(name: str, value: object, *, longest_s: float) -> float:
    """Return a time span that an operation can keep to.

    Zero and less are allowed: the deadline has passed already.

    Raises UsageError for what is no finite number, and for more than *longest_s*.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} is {value!r}: pass seconds as a number")
    seconds = float(value)
    if not math.isfinite(seconds):
        raise UsageError(
            f"{name} is {seconds}: every operation ends by its deadline, so pass a finite number of seconds"
        )
    if seconds > longest_s:
        raise UsageError(
            f"{name} is {seconds:g} s and the longest allowed is {longest_s:g} s (deadline_s_max in the "
            "settings): it is in "
            "seconds, not milliseconds"
        )
    return seconds


def checked_ttl_s(ttl_s: object) -> float:
    """Return how long blocks are worth keeping, 0 for None: nobody knows. Raises UsageError."""
    if ttl_s is None:
        return 0.0
    seconds = math.nan if isinstance(ttl_s, bool) or not isinstance(ttl_s, Real) else float(ttl_s)
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"ttl_s is {ttl_s!r}: pass for how many seconds the blocks are worth keeping, above 0, or None "
            "where nobody knows"
        )
    return seconds


def checked_chain(chain: object, *, hash_bytes: int) -> Chain:
    """Return a chain that belongs to a volume whose layout has hashes of this length. Raises UsageError."""
    if not isinstance(chain, Chain):
        raise UsageError(
            f"a {type(chain).__name__} was passed as chain: make one with volume.chain(engine_hashes)"
        )
    if chain.hash_bytes != hash_bytes:
        raise UsageError(
            f"the chain has hashes of {chain.hash_bytes} bytes and the volume's layout says {hash_bytes}: "
            "make the chain with "
            "this volume's chain()"
        )
    return chain


def checked_chains(chains: object, *, hash_bytes: int) -> tuple[Chain, ...]:
    """Return one chain or a list of them as a tuple. Raises UsageError."""
    listed: Sequence[object] = chains if isinstance(chains, (list, tuple)) else (chains,)
    return tuple(checked_chain(chain, hash_bytes=hash_bytes) for chain in listed)


def check_batch(blocks: int, *, blocks_max: int) -> None:
    """Refuse a batch over the limit. Raises UsageError."""
    if blocks > blocks_max:
        raise UsageError(
            f"a batch of {blocks} blocks, and batch_blocks_max in the client's settings is {blocks_max}: "
            "slice the chain, "
            "chain[first:last], and make several calls"
        )


def checked_lengths(lengths: int | Sequence[int], *, count: int, block_bytes: int) -> NDArray[np.uint32]:
    """Return a length for each of *count* blocks. Raises UsageError."""
    listed = np.full(count, lengths) if isinstance(lengths, int) else np.array(lengths).reshape(-1)
    if len(listed) != count:
        raise UsageError(
            f"{len(listed)} lengths for {count} blocks: pass one for each, or one number for all"
        )
    if count and not (listed.dtype.kind in "iu" and 1 <= listed.min() <= listed.max() <= block_bytes):
        raise UsageError(f"blocks of this volume have 1 to {block_bytes} bytes: pass numbers in that range")
    return listed.astype(np.uint32)


def checked_agent(at: object) -> str:
    """Return the id of the agent that is meant, empty for the one that is asked. Raises UsageError."""
    if at is None:
        return ""
    if not isinstance(at, str) or not at:
        raise UsageError(
            f"at is {at!r}: pass the id of an agent (Client.agent, or agents in Client.status()), or None "
            "for the one this client is connected to"
        )
    return at


def checked_ack(ack: object) -> Ack:
    """Return the state to acknowledge a put at. Raises UsageError."""
    try:
        return Ack(ack)  # type: ignore[arg-type]  # whether it is one is what is asked
    except ValueError as error:
        raise UsageError(f"ack is {ack!r}: pass Ack.STAGED or Ack.COMMITTED") from error
