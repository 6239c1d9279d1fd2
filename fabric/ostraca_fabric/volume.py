"""Volumes: namespaces of blocks with one tenant, one layout and one largest block size."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ostraca_fabric.errors import UsageError
from ostraca_fabric.extent import PAGE_BYTES
from ostraca_fabric.ids import TenantId
from ostraca_fabric.layout import Layout

BLOCK_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class VolumeRecord:
    """A volume as the membership store keeps it. It holds no secret."""

    tenant: TenantId
    name: str
    layout: Layout
    block_bytes: int
    """The largest block, in bytes."""

    incarnation: int = 1
    """Raised when the volume is erased, which gives it a new secret."""

    is_erasable: bool = False
    """Whether it can be: agents that don't hear of the store serve it only for a while. Fixed when it is
    made, so that no agent can have missed it."""

    def __post_init__(self) -> None:
        """Refuse a block size that flash can't hold."""
        if not 1 <= self.block_bytes <= BLOCK_BYTES_MAX:
            message = f"block_bytes is {self.block_bytes}: blocks have 1 to {BLOCK_BYTES_MAX} bytes"
            raise UsageError(message)

    @property
    def slot_bytes(self) -> int:
        """What one block takes in an arena, in staging and at most on flash: whole pages."""
        return -(-self.block_bytes // PAGE_BYTES) * PAGE_BYTES

    def erased(self) -> VolumeRecord:
        """Return what it is once it was erased: of the next incarnation."""
        return replace(self, incarnation=self.incarnation + 1)

    def raised_to(self, incarnation: int) -> VolumeRecord:
        """Return it in this incarnation where its own is lower. Then blocks of it were erased, so it is one
        that can be.
        """
        if incarnation <= self.incarnation:
            return self
        return replace(self, incarnation=incarnation, is_erasable=True)


def check_erasable(volume: VolumeRecord) -> None:
    """Raise UsageError for a volume that some agent may serve for ever."""
    if not volume.is_erasable:
        raise UsageError(
            f"volume {volume.name!r} of tenant {volume.tenant!r} can't be erased, which is fixed when it is "
            "made: make its tenant erasable before its first volume"
        )


@dataclass(frozen=True, slots=True)
class VolumeIdentity:
    """What a tag commits to besides the block itself. All of it is public."""

    tenant: TenantId
    name: str
    layout_digest: bytes
