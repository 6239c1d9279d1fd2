"""How late a path may deliver a write, and why a controller was refused."""

from __future__ import annotations

import errno

import pytest

from ostraca_fabric.adapters.nvme_kernel import KernelError
from ostraca_fabric.adapters.nvme_refusals import refusal
from ostraca_fabric.adapters.nvme_timeouts import ADMIN_TIMEOUT_DEFAULT_S, PathSettings, latest_s, too_late
from ostraca_fabric.adapters.path_errors import furthest
from ostraca_fabric.admin.asking import AskSettings
from ostraca_fabric.ports.paths import PathError, Stage
from ostraca_fabric.target import Controller, Transport

RDMA = Controller(Transport.RDMA, "192.0.2.1", 4420)
NQN = "nqn.2025-01.io.ostraca:shelf-1"
HOST = "nqn.2025-01.io.ostraca:host-1"


def test_a_write_waits_for_its_answer_then_for_its_path_to_be_missed_and_then_for_it_to_come_back() -> None:
    assert latest_s(io_timeout_s=30, keep_alive_s=5, fast_io_fail_s=15) == 55


def test_the_defaults_of_paths_fit_the_defaults_of_agents_and_of_linux() -> None:
    settings = PathSettings()
    assert not too_late(
        settings,
        io_timeout_s=30,
        keep_alive_s=settings.keep_alive_s,
        fast_io_fail_s=settings.fast_io_fail_s,
    )


@pytest.mark.parametrize(
    ("io_timeout_s", "keep_alive_s", "fast_io_fail_s", "is_fit"),
    [(30, 5, 20, True), (30, 5, 21, False), (31, 5, 20, False), (30, 6, 20, False), (30, 5, None, False)],
)
def test_a_path_fits_up_to_what_late_write_leaves_it(
    *, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float | None, is_fit: bool
) -> None:
    said = too_late(
        PathSettings(late_write_s=120, pause_max_s=60),
        io_timeout_s=io_timeout_s,
        keep_alive_s=keep_alive_s,
        fast_io_fail_s=fast_io_fail_s,
    )
    assert (said == "") is is_fit


@pytest.mark.parametrize(
    ("code", "log", "stage", "says"),
    [
        (errno.ECONNREFUSED, "nvme nvme0: failed to connect socket: -111", Stage.REACH, "nothing listens"),
        (errno.ECONNRESET, "nvme nvme0: rdma connection establishment failed (-104)", Stage.REACH, "take"),
        (errno.ETIMEDOUT, "", Stage.REACH, "nothing answers"),
        (errno.ENODEV, "", Stage.REACH, "no device of this host"),
        (
            errno.EIO,
            f"nvme nvme0: Connect for subsystem {NQN} is not allowed, hostnqn: {HOST}",
            Stage.AUTHENTICATE,
            "allow-list",
        ),
        (
            errno.EIO,
            f'nvme nvme0: Connect Invalid Data Parameter, hostnqn "{HOST}"',
            Stage.AUTHENTICATE,
            "allow-list",
        ),
        (
            errno.EIO,
            f'nvme nvme0: Connect Invalid Data Parameter, subsysnqn "{NQN}"',
            Stage.IDENTIFY,
            "no subsystem",
        ),
        (
            errno.ECONNREFUSED,
            "nvme nvme0: qid 0: authentication failed, error -111",
            Stage.AUTHENTICATE,
            "this secret",
        ),
        (
            errno.EIO,
            "nvme nvme0: Connect command failed: authentication required",
            Stage.AUTHENTICATE,
            "secret",
        ),
        (errno.EKEYREJECTED, "", Stage.AUTHENTICATE, "this secret"),
        (
            errno.EIO,
            "nvme nvme0: Connect command failed: controller is busy or not available",
            Stage.REACH,
            "no room",
        ),
        (errno.EIO, "nvme nvme0: something new", Stage.AUTHENTICATE, "it says: nvme nvme0: something new"),
        (errno.EINVAL, "nvme_fabrics: found same hostid but different hostnqn", Stage.FIT, "same hostid"),
        (errno.ENOMEM, "", Stage.FIT, "ENOMEM"),
    ],
)
def test_what_the_kernel_says_tells_how_far_a_host_came(code: int, log: str, stage: Stage, says: str) -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(code, "connect", (log,) if log else ()), has_secret=True)
    assert (told.stage, str(RDMA) in str(told), says in str(told)) == (stage, True, True)


def test_a_process_that_may_not_ask_the_kernel_is_told_so() -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(errno.EACCES, "open"), has_secret=False)
    assert (told.stage, "root" in str(told)) == (Stage.FIT, True)


def test_a_refusal_that_the_kernel_is_slow_to_tell_is_waited_for_by_host_and_admin() -> None:
    settings = PathSettings()
    assert settings.connect_s > ADMIN_TIMEOUT_DEFAULT_S
    assert AskSettings().look_s >= settings.ask_s + settings.connect_s + settings.attach_s


def test_a_host_too_busy_to_ask_its_kernel_does_not_blame_the_enclosure() -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(errno.ETIME, "options"), has_secret=True)
    assert (told.stage, "too much to do" in str(told)) == (Stage.FIT, True)


def test_of_several_errors_the_furthest_is_told_first_and_none_is_lost() -> None:
    told = furthest(
        [PathError(Stage.REACH, "a"), PathError(Stage.AUTHENTICATE, "b"), PathError(Stage.REACH, "a")]
    )
    assert (told.stage, str(told)) == (Stage.AUTHENTICATE, "b; a")
