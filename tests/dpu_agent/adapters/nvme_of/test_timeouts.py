"""How late a path may deliver a write, and why a controller was refused."""

from __future__ import annotations

import errno

import pytest

from ostraca_admin.agent_queries import QuerySettings
from ostraca_dpu_agent.adapters.nvme_of.kernel import (
    ADMIN_TIMEOUT_DEFAULT_S,
    KernelError,
    PathSettings,
    excessive_delay,
    latest_s,
)
from ostraca_dpu_agent.adapters.nvme_of.refusals import furthest_error, refusal
from ostraca_fabric.model.target import Controller, TargetTransport
from ostraca_fabric.ports.paths import PathError, Stage

RDMA = Controller(TargetTransport.RDMA, "192.0.2.1", 4420)
NQN = "nqn.2025-01.io.ostraca:shelf-1"
HOST = "nqn.2025-01.io.ostraca:host-1"


def test_longest_delay_of_a_write_is_the_sum_of_three_phases() -> None:
    assert latest_s(io_timeout_s=30, keep_alive_s=5, fast_io_fail_s=15) == 55


def test_the_defaults_of_paths_fit_the_defaults_of_agents_and_of_linux() -> None:
    settings = PathSettings()
    assert not excessive_delay(
        settings,
        io_timeout_s=30,
        keep_alive_s=settings.keep_alive_s,
        fast_io_fail_s=settings.fast_io_fail_s,
    )


@pytest.mark.parametrize(
    ("io_timeout_s", "keep_alive_s", "fast_io_fail_s", "is_fit"),
    [(30, 5, 20, True), (30, 5, 21, False), (31, 5, 20, False), (30, 6, 20, False), (30, 5, None, False)],
)
def test_path_is_fit_up_to_late_write(
    *, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float | None, is_fit: bool
) -> None:
    said = excessive_delay(
        PathSettings(late_write_s=120, pause_max_s=60),
        io_timeout_s=io_timeout_s,
        keep_alive_s=keep_alive_s,
        fast_io_fail_s=fast_io_fail_s,
    )
    assert (said == "") is is_fit


@pytest.mark.parametrize(
    ("code", "log", "stage", "says"),
    [
        (errno.ECONNREFUSED, "nvme nvme0: failed to connect socket: -111", Stage.REACH, "connection refused"),
        (
            errno.ECONNRESET,
            "nvme nvme0: rdma connection establishment failed (-104)",
            Stage.REACH,
            "connection reset",
        ),
        (errno.ETIMEDOUT, "", Stage.REACH, "no answer"),
        (errno.ENODEV, "", Stage.REACH, "no device of this host"),
        (
            errno.EIO,
            f"nvme nvme0: Connect for subsystem {NQN} is not allowed, hostnqn: {HOST}",
            Stage.AUTHENTICATE,
            "rejects this host: add",
        ),
        (
            errno.EIO,
            f'nvme nvme0: Connect Invalid Data Parameter, hostnqn "{HOST}"',
            Stage.AUTHENTICATE,
            "rejects this host: add",
        ),
        (
            errno.EIO,
            f'nvme nvme0: Connect Invalid Data Parameter, subsysnqn "{NQN}"',
            Stage.IDENTIFY,
            "check the name, --nqn and the controllers",
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
            "no further hosts",
        ),
        (errno.EIO, "nvme nvme0: something new", Stage.AUTHENTICATE, "kernel log: nvme nvme0: something new"),
        (errno.EINVAL, "nvme_fabrics: found same hostid but different hostnqn", Stage.FIT, "same hostid"),
        (errno.ENOMEM, "", Stage.FIT, "ENOMEM"),
    ],
)
def test_kernel_messages_map_to_stages(code: int, log: str, stage: Stage, says: str) -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(code, "connect", (log,) if log else ()), has_secret=True)
    assert (told.stage, str(RDMA) in str(told), says in str(told)) == (stage, True, True)


def test_missing_permission_is_reported() -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(errno.EACCES, "open"), has_secret=False)
    assert (told.stage, "root" in str(told)) == (Stage.FIT, True)


def test_time_limits_exceed_a_slow_refusal() -> None:
    settings = PathSettings()
    assert settings.connect_s > ADMIN_TIMEOUT_DEFAULT_S
    assert QuerySettings().look_s >= settings.ask_s + settings.connect_s + settings.attach_s


def test_overloaded_host_does_not_blame_the_enclosure() -> None:
    told = refusal(RDMA, NQN, HOST, KernelError(errno.ETIME, "options"), has_secret=True)
    assert (told.stage, "load of this host" in str(told)) == (Stage.FIT, True)


def test_furthest_error_comes_first_and_no_error_is_lost() -> None:
    told = furthest_error(
        [PathError(Stage.REACH, "a"), PathError(Stage.AUTHENTICATE, "b"), PathError(Stage.REACH, "a")]
    )
    assert (told.stage, str(told)) == (Stage.AUTHENTICATE, "b; a")
