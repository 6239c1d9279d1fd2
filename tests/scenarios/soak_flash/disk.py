"""A file system that loses at a power cut what was not flushed.

It is ext4 in a file, on a loop device. The kernel's shutdown ioctl ends it as a power cut does: nothing more
reaches the image, not even the journal; mounted again, it replays what the journal had. What is lost depends
on how it is mounted:

- ``journal``: data go through the journal, and O_DIRECT through the page cache, so everything since the last
  flush is lost.
- ``ordered``: ext4's default. O_DIRECT overwrites stay, and first writes to a place are lost, as its metadata
  is: later writes may outlive earlier ones.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import subprocess
import time
from pathlib import Path
from typing import Self

MODES = ("journal", "ordered")

_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_COMMIT_EVERY_S = 300
"""The journal is not written out for its own sake while a life lasts."""

_JOURNAL_MIB = 64
_CLOSED_S = 30.0
_POLL_S = 0.01


class DiskError(Exception):
    """The machine does not let us."""


class PowerCutDisk:
    """One image, mounted. Use it as a context manager; it needs root and a loop device."""

    def __init__(self, directory: Path, *, size_bytes: int, mode: str) -> None:
        self._image = directory / "disk.img"
        self.mount_point = directory / "disk"
        self._size_bytes = size_bytes
        self._mode = mode

    def __enter__(self) -> Self:
        """Make and mount it. Raises DiskError, and leaves nothing then."""
        try:
            return self._made()
        except DiskError:
            self.remove()
            raise

    def _made(self) -> Self:
        self.mount_point.mkdir()
        with self._image.open("wb") as image:
            os.truncate(image.fileno(), self._size_bytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-J", f"size={_JOURNAL_MIB}", str(self._image))
        self._mount()
        return self

    def __exit__(self, *_: object) -> None:
        """Unmount it; the image stays for who wants to look."""
        with contextlib.suppress(DiskError):
            _run("umount", "--lazy", str(self.mount_point))

    def remove(self) -> None:
        """Remove the image of a disk that is not mounted."""
        self._image.unlink()
        self.mount_point.rmdir()

    def cut(self) -> None:
        """Cut the power. Whoever still writes gets EIO; end them, then ``mount_again``."""
        directory = os.open(self.mount_point, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        except OSError as error:
            message = f"the file system does not take the shutdown ioctl: {error.strerror}"
            raise DiskError(message) from error
        finally:
            os.close(directory)

    def mount_again(self) -> None:
        """Come back after a cut, when no process has a file open.

        The kernel closes files of a killed process's asynchronous reads and writes shortly after its end.
        """
        until_s = time.monotonic() + _CLOSED_S
        while True:
            try:
                _run("umount", str(self.mount_point))
            except DiskError as error:
                if "busy" not in str(error) or time.monotonic() > until_s:
                    raise
                time.sleep(_POLL_S)
            else:
                break
        self._mount()

    def _mount(self) -> None:
        options = f"loop,data={self._mode},commit={_COMMIT_EVERY_S}"
        _run("mount", "-t", "ext4", "-o", options, str(self._image), str(self.mount_point))


def why_no_power_cut(directory: Path) -> str | None:
    """Try it in *directory*, which must be empty; return why it does not work here, or None."""
    if os.geteuid() != 0:
        return "mounting needs root"
    for tool in ("mkfs.ext4", "mount", "umount"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    try:
        with PowerCutDisk(directory, size_bytes=4 * _JOURNAL_MIB << 20, mode=MODES[0]) as disk:
            disk.cut()
            disk.mount_again()
        disk.remove()
    except DiskError as error:
        return str(error)
    return None


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = f"{' '.join(command)}: {done.stderr.strip()}"
        raise DiskError(message)
