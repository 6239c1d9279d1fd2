"""Certificates made when a test runs, by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from ostraca_fabric.sockets.tls import TlsFiles


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

    def files(
        self, name: str, *names: str, ca: Path | None = None, days: int = 2, usage: str = ""
    ) -> TlsFiles:
        """Make a certificate whose subject is *name*, for these hosts or addresses, and its key.

        With *days* below zero it has expired. *usage* limits it, as in ``serverAuth``.
        """
        key, request, extensions = self._request(name, *names)
        if usage:
            extensions.write_text(f"{extensions.read_text()}extendedKeyUsage={usage}\n")
        cert = key.with_suffix(".pem")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", str(days), "-extfile", extensions, "-out", cert),
        )
        return TlsFiles(ca or self.cert, cert, key)

    def files_from(self, begins: datetime, name: str, *names: str) -> TlsFiles:
        """Make a certificate that is valid for a day from *begins* on, which may be to come."""
        key, request, extensions = self._request(name, *names)
        cert, settings, known = (key.with_suffix(end) for end in (".pem", ".cnf", ".known"))
        known.touch()
        settings.write_text(
            f"[ca]\ndefault_ca=it\n[it]\ndatabase={known}\nnew_certs_dir={self._directory}\n"
            f"serial={known}.serial\n"
            "default_md=sha256\npolicy=names\n[names]\ncommonName=supplied\n"
        )
        first, last = (f"{when:%Y%m%d%H%M%SZ}" for when in (begins, begins + timedelta(days=1)))
        _openssl(
            *("ca", "-batch", "-notext", "-create_serial", "-config", settings, "-cert", self.cert),
            *("-keyfile", self._key, "-startdate", first, "-enddate", last, "-extfile", extensions),
            *("-in", request, "-out", cert),
        )
        return TlsFiles(self.cert, cert, key)

    def _request(self, name: str, *names: str) -> tuple[Path, Path, Path]:
        """Make a key; return it, a request for its certificate, and what that is to say of hosts."""
        key, request, extensions = (
            self._directory / f"{self._name}-{name}.{end}" for end in ("key", "csr", "ext")
        )
        self._new_key(key)
        listed = ",".join(f"IP:{each}" if each[0].isdigit() else f"DNS:{each}" for each in (*names, name))
        extensions.write_text(f"subjectAltName={listed}\n")
        _openssl("req", "-new", "-key", key, "-subj", f"/CN={name}", "-out", request)
        return key, request, extensions

    def _new_key(self, path: Path) -> None:
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
