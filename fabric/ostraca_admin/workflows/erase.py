"""Erasure of a tenant's volumes: next incarnations, then the end of old service.

Each agent of the map reports the revision up to which no erased block is served. An agent cut off from the
store is in no map and may continue to serve. Such an agent serves an erasable volume only for ``key_ttl_s``
after the last news of erasures. An erasure is therefore complete that long after the write. The waiting admin
counts by its own clock, from its first sight of the write; an admin that takes over counts anew.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

from ostraca_admin.agent_queries import AgentClient, statuses
from ostraca_admin.model import Operation, Step
from ostraca_admin.workflows.preflight import StepDone, StepFailed, StepPending, Verdict
from ostraca_admin.workflows.step_context import StepResult
from ostraca_fabric.model import record_keys
from ostraca_fabric.model.ids import TenantId
from ostraca_fabric.model.volume import VolumeRecord, check_erasable
from ostraca_fabric.ports.membership import Membership
from ostraca_fabric.ports.records import Records
from ostraca_fabric.runtime.sentences import counted
from ostraca_fabric.telemetry.status import AgentStatus

_POLL_S = 2.0


class ErasureSteps:
    """Erasure steps of an admin."""

    def __init__(
        self,
        records: Records,
        membership: Membership,
        agents: AgentClient,
        *,
        clock: Callable[[], float],
        poll_s: float = _POLL_S,
    ) -> None:
        """Query agents by *agents*; *clock* is monotonic, in seconds."""
        self._records = records
        self._membership = membership
        self._agents = agents
        self._clock = clock
        self._poll_s = poll_s
        self._first_seen_s: dict[str, float] = {}
        """Time of this admin's first sight of the completed write, by operation."""

    async def run(self, operation: Operation, step: Step) -> StepResult:
        """Run a step as far as possible.

        Raises OstracaError if the step failed, MembershipError if the store is unavailable.
        """
        if step.name == "next incarnation":
            return StepResult(await self._erase(operation, step))
        self._first_seen_s.setdefault(operation.id, self._clock())
        if step.name == "purged":
            return StepResult(await self._await_purge(operation))
        verdict = self._await_expiry(operation)
        if isinstance(verdict, StepDone):
            self._first_seen_s.pop(operation.id)
        return StepResult(verdict)

    async def _erase(self, operation: Operation, step: Step) -> Verdict:
        """Erase the incarnations found at the first look, each once."""
        stored = await self._records.below(record_keys.volumes(TenantId(operation.tenant)))
        volumes = {volume.name: volume for volume in await self._volumes(operation)}
        if "seen" not in step.detail:
            names = {record.key.rpartition("/")[2] for record in stored} - volumes.keys()
            if unread := sorted(name for name in names if operation.volume in ("", name)):
                return StepFailed(
                    f"volume {', '.join(unread)} of tenant {operation.tenant} can't be read: "
                    "upgrade the admin service to the fabric's release, then erase again"
                )
            for volume in volumes.values():
                check_erasable(volume)
            seen = {name: volume.incarnation for name, volume in volumes.items()}
            return StepPending(f"{counted(len(seen), 'volume')} to erase", 0.0, detail={"seen": seen})
        seen = step.detail["seen"]
        revision = await self._membership.refresh_overrides()
        for name, incarnation in seen.items():
            if name in volumes and volumes[name].incarnation == incarnation:
                revision = await self._membership.erase_volume(volumes[name])
        return StepDone(
            f"{counted(len(seen), 'volume')} moved to a new incarnation", {"seen": seen, "revision": revision}
        )

    async def _await_purge(self, operation: Operation) -> StepPending | StepDone:
        """Wait for all agents with an answer, and for silent agents until their time to serve ends."""
        revision = int(operation.steps[0].detail["revision"])
        answers = await statuses(self._agents, self._membership.map.agents)
        purged = {agent: _purged(each) for agent, each in answers.items()}
        left = [agent for agent, upto in purged.items() if upto is None or upto < revision]
        if not left:
            return StepDone(f"{len(purged)} of {len(purged)} agents have stopped serving the erased blocks")
        if (
            self._left_s(operation) <= 0
            and None in purged.values()
            and not any(upto is not None and upto < revision for upto in purged.values())
        ):
            return StepDone(
                f"no answer from {', '.join(left)}; without etcd their time to serve erased blocks is over"
            )
        return StepPending(
            f"{len(purged) - len(left)} of {len(purged)} agents have stopped serving the erased blocks; "
            f"waiting for {', '.join(left)}",
            self._poll_s,
            ends_in_s=max(0.0, self._left_s(operation)),
            detail={"waits_for": left},
        )

    def _await_expiry(self, operation: Operation) -> StepPending | StepDone:
        left_s = self._left_s(operation)
        if left_s <= 0:
            return StepDone("no agent can serve the erased blocks")
        return StepPending(
            "waiting for the end of service by agents cut off from etcd (setting key_ttl_s)",
            min(left_s, self._poll_s),
            ends_in_s=left_s,
        )

    def _left_s(self, operation: Operation) -> float:
        live = self._membership.overrides.live
        return self._first_seen_s[operation.id] + live.key_ttl_longest_s - self._clock()

    async def _volumes(self, operation: Operation) -> list[VolumeRecord]:
        await self._membership.refresh_overrides()
        await self._membership.refresh()
        async with aclosing(self._membership.volume_changes()) as changes:  # type: ignore[type-var]  # a generator
            volumes = await anext(changes)
        return [
            volume
            for volume in volumes
            if volume.tenant == operation.tenant and operation.volume in ("", volume.name)
        ]


def _purged(answer: AgentStatus | str) -> int | None:
    """Return the revision up to which an agent serves nothing erased; None without an answer."""
    return None if isinstance(answer, str) else answer.purged
