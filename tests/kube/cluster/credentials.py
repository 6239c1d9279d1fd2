"""Credentials of the cluster: a token per identity, and a kubeconfig file for each."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from tests.kube.cluster.addresses import API, NODES_MAX, node_name

_ADMINISTRATORS = "system:masters"


class Credentials:
    """Files of tokens and kubeconfigs in one folder."""

    def __init__(self, folder: Path) -> None:
        """Write all files; the API server reads the list of tokens once, so all possible nodes are in."""
        folder.mkdir()
        self._folder = folder
        self.certificates = folder / "certificates"
        self.tokens = folder / "tokens.csv"
        identities = [
            ("admin", "admin", _ADMINISTRATORS),
            ("controllers", "system:kube-controller-manager", _ADMINISTRATORS),
            ("scheduler", "system:kube-scheduler", "system:kube-scheduler"),
            ("proxy", "system:kube-proxy", "system:kube-proxy"),
            *(
                (node_name(number), f"system:node:{node_name(number)}", "system:nodes")
                for number in range(1, NODES_MAX + 1)
            ),
        ]
        lines = []
        for name, user, group in identities:
            token = secrets.token_hex(16)
            lines.append(f'{token},{user},{user},"{group}"\n')
            self.kubeconfig(name).write_text(json.dumps(self._kubeconfig(name, token)))
        self.tokens.write_text("".join(lines))

    def kubeconfig(self, name: str) -> Path:
        """Return the kubeconfig of an identity."""
        return self._folder / f"{name}.kubeconfig"

    def _kubeconfig(self, name: str, token: str) -> dict[str, object]:
        authority = str(self.certificates / "apiserver.crt")
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "cluster", "cluster": {"server": API, "certificate-authority": authority}}],
            "users": [{"name": name, "user": {"token": token}}],
            "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": name}}],
            "current-context": "cluster",
        }
