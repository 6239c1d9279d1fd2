"""Linux's NVMe-oF host: its timeouts, and requests in a separate process each.

A blocked process can be abandoned (``nvme_request``). ``nvme-cli`` is not used: it works through the same
files, but takes secrets as arguments, readable by every user of the host at run time. It also reports
fewer reasons for a refusal.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ostraca_dpu_agent.adapters.nvme_of import nvme_request
from ostraca_fabric.errors import OstracaError

IO_TIMEOUT_DEFAULT_S = 30.0
"""``nvme_core.io_timeout`` of Linux."""

KEEP_ALIVE_DEFAULT_S = 5.0
"""``keep_alive_tmo`` of Linux."""

ADMIN_TIMEOUT_DEFAULT_S = 60.0
"""``nvme_core.admin_timeout`` of Linux."""

RETRIES_DEFAULT = 5
"""``nvme_core.max_retries`` of Linux."""

ASK_S = 15.0
"""``PathSettings.ask_s``."""


@dataclass(frozen=True, slots=True)
class PathSettings:
    """Parameters of NVMe-oF paths, and time limits of the host.

    ``late_write_s`` bounds the time between an operation's end and its last write on a drive. ``pause_max_s``
    of this time is for a suspended agent, and the rest for the path. A path delays a write in three phases,
    in sequence:

    - *sent, and not answered*: the command and its connection are given up after ``nvme_core.io_timeout``;
    - *loss not yet detected*: a keep-alive is sent every ``keep_alive_tmo`` and awaited for as long again;
      an enclosure keeps data from a vanished host for about as long;
    - *waiting for reconnection*: commands wait for a path known to be lost, and are sent after its return.
      ``fast_io_fail_tmo`` ends this phase. Without it, which is the default, ``ctrl_loss_tmo`` does: ten
      minutes by default, or never.
    """

    late_write_s: float = 120.0
    """Setting ``late_write_s`` of the agent."""

    pause_max_s: float = 60.0
    """Setting ``pause_max_s`` of the agent."""

    io_queues: int = 2
    """I/O queues to each controller. Every queue is a connection, and memory, at both ends: 288 hosts with
    two queues and the admin queue to each of 36 enclosures have 31 thousand. Raise the number in small
    installations where one queue's processor is the bottleneck."""

    keep_alive_s: int = 5
    """Interval of keep-alives. Raise the interval if enclosures with many hosts lose paths without a
    cause."""

    reconnect_delay_s: int = 2
    """Interval of attempts to reconnect a lost path."""

    fast_io_fail_s: int = 15
    """Time that I/O waits for the only path after its loss. Gets are misses by then; a longer wait helps only
    writes, and delays them."""

    connect_s: float = ADMIN_TIMEOUT_DEFAULT_S + 15.0
    """Time limit for the connection of a controller. An absent controller takes about three seconds over TCP.
    Linux may learn of a refused secret only after its ``nvme_core.admin_timeout``, over RDMA after six of
    these timeouts. The error for an abandoned attempt depends on its progress: whether the other end accepted
    the connection."""

    ask_s: float = ASK_S
    """Time limit of a query to this host's kernel, with the start of the querying process: seconds on an
    overloaded host."""

    attach_s: float = 5.0
    """Wait for the names of drives after the connection of a controller."""

    remove_s: float = 30.0
    """Time limit for the removal of a path."""

    resolve_s: float = 5.0
    """Time limit for the resolution of a controller's name."""


def latest_s(*, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float) -> float:
    """Return the longest time until a path has delivered or dropped a write."""
    return io_timeout_s + 2 * keep_alive_s + fast_io_fail_s


def excessive_delay(
    settings: PathSettings, *, io_timeout_s: float, keep_alive_s: float, fast_io_fail_s: float | None
) -> str:
    """Return why a path exceeds ``late_write_s``; empty if the path does not.

    *fast_io_fail_s* is None where it is off.
    """
    allowed_s = settings.late_write_s - settings.pause_max_s
    if fast_io_fail_s is None:
        return "fast_io_fail_tmo is off, so writes wait as long as the path is lost"
    delay_s = latest_s(io_timeout_s=io_timeout_s, keep_alive_s=keep_alive_s, fast_io_fail_s=fast_io_fail_s)
    if delay_s <= allowed_s:
        return ""
    return (
        f"a write may arrive {delay_s:g} s late (io_timeout {io_timeout_s:g} s, twice the keep-alive of "
        f"{keep_alive_s:g} s, fast_io_fail_tmo {fast_io_fail_s:g} s), and late_write_s minus pause_max_s "
        f"allows {allowed_s:g} s"
    )


FABRICS = "nvme-fabrics"
_GRACE_S = 1.0


class KernelError(OstracaError):
    """A request that the kernel did not fulfil."""

    def __init__(self, code: int, during: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(f"{during}: {os.strerror(code)}")
        self.code = code
        """Code as in ``errno``; ETIME after a timeout."""

        self.during = during
        """Failed step; ``open`` if the device or attribute could not be opened at all."""

        self.log = log
        """NVMe lines of the kernel log meanwhile, if this process may read the log."""

    def without(self, controllers: frozenset[str]) -> KernelError:
        """Return the error without log lines of other controllers.

        Those controllers may reconnect at the same time.
        """
        log = tuple(
            line for line in self.log if line.removeprefix("nvme ").partition(":")[0] not in controllers
        )
        return KernelError(self.code, self.during, log)


class Kernel(Protocol):
    """Kernel calls of ``NvmePaths``.

    Every method raises KernelError, with ETIME after a timeout.
    """

    async def options(self) -> frozenset[str]:
        """Return the options of new controllers; empty if the kernel lists none."""

    async def connect(self, options: str, within_s: float) -> str:
        """Make a controller, and return its name, as ``nvme0``.

        Even after a timeout, the controller may exist.
        """

    async def active(self, controller: str) -> int:
        """Return the number of a controller's namespaces."""

    async def write(self, attribute: Path, text: str, within_s: float) -> None:
        """Write to an attribute."""


class LinuxKernel:
    """The kernel of this host."""

    def __init__(self, dev: Path = Path("/dev"), ask_s: float = ASK_S) -> None:
        """Use the devices in *dev*; a query may take *ask_s*."""
        self._dev = dev
        self._ask_s = ask_s

    async def options(self) -> frozenset[str]:
        """Return options as ``Kernel`` specifies."""
        answer = await ask_kernel(self._ask_s, do="options", fabrics=str(self._dev / FABRICS))
        return frozenset(answer["options"])

    async def connect(self, options: str, within_s: float) -> str:
        """Connect as ``Kernel`` specifies."""
        log = self._dev / "kmsg"
        kernel_log = nvme_request.KernelLog(str(log))
        try:
            answer = await ask_kernel(
                within_s, do="connect", fabrics=str(self._dev / FABRICS), log=str(log), options=options
            )
        except KernelError as error:
            if error.code == errno.ETIME:  # an abandoned process returns no log
                raise KernelError(error.code, error.during, tuple(kernel_log.lines())) from error
            raise
        finally:
            kernel_log.close()
        return f"nvme{answer['instance']}"

    async def active(self, controller: str) -> int:
        """Return the number of namespaces as ``Kernel`` specifies."""
        answer = await ask_kernel(self._ask_s, do="active", device=str(self._dev / controller))
        return int(answer["active"])

    async def write(self, attribute: Path, text: str, within_s: float) -> None:
        """Write as ``Kernel`` specifies."""
        await ask_kernel(within_s, do="write", path=str(attribute), text=text)


async def ask_kernel(within_s: float, **request: str) -> dict[str, Any]:
    """Send a request to the kernel from a separate process.

    Raises KernelError, with ETIME after a timeout.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-I",
        "-S",
        nvme_request.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(within_s):
            output, _ = await process.communicate(json.dumps(request).encode())
    except TimeoutError:
        raise KernelError(errno.ETIME, request["do"]) from None
    except RuntimeError as error:  # from uvloop, if the process died before reading the request
        raise KernelError(errno.EIO, request["do"]) from error
    finally:
        await _abandon(process)
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        raise KernelError(errno.EIO, request["do"]) from error
    if "errno" in answer:
        raise KernelError(answer["errno"], answer["during"], tuple(answer["log"]))
    return answer


async def _abandon(process: asyncio.subprocess.Process) -> None:
    """Kill the process; a process blocked in the kernel is left to end later."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
