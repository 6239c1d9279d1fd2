"""Command for an operator who asks for the reason of a miss."""

from __future__ import annotations

from ostraca.volume import Volume
from ostraca_fabric.model.chain import Chain


def explain_command(volume: Volume, chain: Chain) -> str:
    """Return the command line that explains the first block of *chain*."""
    span = chain[:1].span()
    rank = f"--rank {span.rank} " if span.rank else ""
    return (
        f"ostraca explain {span.hashes.hex()} --root {span.units.hex()} {rank}--group {span.group} "
        f"--volume {volume.name} --tenant {volume.tenant}"
    )
