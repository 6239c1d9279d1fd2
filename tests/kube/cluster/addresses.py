"""Addresses of the cluster, all within the network namespace of one run.

Nothing routes out of this namespace: neither nodes nor pods reach the network of the machine.
"""

from __future__ import annotations

BRIDGE = "cluster"
CONTROL_PLANE = "10.77.0.1"
"""Address of the bridge: API server, etcd and DNS listen here."""

API_PORT = 6443
API = f"https://{CONTROL_PLANE}:{API_PORT}"
SERVICES = "10.96.0.0/16"
PODS = "10.78.0.0/16"
DOMAIN = "cluster.local"
NODES_MAX = 9


def node_name(number: int) -> str:
    return f"node{number}"


def node_address(number: int) -> str:
    return f"10.77.0.{10 + number}"


def node_pods(number: int) -> str:
    """Return the subnet of a node's pods."""
    return f"10.78.{number}.0/24"
