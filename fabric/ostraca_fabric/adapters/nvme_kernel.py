"""What Linux's NVMe-oF host is asked to do, each in a process that may be given up (``nvme_request``).

No ``nvme-cli``: it would do the same through the same files, takes secrets as arguments, which everybody on
the host can read while it runs, and says less of why a controller refused.
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

from ostraca_fabric.adapters import nvme_request
from ostraca_fabric.adapters.nvme_timeouts import ASK_S
from ostraca_fabric.errors import OstracaError

FABRICS = "nvme-fabrics"
_GRACE_S = 1.0


class KernelError(OstracaError):
    """The kernel did not do it."""

    def __init__(self, code: int, during: str, log: tuple[str, ...] = ()) -> None:
        super().__init__(f"{during}: {os.strerror(code)}")
        self.code = code
        """As in ``errno``; ETIME where it has not ended in time."""

        self.during = during
        """``open``: the device or attribute could not be opened at all."""

        self.log = log
        """What it said of NVMe meanwhile, where this process may know."""

    def without(self, controllers: frozenset[str]) -> KernelError:
        """Return the same without what was said of other controllers, which try to come back meanwhile."""
        log = tuple(
            line for line in self.log if line.removeprefix("nvme ").partition(":")[0] not in controllers
        )
        return KernelError(self.code, self.during, log)


class Kernel(Protocol):
    """What ``NvmePaths`` needs done. Every method raises KernelError, ETIME past its time."""

    async def options(self) -> frozenset[str]:
        """Return the options that controllers can be made with; none where it does not say."""

    async def connect(self, options: str, within_s: float) -> str:
        """Make a controller, and return its name, as ``nvme0``. Ended in time or not, it may be there."""

    async def active(self, controller: str) -> int:
        """Return how many namespaces a controller has."""

    async def write(self, attribute: Path, text: str, within_s: float) -> None:
        """Write to an attribute."""


class LinuxKernel:
    """The kernel that this process runs on."""

    def __init__(self, dev: Path = Path("/dev"), ask_s: float = ASK_S) -> None:
        """Use its devices in *dev*; a question may take *ask_s*."""
        self._dev = dev
        self._ask_s = ask_s

    async def options(self) -> frozenset[str]:
        """See ``Kernel``."""
        answer = await asked(self._ask_s, do="options", fabrics=str(self._dev / FABRICS))
        return frozenset(answer["options"])

    async def connect(self, options: str, within_s: float) -> str:
        """See ``Kernel``."""
        log = self._dev / "kmsg"
        said = nvme_request.Log(str(log))
        try:
            answer = await asked(
                within_s, do="connect", fabrics=str(self._dev / FABRICS), log=str(log), options=options
            )
        except KernelError as error:
            if error.code == errno.ETIME:  # who was given up tells nothing
                raise KernelError(error.code, error.during, tuple(said.lines())) from error
            raise
        finally:
            said.close()
        return f"nvme{answer['instance']}"

    async def active(self, controller: str) -> int:
        """See ``Kernel``."""
        answer = await asked(self._ask_s, do="active", device=str(self._dev / controller))
        return int(answer["active"])

    async def write(self, attribute: Path, text: str, within_s: float) -> None:
        """See ``Kernel``."""
        await asked(within_s, do="write", path=str(attribute), text=text)


async def asked(within_s: float, **request: str) -> dict[str, Any]:
    """Put a request to the kernel by a process of its own. Raises KernelError, ETIME past its time."""
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
    except RuntimeError as error:  # uvloop's, where the process has died before it was told what to ask
        raise KernelError(errno.EIO, request["do"]) from error
    finally:
        await _given_up(process)
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError as error:
        raise KernelError(errno.EIO, request["do"]) from error
    if "errno" in answer:
        raise KernelError(answer["errno"], answer["during"], tuple(answer["log"]))
    return answer


async def _given_up(process: asyncio.subprocess.Process) -> None:
    """End it. One that waits in the kernel ends when that does; nobody waits for it."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.kill()
        with suppress(TimeoutError):
            async with asyncio.timeout(_GRACE_S):
                await process.wait()
