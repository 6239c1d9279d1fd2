"""Both exporters do what exporters must, and each what only it has to."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.enclosure.adapters.exporter_contract import (
    ALICE,
    BOB,
    NQN,
    OTHER,
    SECRET,
    ExporterContract,
    brought,
)
from tests.enclosure.adapters.simulated_nvmet import Killed, SimulatedNvmet
from tests.support.nvme_tcp.tcp_target import free_controller

from ostraca_enclosure.adapters.file_drives import FileExporter
from ostraca_enclosure.adapters.nvme_tcp.server import TargetServer
from ostraca_enclosure.adapters.nvme_tcp.subsystem import Subsystem
from ostraca_enclosure.adapters.nvme_tcp.tcp_exporter import TcpExporter
from ostraca_enclosure.adapters.nvmet import NvmetExporter
from ostraca_enclosure.plan import (
    NOTHING,
    AddListener,
    AddNamespace,
    AllowHost,
    CreateSubsystem,
    DenyHost,
    Export,
    HostSecrets,
    PresentExports,
    RequireAllowList,
    WantedExports,
    plan,
)
from ostraca_enclosure.ports import Exporter, ExportError
from ostraca_enclosure.state_files import NvmetRecord
from ostraca_fabric.drives.file_exports import FileExports, read_exports, write_exports
from ostraca_fabric.model.target import Controller, TargetTransport, parse_controller

TCP, RDMA = parse_controller("tcp://192.0.2.1:4420"), parse_controller("rdma://192.0.2.1:4421")


class TestFiles(ExporterContract):
    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "drives"
        self.directory.mkdir(exist_ok=True)
        self.controllers = (Controller(TargetTransport.FILES, str(self.directory)),)

    def make(self) -> FileExporter:
        return FileExporter(self.directory, NQN)

    def test_agents_read_the_exports(self, want: WantedExports, drives: list[Export]) -> None:
        brought(self.make(), want)
        found = read_exports(self.directory)
        assert found is not None
        assert found.nqn == NQN
        assert found.namespaces == {each.nguid: Path(each.device) for each in drives[:2]}
        assert found.is_secret(ALICE, SECRET)
        assert not found.is_secret(ALICE, OTHER)
        assert not found.knows(BOB)

    def test_only_listed_hosts_may_connect_during_changes(self, want: WantedExports) -> None:
        brought(self.make(), want)
        exporter, other = self.make(), replace(want, hosts={BOB: HostSecrets(OTHER)})
        for step in plan(other, exporter.observe(other.hosts)):
            exporter.apply(step)
            found = read_exports(self.directory)
            assert found is not None
            assert found.hosts, f"open to every host after: {step}"

    def test_directory_of_another_enclosure_is_refused(self, want: WantedExports) -> None:
        write_exports(self.directory, FileExports("nqn.2025-01.io.ostraca:other", {}))
        with pytest.raises(ExportError, match=r"belongs to nqn\.2025-01\.io\.ostraca:other"):
            self.make().observe({})
        with pytest.raises(ExportError, match="choose another directory"):
            self.make().apply(CreateSubsystem())

    def test_damaged_exports_file_is_reported(self) -> None:
        (self.directory / "exports.json").write_text("{")
        with pytest.raises(ExportError, match="is damaged"):
            self.make().observe({})

    def test_file_exports_have_no_controller_secret(self, want: WantedExports) -> None:
        brought(self.make(), want)
        with pytest.raises(ExportError, match="remove controller_secret"):
            self.make().apply(AllowHost(BOB, HostSecrets(SECRET, OTHER)))


class TestNvmet(ExporterContract):
    controllers = (RDMA, TCP)

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.tree = SimulatedNvmet(tmp_path / "nvmet")
        self.state = tmp_path / "state"
        self.state.mkdir()

    def make(self) -> NvmetExporter:
        return NvmetExporter(self.tree, NQN, NvmetRecord(self.state, "boot-1"))

    def test_hosts_see_the_identity_of_the_drive(self, want: WantedExports, drives: list[Export]) -> None:
        have = brought(self.make(), want)
        for each in have.namespaces:
            at = f"subsystems/{NQN}/namespaces/{each.slot}"
            assert self.tree.read(f"{at}/device_nguid").replace("-", "") == each.nguid
            assert self.tree.read(f"{at}/device_uuid").replace("-", "") == each.nguid
        assert self.tree.read(f"subsystems/{NQN}/attr_allow_any_host") == "0"
        assert self.tree.read(f"hosts/{ALICE}/dhchap_key") == SECRET

    @pytest.mark.parametrize(("is_known", "is_asked"), [(True, True), (True, False), (False, True)])
    def test_reservations_need_the_setting_and_the_kernel(
        self, want: WantedExports, *, is_known: bool, is_asked: bool
    ) -> None:
        self.tree.has_reservations = is_known
        exporter = NvmetExporter(self.tree, NQN, NvmetRecord(self.state, "boot-1"), reservations=is_asked)
        for each in brought(exporter, want).namespaces:
            at = f"subsystems/{NQN}/namespaces/{each.slot}/resv_enable"
            assert self.tree.has(at) == is_known
            if is_known:
                assert self.tree.read(at) == str(int(is_asked))

    def test_serial_number_is_stable(self, want: WantedExports) -> None:
        brought(self.make(), want)
        serial = self.tree.read(f"subsystems/{NQN}/attr_serial")
        brought(self.make(), NOTHING)
        brought(self.make(), want)
        assert self.tree.read(f"subsystems/{NQN}/attr_serial") == serial

    def test_mutual_secrets_are_configured(self, want: WantedExports) -> None:
        mutual = replace(want, hosts={ALICE: HostSecrets(SECRET, OTHER)})
        brought(self.make(), want)
        brought(self.make(), mutual)
        assert self.tree.read(f"hosts/{ALICE}/dhchap_ctrl_key") == OTHER
        brought(self.make(), want)
        assert self.tree.read(f"hosts/{ALICE}/dhchap_ctrl_key") == ""

    def test_only_own_objects_are_removed(self, want: WantedExports, drives: list[Export]) -> None:
        others = "nqn.2025-01.org.example:theirs"
        self.tree.mkdir(f"subsystems/{others}")
        self.tree.mkdir(f"subsystems/{others}/namespaces/1")
        for name in (ALICE, BOB):
            self.tree.mkdir(f"hosts/{name}")
        self.tree.write(f"hosts/{ALICE}/dhchap_key", SECRET)
        self.tree.link(f"subsystems/{others}/allowed_hosts/{ALICE}", f"hosts/{ALICE}")
        self.tree.mkdir("ports/1")
        for name, value in (("trtype", "tcp"), ("traddr", "192.0.2.1"), ("trsvcid", "4420")):
            self.tree.write(f"ports/1/addr_{name}", value)
        self.tree.link(f"ports/1/subsystems/{others}", f"subsystems/{others}")
        before = self.tree.shown()
        brought(self.make(), want)
        assert self.tree.names("ports") == ["1", "2"], "the port of others at the same address is joined"
        brought(self.make(), NOTHING)
        assert self.tree.shown() == before

    def test_foreign_host_with_another_secret_is_kept(self, want: WantedExports) -> None:
        self.tree.mkdir(f"hosts/{ALICE}")
        self.tree.write(f"hosts/{ALICE}/dhchap_key", OTHER)
        exporter = self.make()
        exporter.apply(CreateSubsystem())
        with pytest.raises(ExportError, match="created by another program"):
            exporter.apply(AllowHost(ALICE, HostSecrets(SECRET)))
        assert self.tree.read(f"hosts/{ALICE}/dhchap_key") == OTHER

    def test_record_is_void_after_a_boot(self, want: WantedExports) -> None:
        brought(self.make(), want)
        self.tree = SimulatedNvmet(self.state.parent / "nvmet-2")
        self.tree.mkdir("ports/1")  # somebody else's, with a number that was ours
        self.tree.mkdir(f"hosts/{ALICE}")
        after = NvmetExporter(self.tree, NQN, NvmetRecord(self.state, "boot-2"))
        brought(after, replace(want, hosts={ALICE: HostSecrets()}))
        brought(after, NOTHING)
        assert self.tree.shown() == [f"hosts/{ALICE}", "ports/1"]

    def test_kernel_without_authentication_admits_no_host(self, want: WantedExports) -> None:
        self.tree = SimulatedNvmet(self.state.parent / "nvmet-2", has_auth=False)
        exporter = self.make()
        exporter.apply(CreateSubsystem())
        with pytest.raises(ExportError, match="CONFIG_NVME_TARGET_AUTH"):
            exporter.apply(AllowHost(ALICE, HostSecrets(SECRET)))
        assert exporter.observe(want.hosts).hosts == frozenset()
        exporter.apply(AllowHost(ALICE, HostSecrets()))
        assert exporter.observe({ALICE: HostSecrets()}).hosts == {ALICE}

    def test_foreign_address_is_reported_and_retried(self, want: WantedExports) -> None:
        exporter = self.make()
        wrong = AddListener(parse_controller("tcp://192.0.2.99:4420"))
        brought(exporter, want)
        for _ in range(2):
            with pytest.raises(ExportError, match="no such address on this machine"):
                exporter.apply(wrong)
        assert len(self.tree.names("ports")) == 3, "one port, tried twice"
        brought(self.make(), NOTHING)
        assert self.tree.shown() == []

    def test_missing_nvmet_names_the_modules(self, tmp_path: Path) -> None:
        self.tree.root = tmp_path / "nothing"
        with pytest.raises(ExportError, match="modprobe nvmet"):
            self.make().observe({})

    @pytest.mark.slow
    def test_kill_at_any_change_is_repaired_by_the_next_start(
        self, want: WantedExports, drives: list[Export], tmp_path: Path
    ) -> None:
        wants = [
            want,
            replace(want, drives=frozenset(drives[1:]), hosts={BOB: HostSecrets(OTHER)}),
            replace(want, controllers=(TCP,), hosts={}),
            NOTHING,
        ]
        for before, after in itertools.pairwise([NOTHING, *wants]):
            for killed_at in itertools.count():
                self.tree = SimulatedNvmet(tmp_path / f"tree-{wants.index(after)}-{killed_at}")
                self.state = tmp_path / f"state-{wants.index(after)}-{killed_at}"
                self.state.mkdir()
                brought(self.make(), before)
                self.tree.killed_at = self.tree.changes + killed_at
                try:
                    brought(self.make(), after)
                except Killed:
                    self.tree.killed_at = None
                    brought(self.make(), after)
                    brought(self.make(), NOTHING)
                    assert self.tree.shown() == []
                else:
                    assert killed_at > 3
                    break

    def test_no_unwanted_host_is_admitted_during_changes(self, want: WantedExports) -> None:
        brought(self.make(), replace(want, hosts={}))
        exporter = self.make()
        steps = plan(want, exporter.observe(want.hosts))
        assert isinstance(steps[0], RequireAllowList)
        for step in steps:
            exporter.apply(step)
            assert not exporter.observe(want.hosts).allows_any_host

    def test_unfinished_namespace_is_replaced(self, want: WantedExports, drives: list[Export]) -> None:
        brought(self.make(), want)
        at = f"subsystems/{NQN}/namespaces/7"
        self.tree.mkdir(at)
        self.tree.write(f"{at}/device_nguid", drives[2].nguid)
        have = brought(self.make(), replace(want, drives=frozenset(drives)))
        assert {each.slot for each in have.namespaces} == {1, 2, 3}

    def test_denied_host_keeps_its_connections(self) -> None:
        assert "stay until the host disconnects" in str(DenyHost(ALICE))


class TestTcp(ExporterContract):
    secrets = others = HostSecrets()

    @pytest.fixture(autouse=True)
    def place(self) -> Iterator[None]:
        self.controllers = (free_controller(), free_controller())
        self.server = TargetServer(Subsystem(NQN))
        yield
        self.server.close()

    def make(self) -> TcpExporter:
        return TcpExporter(self.server)

    @pytest.mark.parametrize("secret", [SECRET, OTHER])
    def test_changed_secret_is_repaired(self, want: WantedExports, secret: str) -> None:
        brought(self.make(), want)
        with pytest.raises(ExportError, match="has no DH-HMAC-CHAP: list the host without"):
            self.make().apply(AllowHost(ALICE, HostSecrets(secret)))
        assert self.make().observe({}).hosts == {ALICE}

    def test_namespace_number_is_never_used_twice(self, want: WantedExports, drives: list[Export]) -> None:
        before = brought(self.make(), want)
        brought(self.make(), replace(want, drives=frozenset()))
        after = brought(self.make(), want)
        numbers = [{each.slot for each in have.namespaces} for have in (before, after)]
        assert numbers == [{1, 2}, {3, 4}], "a host could take one drive for another"

    def test_address_in_use_is_reported(self, want: WantedExports) -> None:
        brought(self.make(), want)
        other = TargetServer(Subsystem(NQN))
        with pytest.raises(ExportError, match="the address is in use"):
            TcpExporter(other).apply(AddListener(self.controllers[0]))
        other.close()

    def test_host_name_means_every_address(self, want: WantedExports) -> None:
        named = Controller(TargetTransport.TCP, "shelf-0.enclosures", self.controllers[0].service)
        have = brought(self.make(), replace(want, controllers=(named,)))
        assert have.controllers == {named}
        socket.create_connection(("127.0.0.1", named.service), 5).close()

    def test_rdma_is_refused(self) -> None:
        with pytest.raises(ExportError, match="set target to nvmet"):
            self.make().apply(AddListener(RDMA))


def test_both_start_empty(tmp_path: Path) -> None:
    exporter: Exporter = FileExporter(tmp_path, NQN)
    assert exporter.observe({}) == PresentExports()
    with pytest.raises(ExportError, match="is gone"):
        exporter.apply(AddNamespace(Export("1" * 32, str(tmp_path / "drive-0.img"))))
