"""What is NVMe-oF's own, over a simulated kernel."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.contract.paths.paths_contract import (
    DRIVE_BYTES,
    HOST,
    NGUIDS,
    NQN,
    OTHER_HOST,
    OTHER_NQN,
    OTHER_SECRET,
    SECRET,
    live,
    target,
)
from tests.contract.paths.shelves import HOST_ID, NvmeShelf
from tests.contract.paths.simulated_nvme import OPTIONS, SimulatedNvme, Subsystem

from ostraca_dpu_agent.adapters.nvme_of.kernel import LinuxKernel, PathSettings
from ostraca_dpu_agent.adapters.nvme_of.nvme_paths import NvmePaths
from ostraca_dpu_agent.adapters.nvme_of.sysfs import NvmeSysfs
from ostraca_fabric.errors import UsageError
from ostraca_fabric.model.target import Controller, Target, TargetTransport
from ostraca_fabric.ports.paths import PathError, Stage

BY_HAND = f"transport=tcp,traddr=192.0.2.1,trsvcid=4420,nqn={NQN},hostnqn={HOST},hostid={HOST_ID}"


@pytest.fixture
def shelf(tmp_path: Path) -> NvmeShelf:
    return NvmeShelf(tmp_path)


@pytest.fixture
def kernel(shelf: NvmeShelf) -> SimulatedNvme:
    return shelf.kernel


async def test_a_path_is_asked_for_with_few_queues_and_with_time_outs_that_bound_late_writes(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await shelf.paths(HOST).connect(target(shelf), "")
    time_outs = "keep_alive_tmo=5,reconnect_delay=2,ctrl_loss_tmo=-1,fast_io_fail_tmo=15"
    assert kernel.written == [f"{BY_HAND},nr_io_queues=2,{time_outs}"]


async def test_a_drive_is_one_device_however_many_paths_lead_to_it(shelf: NvmeShelf) -> None:
    shelf.add_path()
    found = await shelf.paths(HOST).connect(target(shelf, is_one=False), "")
    assert [(each.nguid, each.device, each.size_bytes, each.lba_bytes, each.model) for each in found] == [
        (NGUIDS[0], "/dev/nvme0n1", DRIVE_BYTES, 512, "Linux"),
        (NGUIDS[1], "/dev/nvme0n2", DRIVE_BYTES, 512, "Linux"),
    ]


async def test_what_an_earlier_process_connected_is_found_and_left_as_it_is(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    found = await shelf.paths(HOST).connect(target(shelf), "")
    later = shelf.paths(HOST)
    assert await later.namespaces(target(shelf)) == found
    assert live(await later.states(target(shelf))) == [True]
    assert await later.connect(target(shelf), "") == found
    assert len(kernel.written) == 1
    assert kernel.names() == ["nvme0"]


async def test_a_path_that_somebody_connected_by_hand_is_made_fit(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await kernel.connect(BY_HAND, 1)
    assert kernel.get("nvme0", "fast_io_fail_tmo") == "off"
    await shelf.paths(HOST).connect(target(shelf), "")
    assert kernel.names() == ["nvme0"]
    assert kernel.get("nvme0", "fast_io_fail_tmo") == "15"
    assert kernel.get("nvme0", "ctrl_loss_tmo") == "off"


async def test_a_path_whose_keep_alive_is_too_long_is_connected_anew(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await kernel.connect(f"{BY_HAND},keep_alive_tmo=30", 1)
    await shelf.paths(HOST).connect(target(shelf), "")
    assert kernel.names() == ["nvme1"]
    assert kernel.get("nvme1", "kato") == "5"


async def test_a_lost_path_that_holds_writes_back_is_ended_though_it_might_come_back(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await kernel.connect(BY_HAND, 1)
    kernel.lose(shelf.port)
    await shelf.paths(HOST).connect(target(shelf), "")
    assert kernel.names() == ["nvme1"]


async def test_a_path_to_a_controller_that_is_not_the_targets_any_more_is_made_fit_too(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    shelf.add_path()
    await kernel.connect(BY_HAND.replace("192.0.2.1,trsvcid=4420", "fd00::1,trsvcid=4421"), 1)
    await shelf.paths(HOST).connect(target(shelf), "")
    assert [kernel.get(name, "fast_io_fail_tmo") for name in kernel.names()] == ["15", "15"]
    await shelf.paths(HOST).disconnect(target(shelf))
    assert kernel.names() == []


async def test_drives_whose_commands_may_take_too_long_are_had_anew(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.io_timeout.write_text("300\n")
    await kernel.connect(BY_HAND, 1)
    kernel.io_timeout.write_text("30\n")
    await shelf.paths(HOST).connect(target(shelf), "")
    assert kernel.names() == ["nvme1"]


async def test_a_host_whose_commands_may_take_too_long_connects_nothing(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.io_timeout.write_text("4294967\n")
    with pytest.raises(PathError, match="io_timeout") as caught:
        await shelf.paths(HOST).connect(target(shelf), "")
    assert caught.value.stage is Stage.FIT
    assert kernel.written == []


async def test_a_path_under_another_hosts_name_is_refused_and_never_ended(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await kernel.connect(BY_HAND.replace(HOST, OTHER_HOST), 1)
    paths = shelf.paths(HOST)
    with pytest.raises(PathError, match=f"{OTHER_HOST}.*nvme disconnect -d nvme0") as caught:
        await paths.connect(target(shelf), "")
    assert caught.value.stage is Stage.FIT
    assert await paths.namespaces(target(shelf)) == ()
    await paths.disconnect(target(shelf))
    assert kernel.names() == ["nvme0"]


async def test_several_controllers_need_multipath_and_one_does_not(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.multipath.write_text("N\n")
    with pytest.raises(PathError, match="multipath=Y") as caught:
        await shelf.paths(HOST).connect(target(shelf, is_one=False), "")
    assert caught.value.stage is Stage.FIT
    found = await shelf.paths(HOST).connect(target(shelf), "")
    assert [(each.nguid, each.device) for each in found] == [
        (NGUIDS[0], "/dev/nvme0n1"),
        (NGUIDS[1], "/dev/nvme0n2"),
    ]


async def test_two_drives_of_one_nguid_are_nobodys(shelf: NvmeShelf) -> None:
    shelf.subsystem.namespaces = dict.fromkeys((1, 2), (f"nguid={NGUIDS[0]}", DRIVE_BYTES))
    with pytest.raises(PathError, match="/dev/nvme0n1, /dev/nvme0n2") as caught:
        await shelf.paths(HOST).connect(target(shelf), "")
    assert caught.value.stage is Stage.IDENTIFY


async def test_bytes_of_a_target_that_are_no_text_stop_nothing(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    await shelf.paths(HOST).connect(target(shelf), "")
    (serial,) = kernel.sysfs.glob("class/nvme-subsystem/*/serial")
    serial.write_bytes(b"\xffSN7\n")
    found = await shelf.paths(HOST).connect(target(shelf), "")
    assert [each.serial for each in found] == ["\ufffdSN7"] * 2


async def test_drives_without_identity_or_without_size_are_left_out(shelf: NvmeShelf) -> None:
    shelf.subsystem.namespaces = {
        1: (f"nguid={NGUIDS[0]}", 0),
        2: ("", DRIVE_BYTES),
        3: (f"nguid={'0' * 32}", DRIVE_BYTES),
        4: (f"nguid={NGUIDS[1]}", DRIVE_BYTES),
    }
    assert [each.nguid for each in await shelf.paths(HOST).connect(target(shelf), "")] == [NGUIDS[1]]


async def test_connecting_waits_until_the_drives_have_their_names(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.scan_s = 0.1
    paths = shelf.paths(HOST, PathSettings(attach_s=300))
    assert len(await paths.connect(target(shelf), "")) == len(NGUIDS)


async def test_drives_that_are_never_named_are_waited_for_a_while_only(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.scan_s = 3600
    paths = shelf.paths(HOST, PathSettings(attach_s=0.1))
    assert await paths.connect(target(shelf), "") == ()
    assert live(await paths.states(target(shelf))) == [True]


async def test_where_the_kernels_log_may_not_be_read_the_likely_reasons_are_told(tmp_path: Path) -> None:
    shelf = NvmeShelf(tmp_path)
    shelf.kernel.is_log_readable = False
    shelf.allow({OTHER_HOST: ""})
    with pytest.raises(PathError, match=f"rejects this host: add {HOST}.*secret.*{NQN}") as caught:
        await shelf.paths(HOST).connect(target(shelf), "")
    assert caught.value.stage is Stage.AUTHENTICATE


async def test_a_controller_that_never_answers_is_given_up_and_the_next_is_tried(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.silent.add(shelf.port)
    shelf.add_path()
    paths, both = shelf.paths(HOST), target(shelf, is_one=False)
    assert len(await paths.connect(both, "")) == len(NGUIDS)
    states = await paths.states(both)
    assert live(states) == [False, True]
    assert "no end in time" in states[0].detail


@pytest.mark.parametrize("is_log_readable", [True, False], ids=["log", "no log"])
async def test_a_secret_whose_refusal_never_arrives_is_told_as_one(
    tmp_path: Path, *, is_log_readable: bool
) -> None:
    shelf = NvmeShelf(tmp_path, TargetTransport.RDMA)
    shelf.kernel.is_log_readable = is_log_readable
    shelf.kernel.mute.add(shelf.port)
    shelf.allow({HOST: SECRET})
    with pytest.raises(PathError, match=rf"{HOST}.*configure the enclosure's secret") as caught:
        await shelf.paths(HOST).connect(target(shelf), OTHER_SECRET)
    assert caught.value.stage is Stage.AUTHENTICATE


async def test_a_host_that_asks_again_while_its_kernel_is_still_refused_is_told_the_same(
    tmp_path: Path,
) -> None:
    shelf = NvmeShelf(tmp_path, TargetTransport.RDMA)
    shelf.kernel.mute.add(shelf.port)
    shelf.allow({HOST: SECRET})
    paths = shelf.paths(HOST)
    told = []
    for _ in range(2):
        with pytest.raises(PathError) as caught:
            await paths.connect(target(shelf), OTHER_SECRET)
        told.append((caught.value.stage, str(caught.value)))
    assert told[0] == told[1]
    assert len(shelf.kernel.written) == 1
    shelf.kernel.end_begun()
    shelf.allow({HOST: OTHER_SECRET})
    assert len(await paths.connect(target(shelf), OTHER_SECRET)) == len(NGUIDS)


async def test_what_waits_behind_a_controller_that_is_still_refused_says_so_and_blames_nobody(
    tmp_path: Path,
) -> None:
    shelf = NvmeShelf(tmp_path, TargetTransport.RDMA)
    shelf.kernel.mute.add(shelf.port)
    shelf.allow({HOST: SECRET})
    paths = shelf.paths(HOST)
    with pytest.raises(PathError):
        await paths.connect(target(shelf), OTHER_SECRET)
    for asking in (paths, shelf.paths(HOST)):  # the second has not heard what this kernel can do
        with pytest.raises(PathError, match=r"busy with nvme0 for up to 360 s.*try again") as caught:
            await asking.connect(target(shelf), SECRET)
        assert caught.value.stage is Stage.REACH
    shelf.kernel.end_begun()
    assert len(await paths.connect(target(shelf), SECRET)) == len(NGUIDS)


@pytest.mark.parametrize("secret", ["", SECRET], ids=["no secret", "secret"])
async def test_an_enclosure_that_lets_a_host_in_and_answers_no_more_has_no_wrong_secret(
    shelf: NvmeShelf, kernel: SimulatedNvme, secret: str
) -> None:
    kernel.halting.add(shelf.port)
    shelf.allow({HOST: secret})
    with pytest.raises(PathError, match=r"accepted the connection.*fell silent") as caught:
        await shelf.paths(HOST).connect(target(shelf), secret)
    assert caught.value.stage is Stage.REACH


@pytest.mark.parametrize(
    ("address", "host"), [("192.0.2.9", HOST), ("192.0.2.1", OTHER_HOST)], ids=["elsewhere", "another host"]
)
async def test_what_somebody_else_connects_meanwhile_is_not_taken_for_ones_own(
    tmp_path: Path, address: str, host: str
) -> None:
    class Crowded(SimulatedNvme):
        async def connect(self, options: str, within_s: float) -> str:
            by_hand = {"transport": "tcp", "traddr": address, "trsvcid": "4420", "hostnqn": host}
            raise self._late("nvme7", by_hand)

    shelf = NvmeShelf(tmp_path / "shelf", kernel=Crowded(tmp_path / "host"))
    with pytest.raises(PathError, match="no end in time") as caught:
        await shelf.paths(HOST).connect(target(shelf), SECRET)
    assert caught.value.stage is Stage.REACH


async def test_a_lost_path_that_comes_back_holds_no_other_up(shelf: NvmeShelf, kernel: SimulatedNvme) -> None:
    kernel.ports["tcp", "192.0.2.2", "4420"] = [Subsystem(OTHER_NQN, {})]
    other = Target(OTHER_NQN, (Controller(TargetTransport.TCP, "192.0.2.2", 4420),))
    paths = shelf.paths(HOST)
    await paths.connect(other, "")
    kernel.lose(("tcp", "192.0.2.2", "4420"))
    kernel.silent.add(shelf.port)
    with pytest.raises(PathError, match="no end in time") as caught:
        await paths.connect(target(shelf), "")
    assert caught.value.stage is Stage.REACH


async def test_a_kernel_that_knows_no_secrets_is_never_shown_one(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.options_known = OPTIONS - {"dhchap_secret"}
    shelf.allow({HOST: SECRET})
    with pytest.raises(PathError, match="CONFIG_NVME_HOST_AUTH") as caught:
        await shelf.paths(HOST).connect(target(shelf), SECRET)
    assert caught.value.stage is Stage.FIT
    assert kernel.written == []


@pytest.mark.parametrize(
    "secret", ["x", "DHHC-1:00:a,b:", "DHHC-1:00:abcd:\n", f"{SECRET},hostnqn=x"], ids=range(4)
)
async def test_what_is_no_secret_of_nvme_is_never_shown_to_the_kernel(
    shelf: NvmeShelf, kernel: SimulatedNvme, secret: str
) -> None:
    with pytest.raises(PathError, match="gen-dhchap-key") as caught:
        await shelf.paths(HOST).connect(target(shelf), secret)
    assert caught.value.stage is Stage.AUTHENTICATE
    assert secret not in str(caught.value)
    assert kernel.written == []


async def test_a_path_that_was_lost_with_an_old_secret_is_connected_with_the_new_one(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    shelf.allow({HOST: SECRET})
    paths = shelf.paths(HOST)
    await paths.connect(target(shelf), SECRET)
    shelf.allow({HOST: OTHER_SECRET})
    await paths.connect(target(shelf), OTHER_SECRET)
    assert kernel.names() == ["nvme0"]
    kernel.lose(shelf.port)
    assert len(await paths.connect(target(shelf), OTHER_SECRET)) == len(NGUIDS)
    assert kernel.names() == ["nvme1"]


async def test_other_enclosures_at_the_same_controllers_are_left_alone(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.ports[shelf.port].append(Subsystem(OTHER_NQN, {1: (f"nguid={'77' * 16}", DRIVE_BYTES)}))
    paths = shelf.paths(HOST)
    await paths.connect(target(shelf), "")
    assert [each.nguid for each in await paths.connect(target(shelf, OTHER_NQN), "")] == ["77" * 16]
    await paths.disconnect(target(shelf))
    assert len(await paths.namespaces(target(shelf, OTHER_NQN))) == 1


async def test_a_controllers_name_stands_for_its_addresses(shelf: NvmeShelf, kernel: SimulatedNvme) -> None:
    kernel.ports["tcp", "127.0.0.1", "4420"] = kernel.ports["tcp", "::1", "4420"] = [shelf.subsystem]
    paths, named = shelf.paths(HOST), Target(NQN, (Controller(TargetTransport.TCP, "localhost", 4420),))
    for _ in range(2):
        assert len(await paths.connect(named, "")) == len(NGUIDS)
        assert live(await paths.states(named)) == [True]
    assert len(kernel.written) == 1
    name = "x" * 64  # longer than a label of a name may be: no resolver is asked
    nowhere = Target(NQN, (Controller(TargetTransport.TCP, name, 4420),))
    with pytest.raises(PathError, match=f"tcp://{name}:4420 can't be resolved") as caught:
        await paths.connect(nowhere, "")
    assert caught.value.stage is Stage.REACH
    assert live(await paths.states(nowhere)) == [False]


async def test_an_address_is_the_same_however_it_is_spelt(shelf: NvmeShelf, kernel: SimulatedNvme) -> None:
    shelf.add_path()
    kernel.ports["tcp", "FD00::0:1", "4421"] = [shelf.subsystem]
    await kernel.connect(BY_HAND.replace("192.0.2.1,trsvcid=4420", "FD00::0:1,trsvcid=4421"), 1)
    paths, second = shelf.paths(HOST), Target(NQN, shelf.controllers[1:])
    assert len(await paths.connect(second, "")) == len(NGUIDS)
    assert live(await paths.states(second)) == [True]
    assert kernel.names() == ["nvme0"]


async def test_a_path_to_one_address_is_none_to_another_of_the_same_port(shelf: NvmeShelf) -> None:
    elsewhere = Controller(TargetTransport.TCP, "192.0.2.2", 4420)
    paths, two = shelf.paths(HOST), Target(NQN, (shelf.controllers[0], elsewhere))
    await paths.connect(two, "")
    assert live(await paths.states(two)) == [True, False]


async def test_connecting_several_times_at_once_makes_one_path(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    paths = shelf.paths(HOST)
    found = await asyncio.gather(*(paths.connect(target(shelf), "") for _ in range(4)))
    assert {len(each) for each in found} == {len(NGUIDS)}
    assert len(kernel.written) == 1


async def test_a_path_that_somebody_makes_at_the_same_time_is_as_good(tmp_path: Path) -> None:
    class Overtaken(SimulatedNvme):
        async def connect(self, options: str, within_s: float) -> str:
            await super().connect(options, within_s)
            return await super().connect(options, within_s)

    shelf = NvmeShelf(tmp_path / "shelf", kernel=Overtaken(tmp_path / "host"))
    assert len(await shelf.paths(HOST).connect(target(shelf), "")) == len(NGUIDS)


async def test_what_the_log_says_of_other_controllers_meanwhile_is_not_taken_for_an_answer(
    shelf: NvmeShelf, kernel: SimulatedNvme
) -> None:
    kernel.ports[shelf.port].append(Subsystem(OTHER_NQN, {}))
    paths = shelf.paths(HOST)
    assert await paths.connect(target(shelf, OTHER_NQN), "") == ()
    kernel.noise = ("nvme nvme0: qid 0: authentication failed, error 16785",)
    del kernel.ports[shelf.port]
    with pytest.raises(PathError, match="connection refused") as caught:
        await paths.connect(target(shelf), "")
    assert caught.value.stage is Stage.REACH


async def test_a_host_without_nvme_over_fabrics_is_told_what_to_load(tmp_path: Path) -> None:
    paths = NvmePaths(HOST, HOST_ID, kernel=LinuxKernel(tmp_path), sysfs=NvmeSysfs(tmp_path))
    controller = Controller(TargetTransport.RDMA, "192.0.2.1", 4420)
    with pytest.raises(PathError, match="modprobe nvme-rdma") as caught:
        await paths.connect(Target(NQN, (controller,)), "")
    assert caught.value.stage is Stage.FIT
    with pytest.raises(PathError, match="modprobe nvme-rdma"):
        await paths.connect(Target(NQN, (controller,)), SECRET)
    assert await paths.namespaces(Target(NQN, (controller,))) == ()


def test_a_host_needs_a_uuid() -> None:
    with pytest.raises(UsageError, match="host id"):
        NvmePaths(HOST, "host-1")
