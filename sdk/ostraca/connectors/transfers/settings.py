"""Settings common to all connectors. Each connector's settings extend this class."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Self

import msgspec

from ostraca.settings import MIB, ClientSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.extent import PAGE_BYTES
from ostraca_fabric.model.volume import BLOCK_BYTES_MAX
from ostraca_fabric.wire.address import parse_address

WEIGHTS_FILE_BYTES_MAX = 64 * MIB
"""Largest ``weights_file``: the engine waits while the file is read."""

_DURATION_S_MAX = ClientSettings().deadline_s_max


def _is_duration(name: str) -> bool:
    """Tell whether a setting is a time in seconds, and no rate."""
    return name.endswith("_s") and not name.endswith("_per_s")


@dataclass(frozen=True, slots=True)
class ConnectorSettings:
    """Settings of one connector, with every limit of the connector."""

    LOGGER: ClassVar[str] = "ostraca"
    """Logger of the connector, below the engine's."""

    WHERE: ClassVar[str] = "the Ostraca connector"
    """Place of the settings in the engine's configuration, for errors."""

    MAY_BE_ZERO: ClassVar[frozenset[str]] = frozenset({"break_even_tokens", "prefill_tokens_per_s", "pin_s"})

    agents: tuple[str, ...] = ()
    """Addresses of agents, for example ``["unix:///run/ostraca/agent.sock"]``. If empty, OSTRACA_AGENT in the
    environment gives the addresses, else the default sockets are tried.
    """

    token_file: str = ""
    """File with the agents' token, read for each dial, as in ClientSettings. A file, because command lines
    with a configuration are readable by everyone.
    """

    tls_ca: str = ""
    """CA of agents' certificates, for ``tls://`` addresses, as in ClientSettings."""

    tls_cert: str = ""
    """Certificate of this engine, if agents request one, as in ClientSettings."""

    tls_key: str = ""
    """Private key of the certificate."""

    tenant: str = "default"
    """Tenant of the blocks."""

    volume: str = "kv"
    """First part of the volume's name; the rest is derived from the layout."""

    revision: str = ""
    """Revision of the weights if the model's name stays the same, or any other difference between blocks that
    the engine does not report. Engines share blocks only with an equal revision.
    """

    weights_file: str = ""
    """File that changes with the weights, such as a manifest with digests. Its digest is part of the identity
    of blocks, and is read again whenever the engine resets its cache, as after an update of the weights.
    """

    lookup_deadline_s: float = 0.1
    """Deadline of a lookup; chunks without an answer by then are misses."""

    pin_s: float = 2.0
    """Duration of pins on found chunks, for the load after the lookup. The agent limits the duration. Raise
    it if loads of found chunks miss because requests wait long for memory.
    """

    load_deadline_s: float = 5.0
    """Deadline of a load; the engine computes chunks missing by then."""

    store_deadline_s: float = 30.0
    """Deadline of a store. A store pins rows of the engine's memory meanwhile."""

    close_deadline_s: float = 2.0
    """Wait of the engine's end for stores under way. vLLM kills an engine that takes 5 s to end."""

    prefill_tokens_per_s: float = 0.0
    """Speed of the engine at computing a prefix; 0 if unknown. If set, the fabric declines slower loads
    early.
    """

    break_even_tokens: int = 0
    """Shorter prefixes are not stored, because computing is faster than loading.
    docs/explanation/endurance.md explains the choice; 0 stores all.
    """

    lookups_inflight_max: int = 8
    """Lookups under way at once."""

    loads_inflight_chunks_max: int = 4096
    """Chunks of loads under way; the engine computes further chunks."""

    stores_inflight_chunks_max: int = 1024
    """Chunks of stores under way; further chunks are not stored. Each pins a row of the engine's memory, so
    keep the limit well below the number of rows.
    """

    failed_chunks_max: int = 65536
    """Remembered chunks with failed loads."""

    failed_hold_s: float = 10.0
    """Time for which a chunk with a failed load is a miss for every request."""

    backoff_s: float = 1.0
    """First backoff from a fabric without answers; doubles with each failure in a row ..."""

    backoff_max_s: float = 10.0
    """... up to this."""

    late_requests_max: int = 2
    """Consecutive late requests before a backoff. A lost connection starts the backoff at once."""

    connect_retry_s: float = 1.0
    """Interval of attempts to reach a fabric for the first time."""

    arena_bytes: int = 256 * MIB
    """Memory for block transfers, as in ClientSettings, at least the size of the largest block."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """Transports, best first, as in ClientSettings."""

    @classmethod
    def of(cls, config: Mapping[str, object]) -> Self:
        """Read the settings.

        Raises UsageError with the wrong key and a remedy.
        """
        known = [field.name for field in fields(cls)]
        for name in config:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
                raise UsageError(f"{cls.WHERE} has no setting {name!r}; {hint}")
        given = dict(config)
        if isinstance(given.get("agents"), str):
            given["agents"] = [given["agents"]]
        try:
            return msgspec.convert(given, type=cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"a setting of {cls.WHERE} is wrong: {error}") from error

    def __post_init__(self) -> None:
        """Refuse invalid values. Raises UsageError."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in self.MAY_BE_ZERO and not value >= 0:
                raise UsageError(f"{field.name} is {value}: give 0 or more")
            if field.name not in self.MAY_BE_ZERO and field.name.endswith(("_s", "_max")) and not value > 0:
                raise UsageError(f"{field.name} is {value}: give a value above zero")
            if _is_duration(field.name) and value > _DURATION_S_MAX:
                raise UsageError(
                    f"{field.name} is {value}: give at most {_DURATION_S_MAX:.0f}; pass seconds, not "
                    "milliseconds"
                )
        for address in self.agents:
            parse_address(address)
        self._check_arena()
        self.client()

    def weights(self) -> str:
        """Read the fingerprint of the weights.

        Raises UsageError if the file can't be read, or is too large to be a manifest.
        """
        if not self.weights_file:
            return self.revision
        try:
            with Path(self.weights_file).open("rb") as file:
                content = file.read(WEIGHTS_FILE_BYTES_MAX + 1)
        except OSError as error:
            raise UsageError(f"weights_file {self.weights_file} can't be read: {error.strerror}") from error
        if len(content) > WEIGHTS_FILE_BYTES_MAX:
            raise UsageError(
                f"weights_file {self.weights_file} has more than {WEIGHTS_FILE_BYTES_MAX} bytes: name a "
                "manifest or index of the weights"
            )
        digest = hashlib.blake2b(content, digest_size=16).hexdigest()
        return f"{self.revision}/{digest}" if self.revision else digest

    def client(self) -> ClientSettings:
        """Return the client's settings.

        Raises UsageError for invalid settings.
        """
        return ClientSettings(
            arena_bytes=self.arena_bytes,
            chunk_bytes=self._chunk_bytes,
            quarantine_bytes_max=max(1, self.arena_bytes // 2),
            transports=self.transports,
            token_file=self.token_file,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    def _check_arena(self) -> None:
        """Refuse an arena whose chunks are too small for a block, or no whole pages. Raises UsageError."""
        problem = f"arena_bytes is {self.arena_bytes}: give"
        if self.arena_bytes < BLOCK_BYTES_MAX:
            raise UsageError(f"{problem} at least {BLOCK_BYTES_MAX}, the size of the largest block")
        if self._chunk_bytes % PAGE_BYTES:
            whole = ClientSettings().chunk_bytes
            raise UsageError(f"{problem} a multiple of {PAGE_BYTES}, or at least {whole}")

    @property
    def _chunk_bytes(self) -> int:
        """Size of the arena's chunks."""
        return min(ClientSettings().chunk_bytes, self.arena_bytes)
