"""Certificates made when a test runs, by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ostraca_fabric.tls import TlsFiles


class Authority:
    """A CA in a directory of its own."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        if shutil.which("openssl") is None:
            pytest.skip("the openssl program is not installed: certificates can't be made")
        self._directory = directory
        self._name = name
        self.cert = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        self._new_key(self._key)
        _openssl(
            *("req", "-x509", "-new", "-key", self._key, "-subj", f"/CN={name}", "-days", "2"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
            *("-out", self.cert),
        )

    def files(self, name: str, *names: str, ca: Path | None = None, days: int = 2) -> TlsFiles:
        """Make a certificate whose subject is *name*, for these hosts or addresses, and its key.

        With *days* below zero it has expired.
        """
        key, request, cert = (self._directory / f"{self._name}-{name}.{end}" for end in ("key", "csr", "pem"))
        extensions = self._directory / f"{self._name}-{name}.ext"
        self._new_key(key)
        listed = ",".join(f"IP:{each}" if each[0].isdigit() else f"DNS:{each}" for each in (*names, name))
        extensions.write_text(f"subjectAltName={listed}\n")
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", str(days), "-extfile", extensions, "-out", cert),
        )
        return TlsFiles(ca or self.cert, cert, key)

    def _new_key(self, path: Path) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
