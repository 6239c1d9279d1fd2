"""What every exporter must do. An adapter's test inherits this and gives the exporter."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

import pytest

from ostraca_enclosure.plan import (
    NOTHING,
    AddNamespace,
    Export,
    HostSecrets,
    PresentExports,
    WantedExports,
    plan,
)
from ostraca_enclosure.ports import Exporter, ExportError
from ostraca_fabric.model.target import Controller

NQN = "nqn.2025-01.io.ostraca:shelf-1"
ALICE, BOB = "nqn.2025-01.io.ostraca:alice", "nqn.2025-01.io.ostraca:bob"
SECRET = "DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
OTHER = "DHHC-1:00:Q9Ur7m4r2Y0zKpWqZ4B2c3vTz0bqk8yq2pZ6hW5o7uQmvZ1c:"


def brought(exporter: Exporter, want: WantedExports) -> PresentExports:
    """Do what has to be done, and see that nothing is left to do."""
    for step in plan(want, exporter.observe(want.hosts)):
        exporter.apply(step)
    have = exporter.observe(want.hosts)
    assert plan(want, have) == []
    return have


class ExporterContract:
    @abstractmethod
    def make(self) -> Exporter:
        """Return an exporter of this enclosure, as another start of its daemon would."""

    controllers: tuple[Controller, ...]
    secrets = HostSecrets(SECRET)
    """Secrets of an admitted host."""

    others = HostSecrets(OTHER)

    @pytest.fixture
    def drives(self, tmp_path: Path) -> list[Export]:
        folder = tmp_path / "drives"
        folder.mkdir(exist_ok=True)
        made = []
        for number in range(3):
            file = folder / f"drive-{number}.img"
            file.write_bytes(bytes(4096))
            made.append(Export(f"{number + 1:032x}", str(file)))
        return made

    @pytest.fixture
    def want(self, drives: list[Export]) -> WantedExports:
        return WantedExports(self.controllers, frozenset(drives[:2]), {ALICE: self.secrets})

    def test_nothing_is_exported_at_first(self) -> None:
        assert self.make().observe({}) == PresentExports()

    def test_wanted_exports_survive_a_restart(self, want: WantedExports) -> None:
        brought(self.make(), want)
        found = self.make().observe(want.hosts)
        assert found.exists
        assert found.controllers == set(want.controllers)
        assert {(each.nguid, each.device) for each in found.namespaces} == {
            (each.nguid, each.device) for each in want.drives
        }
        assert found.hosts == {ALICE}
        assert not found.stale_hosts
        assert not found.allows_any_host
        assert plan(want, found) == []

    def test_each_step_may_be_repeated(self, want: WantedExports) -> None:
        exporter = self.make()
        for step in plan(want, exporter.observe(want.hosts)):
            exporter.apply(step)
            exporter.apply(step)
        assert plan(want, exporter.observe(want.hosts)) == []
        before = exporter.observe({})
        for step in plan(NOTHING, before):
            exporter.apply(step)
            exporter.apply(step)
        assert exporter.observe({}) == PresentExports()

    def test_other_drives_keep_their_slot(self, want: WantedExports, drives: list[Export]) -> None:
        before = brought(self.make(), want)
        after = brought(self.make(), replace(want, drives=frozenset(drives[1:])))
        slots = [{each.nguid: each.slot for each in have.namespaces} for have in (before, after)]
        assert drives[0].nguid not in slots[1]
        assert drives[2].nguid in slots[1]

    def test_drive_at_a_new_device_is_exported_from_there(
        self, want: WantedExports, drives: list[Export]
    ) -> None:
        brought(self.make(), want)
        moved = Export(drives[0].nguid, drives[2].device)
        have = brought(self.make(), replace(want, drives=frozenset({moved, drives[1]})))
        assert {each.device for each in have.namespaces} == {drives[1].device, drives[2].device}

    def test_hosts_come_and_go(self, want: WantedExports) -> None:
        brought(self.make(), want)
        have = brought(self.make(), replace(want, hosts={BOB: self.others}))
        assert have.hosts == {BOB}
        assert brought(self.make(), replace(want, hosts={})).allows_any_host
        have = brought(self.make(), want)
        assert not have.allows_any_host
        assert have.hosts == {ALICE}

    @pytest.mark.parametrize("secret", [OTHER, ""])
    def test_changed_secret_is_repaired(self, want: WantedExports, secret: str) -> None:
        brought(self.make(), want)
        changed = {ALICE: HostSecrets(secret)}
        assert self.make().observe(changed).stale_hosts == {ALICE}
        brought(self.make(), replace(want, hosts=changed))
        assert self.make().observe(want.hosts).stale_hosts == {ALICE}
        brought(self.make(), want)

    def test_secret_is_in_no_message_or_repr(self, want: WantedExports) -> None:
        steps = plan(want, PresentExports())
        assert not any(SECRET in str(step) or SECRET in repr(step) for step in steps)

    def test_all_is_withdrawn(self, want: WantedExports) -> None:
        brought(self.make(), want)
        exporter = self.make()
        for step in plan(NOTHING, exporter.observe({})):
            exporter.apply(step)
        assert exporter.observe({}) == PresentExports()

    def test_failed_step_has_a_reason(self, want: WantedExports) -> None:
        exporter = self.make()
        brought(exporter, want)
        with pytest.raises(ExportError):
            exporter.apply(AddNamespace(Export("f" * 32, "/nowhere/drive-9.img")))
        assert not any(each.nguid == "f" * 32 and each.is_enabled for each in exporter.observe({}).namespaces)
