"""What vLLM's configuration may say to the tier.

The keys of the tier's entry in ``secondary_tiers``, besides vLLM's own ``type``, ``module_path`` and
``backpressure``, are the fields of ``TierSettings``.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ostraca.connectors.vllm.core.pause import Pause
from ostraca.settings import MIB, ClientSettings
from ostraca_fabric.errors import UsageError
from ostraca_fabric.wire.address import parse_address

if TYPE_CHECKING:
    from collections.abc import Mapping

LOGGER = "vllm.ostraca"
"""Where the tier logs: vLLM shows what is logged under its own name, at VLLM_LOGGING_LEVEL, and no more."""

_LOCALITIES = ("LOCAL", "REMOTE")
_MAY_BE_ZERO = frozenset({"break_even_tokens", "prefill_tokens_per_s", "pin_s"})


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Settings of one tier. Every limit of the tier is one of these."""

    agents: tuple[str, ...] = ()
    """Where to find an agent, for example ``["unix:///run/ostraca/agent.sock"]``. Without any, the
    environment's OSTRACA_AGENT says where, else the usual sockets."""

    token_file: str = ""
    """A file with the token that agents ask for; empty where a unix socket needs none. A file, because a
    configuration on a command line is there for everyone to read."""

    tls_ca: str = ""
    """The CA that signs agents' certificates, for ``tls://`` addresses, as in ClientSettings."""

    tls_cert: str = ""
    """This engine's own certificate, where agents ask for one, as in ClientSettings."""

    tls_key: str = ""
    """Its private key."""

    tenant: str = "default"
    """Whose blocks these are."""

    volume: str = "vllm"
    """What the volume's name begins with; the rest of the name is made from what blocks mean."""

    revision: str = ""
    """Whatever vLLM does not tell and yet decides what blocks mean: above all the revision of the weights,
    when the model's name stays the same. Engines share blocks only where this is equal."""

    locality: str = "REMOTE"
    """What the tier is to vLLM's tier filters and router events: LOCAL or REMOTE."""

    lookup_deadline_s: float = 0.1
    """How long a request may wait to hear which of its chunks are there; then they are not."""

    pin_s: float = 2.0
    """How long chunks that were found stay where they are, for the load that follows. The agent bounds it.
    Raise it when loads of chunks that were found miss because requests wait long for memory."""

    load_deadline_s: float = 5.0
    """How long a load may take; what has not come by then is computed."""

    store_deadline_s: float = 30.0
    """How long a store may take. It pins rows of vLLM's host memory meanwhile."""

    prefill_tokens_per_s: float = 0.0
    """How fast this engine computes a prefix; 0 when that is not known. With it, a load that would take
    longer than computing is declined by the fabric, early."""

    break_even_tokens: int = 0
    """Prefixes shorter than this are not stored: computing them is faster than loading them.
    docs/explanation/endurance.md says how to find the number; 0 stores all."""

    lookup_chunks_max: int = 8192
    """How many chunks one question names. What is beyond it waits for the next step."""

    lookups_inflight_max: int = 8
    """How many questions are under way at once."""

    loads_inflight_chunks_max: int = 4096
    """Chunks of loads under way; what is beyond it is computed."""

    stores_inflight_chunks_max: int = 1024
    """Chunks of stores under way; what is beyond it is not stored. Each pins a row of vLLM's host memory, so
    keep it well below the number of rows (``cpu_bytes_to_use``)."""

    table_chunks_max: int = 1 << 20
    """How many answers are remembered for requests that live: about 200 bytes each. Beyond it, chunks are
    misses."""

    failed_chunks_max: int = 65536
    """How many chunks whose load failed are remembered."""

    failed_hold_s: float = 10.0
    """How long a chunk whose load failed is a miss for every request."""

    pause_s: float = 1.0
    """How long a fabric that does not answer is left alone; each failure in a row doubles it ..."""

    pause_s_max: float = 10.0
    """... up to this."""

    lates_max: int = 2
    """How many requests in a row must be late to begin a pause. A lost connection begins one at once."""

    connect_retry_s: float = 1.0
    """How often a fabric that was never reached is tried again."""

    arena_bytes: int = 256 * MIB
    """Memory that blocks cross in, as in ClientSettings."""

    transports: tuple[str, ...] = ("nixl", "inline")
    """How blocks may cross, best first, as in ClientSettings."""

    @classmethod
    def of(cls, config: Mapping[str, object]) -> TierSettings:
        """Read the tier's entry. Raises UsageError that says which key is wrong, and what to write."""
        known = [field.name for field in fields(cls)]
        for name in config:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(sorted(known))}"
                raise UsageError(f"the Ostraca tier of secondary_tiers has no setting {name!r}; {hint}")
        given = dict(config)
        if isinstance(given.get("agents"), str):
            given["agents"] = [given["agents"]]
        try:
            return msgspec.convert(given, type=cls)
        except msgspec.ValidationError as error:
            raise UsageError(f"a setting of the Ostraca tier of secondary_tiers is wrong: {error}") from error

    def __post_init__(self) -> None:
        """Refuse what can't work."""
        if self.locality not in _LOCALITIES:
            raise UsageError(f"locality is {self.locality!r}: take {' or '.join(_LOCALITIES)}")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in _MAY_BE_ZERO and not value >= 0:
                raise UsageError(f"{field.name} is {value}: it must not be negative")
            if field.name not in _MAY_BE_ZERO and field.name.endswith(("_s", "_max")) and not value > 0:
                raise UsageError(f"{field.name} is {value}: it must be above zero")
        for address in self.agents:
            parse_address(address)
        self.client()

    def client(self) -> ClientSettings:
        """Return the client's settings. Raises UsageError when they can't work."""
        return ClientSettings(
            arena_bytes=self.arena_bytes,
            chunk_bytes=min(ClientSettings().chunk_bytes, self.arena_bytes),
            quarantine_bytes_max=max(1, self.arena_bytes // 2),
            transports=self.transports,
            tls_ca=self.tls_ca,
            tls_cert=self.tls_cert,
            tls_key=self.tls_key,
        )

    def pause(self) -> Pause:
        """Return a pause that has not begun."""
        return Pause(first_s=self.pause_s, longest_s=self.pause_s_max, lates_max=self.lates_max)

    def token(self) -> str | None:
        """Read the token. Raises UsageError when its file can't be read."""
        if not self.token_file:
            return None
        try:
            return Path(self.token_file).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise UsageError(f"token_file can't be read: {error}") from error
