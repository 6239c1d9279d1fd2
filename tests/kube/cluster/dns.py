"""Cluster DNS: A records of Services, and of pods behind headless Services, read from the API server.

Debian packages no CoreDNS. Run as ``python -m tests.kube.cluster.dns KUBECONFIG``; the server reads Services
and Endpoints once per second and keeps the last names while the API server does not answer.
"""

from __future__ import annotations

import json
import socket
import ssl
import struct
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from tests.kube.cluster.addresses import CONTROL_PLANE, DOMAIN

_PORT = 53
_REFRESH_S = 1.0
_TTL_S = 5
_A, _IN = 1, 1
_AUTHORITATIVE, _NO_SUCH_NAME = 0x8580, 3
_HEADER_BYTES = 12
_NAME_POINTER = 0xC00C
"""Compressed form of the name at the begin of the question."""


def records(services: list[Any], endpoints: list[Any]) -> dict[str, list[str]]:
    """Return the addresses of each name. Pure."""
    found: dict[str, list[str]] = {}
    headless: dict[str, bool] = {}
    for service in services:
        name = _service_name(service)
        if service["spec"].get("clusterIP") == "None":
            headless[name] = service["spec"].get("publishNotReadyAddresses", False)
        elif service["spec"].get("clusterIP"):
            found[name] = [service["spec"]["clusterIP"]]
    for endpoint in endpoints:
        name = _service_name(endpoint)
        if name not in headless:
            continue
        for subset in endpoint.get("subsets") or []:
            addresses = list(subset.get("addresses") or [])
            if headless[name]:
                addresses += subset.get("notReadyAddresses") or []
            for address in addresses:
                found.setdefault(name, []).append(address["ip"])
                if "hostname" in address:
                    found.setdefault(f"{address['hostname']}.{name}", []).append(address["ip"])
    return found


def answer(query: bytes, names: dict[str, list[str]]) -> bytes:
    """Return the answer to a query of one question. Pure."""
    labels, position = [], _HEADER_BYTES
    while query[position]:
        end = position + 1 + query[position]
        labels.append(query[position + 1 : end].decode("latin-1"))
        position = end
    question = query[_HEADER_BYTES : position + 5]
    (kind,) = struct.unpack(">H", query[position + 1 : position + 3])
    found = names.get(".".join(labels).lower())
    addresses = found if found and kind == _A else []
    flags = _AUTHORITATIVE | (0 if found else _NO_SUCH_NAME)
    header = query[:2] + struct.pack(">HHHHH", flags, 1, len(addresses), 0, 0)
    lines = b"".join(
        struct.pack(">HHHIH", _NAME_POINTER, _A, _IN, _TTL_S, 4) + socket.inet_aton(address)
        for address in addresses
    )
    return header + question + lines


class Zone:
    """Names of the cluster, read from the API server again and again."""

    def __init__(self, kubeconfig: Path) -> None:
        configuration = json.loads(kubeconfig.read_text())
        cluster = configuration["clusters"][0]["cluster"]
        self._server = cluster["server"]
        self._token = configuration["users"][0]["user"]["token"]
        self._context = ssl.create_default_context(cafile=cluster["certificate-authority"])
        self.names: dict[str, list[str]] = {}

    def refresh(self) -> None:
        """Read the names until the process ends."""
        while True:
            try:
                self.names = records(self._items("services"), self._items("endpoints"))
            except OSError as error:
                print(f"API server: {error}", flush=True)
            time.sleep(_REFRESH_S)

    def _items(self, kind: str) -> list[Any]:
        request = urllib.request.Request(
            f"{self._server}/api/v1/{kind}", headers={"Authorization": f"Bearer {self._token}"}
        )
        with urllib.request.urlopen(request, context=self._context, timeout=5.0) as response:
            return list(json.load(response)["items"])


def main() -> None:
    """Serve DNS until the process ends."""
    zone = Zone(Path(sys.argv[1]))
    threading.Thread(target=zone.refresh, daemon=True).start()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind((CONTROL_PLANE, _PORT))
        while True:
            query, peer = server.recvfrom(512)
            try:
                server.sendto(answer(query, zone.names), peer)
            except (IndexError, struct.error, OSError) as error:
                print(f"query of {peer}: {error}", flush=True)


def _service_name(item: Any) -> str:
    metadata = item["metadata"]
    return f"{metadata['name']}.{metadata['namespace']}.svc.{DOMAIN}"


if __name__ == "__main__":
    main()
