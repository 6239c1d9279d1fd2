"""How the kernel is asked, on files and devices that are not NVMe's and behave as it does in one respect."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop

from ostraca_dpu_agent.adapters.nvme_of import kernel as nvme_kernel
from ostraca_dpu_agent.adapters.nvme_of import nvme_request
from ostraca_dpu_agent.adapters.nvme_of.kernel import FABRICS, KernelError, LinuxKernel

OPTIONS = "transport=tcp,traddr=192.0.2.1,dhchap_secret=DHHC-1:00:abcd:"


class Terminal:
    """A character device that is written to and then read, as ``/dev/nvme-fabrics`` is: a terminal."""

    def __init__(self, dev: Path, answer: str) -> None:
        self.read = b""
        self._fd, self._theirs = os.openpty()
        tty.setraw(self._theirs)
        (dev / FABRICS).symlink_to(os.ttyname(self._theirs))
        self._answer = answer.encode()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        self.read = os.read(self._fd, 4096)
        os.write(self._fd, self._answer)

    def close(self) -> None:
        self._thread.join()
        os.close(self._fd)
        os.close(self._theirs)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    made = Terminal(tmp_path, "instance=3,cntlid=1\n")
    yield made
    made.close()


async def test_controller_is_created_by_options_and_named_by_number(
    tmp_path: Path, terminal: Terminal
) -> None:
    assert await LinuxKernel(tmp_path).connect(OPTIONS, 20) == "nvme3"
    assert terminal.read == OPTIONS.encode()


async def test_a_secret_is_in_no_argument_of_any_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FABRICS)
    holder = os.open(tmp_path / FABRICS, os.O_RDWR)
    os.set_blocking(holder, False)
    try:
        os.write(holder, b"x" * (1 << 16))  # full: who writes to it waits
        asked = asyncio.create_task(LinuxKernel(tmp_path).connect(OPTIONS, 20))
        seen = await asyncio.to_thread(_shown_of_the_child_that_has, str(tmp_path / FABRICS))
        assert b"nvme_request" in seen
        assert b"DHHC" not in seen
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert _children() == []
    finally:
        os.close(holder)


async def test_kernel_log_is_reported_after_a_timeout(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FABRICS)
    holder = os.open(tmp_path / FABRICS, os.O_RDWR)
    os.set_blocking(holder, False)
    try:
        os.write(holder, b"x" * (1 << 16))  # full: who writes to it waits
        log = tmp_path / "kmsg"
        log.write_text("3,811,50,-;nvme nvme0: long ago\n")
        asked = asyncio.create_task(LinuxKernel(tmp_path).connect(OPTIONS, 0.3))
        await asyncio.sleep(0)
        log.write_text(log.read_text() + "3,812,51,-;nvme nvme1: qid 0: authenticated\n")
        with pytest.raises(KernelError) as caught:
            await asked
    finally:
        os.close(holder)
    said = ("nvme nvme1: qid 0: authenticated",)
    assert (caught.value.code, caught.value.during, caught.value.log) == (errno.ETIME, "connect", said)
    assert str(log) not in _files(os.getpid())


async def test_kernel_refusal_returns_its_error(tmp_path: Path) -> None:
    (tmp_path / FABRICS).symlink_to("/dev/full")
    with pytest.raises(KernelError) as caught:
        await LinuxKernel(tmp_path).connect(OPTIONS, 20)
    assert (caught.value.code, caught.value.during, caught.value.log) == (errno.ENOSPC, "connect", ())


@pytest.mark.parametrize(
    ("record", "lines"),
    [
        (
            "3,812,51,-;nvme nvme0: Connect command failed\n SUBSYSTEM=nvme\n",
            ["nvme nvme0: Connect command failed"],
        ),
        ("4,813,52,-;nvme_fabrics: Invalid DH-CHAP secret DHHC-1:00:abcd:\n", []),
        ("4,814,53,-;usb 1-1: reset\n", []),
    ],
    ids=["nvme", "secret", "other"],
)
def test_only_new_nvme_lines_are_read_and_no_secret(tmp_path: Path, record: str, lines: list[str]) -> None:
    log = tmp_path / "kmsg"
    log.write_text("3,811,50,-;nvme nvme0: long ago\n")
    said = nvme_request.KernelLog(str(log))
    log.write_text(log.read_text() + record)
    assert said.lines() == lines


def test_unreadable_log_is_empty(tmp_path: Path) -> None:
    assert nvme_request.KernelLog(str(tmp_path / "kmsg")).lines() == []


async def test_missing_device_differs_from_a_refusal(tmp_path: Path) -> None:
    kernel = LinuxKernel(tmp_path)
    for ask in (kernel.connect(OPTIONS, 20), kernel.options(), kernel.active("nvme0")):
        with pytest.raises(KernelError) as caught:
            await ask
        assert (caught.value.code, caught.value.during) == (errno.ENOENT, "open")


async def test_supported_options_are_read(tmp_path: Path) -> None:
    (tmp_path / FABRICS).write_text("instance=-1,cntlid=-1,transport=%s,duplicate_connect,dhchap_secret=%s\n")
    assert await LinuxKernel(tmp_path).options() >= {"transport", "duplicate_connect", "dhchap_secret"}


async def test_unanswered_query_ends_at_its_time_limit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FABRICS)  # opened to read and write, it waits for somebody's words
    began_s = time.monotonic()
    with pytest.raises(KernelError) as caught:
        await LinuxKernel(tmp_path, ask_s=0.3).options()
    assert (caught.value.code, caught.value.during) == (errno.ETIME, "options")
    assert time.monotonic() - began_s < 5


def test_process_death_before_the_request_is_a_kernel_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvme_kernel, "sys", SimpleNamespace(executable="/bin/false"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for _ in range(40):  # whether its pipe has gone by then is a matter of luck
            with pytest.raises(KernelError) as caught:
                runner.run(LinuxKernel(tmp_path).options())
            assert (caught.value.code, caught.value.during) == (errno.EIO, "options")


async def test_an_attribute_is_written(tmp_path: Path) -> None:
    attribute = tmp_path / "fast_io_fail_tmo"
    attribute.write_text("off\n")
    await LinuxKernel(tmp_path).write(attribute, "15", 20)
    assert attribute.read_text().startswith("15")


async def test_hanging_request_is_abandoned_without_a_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "delete_controller")  # opening it to write waits for a reader
    with pytest.raises(KernelError) as caught:
        await LinuxKernel(tmp_path).write(tmp_path / "delete_controller", "1", 0.3)
    assert caught.value.code == errno.ETIME
    assert _children() == []


async def test_other_device_has_no_namespaces(tmp_path: Path) -> None:
    (tmp_path / "nvme0").symlink_to("/dev/null")
    with pytest.raises(KernelError) as caught:
        await LinuxKernel(tmp_path).active("nvme0")
    assert caught.value.code == errno.ENOTTY


def _children() -> list[int]:
    """Return this process's children that run a request."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread may end before its children are read, and so may a child
            children = (task / "children").read_text().split()
            found += [
                int(child)
                for child in children
                if b"nvme_request" in Path(f"/proc/{child}/cmdline").read_bytes()
            ]
    return found


def _shown_of_the_child_that_has(file: str) -> bytes:
    """Return what everybody can read of the child that has opened a file, once there is one."""
    while True:
        for child in _children():
            if file in _files(child):
                shown = Path(f"/proc/{child}")
                return (shown / "cmdline").read_bytes() + (shown / "environ").read_bytes()
        time.sleep(0.01)


def _files(process: int) -> list[str]:
    try:
        return [str(each.readlink()) for each in Path(f"/proc/{process}/fd").iterdir()]
    except OSError:
        return []
