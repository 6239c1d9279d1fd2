"""Requests to Linux's NVMe-oF host, each in a separate process.

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
from pathlib import Path
from typing import Any, Protocol

from ostraca_dpu_agent.adapters.nvme_of import nvme_request
from ostraca_dpu_agent.adapters.nvme_of.timeouts import ASK_S
from ostraca_fabric.errors import OstracaError

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
