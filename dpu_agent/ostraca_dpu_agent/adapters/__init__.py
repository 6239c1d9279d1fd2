"""Adapters of the agent alone: transports, peers, NVMe-oF."""
