"""What a trace is replayed through: the owner's real code, or a cache of the literature."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ostraca.cli.replay.outcome import Written
from ostraca.cli.replay.policies.policy import Policy


class Store(Protocol):
    """Blocks on flash."""

    written: Written

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which blocks of a prompt are there, in order; then put those that are not."""
        ...


class PolicyStore:
    """A cache of the literature, which writes what it takes and nothing else."""

    def __init__(self, policy: Policy, block_bytes: int) -> None:
        self.written = Written()
        self._policy = policy
        self._block_bytes = block_bytes

    def request(self, now_s: float, chain: NDArray[np.int64]) -> NDArray[np.bool_]:  # noqa: ARG002 (it has no use for the time)
        """Ask for all blocks, then insert those that were not there."""
        policy, blocks = self._policy, chain.tolist()
        found = [policy.read(block) for block in blocks]
        missing = dict.fromkeys(block for block, is_there in zip(blocks, found, strict=True) if not is_there)
        for block in missing:
            policy.insert(block)
        count = len(missing) - policy.end_request()
        self.written.blocks += count
        self.written.block_bytes += count * self._block_bytes
        return np.array(found, np.bool_)
