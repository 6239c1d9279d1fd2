"""Client processes of the stores: ``python -m benchmarks.peers.stores.NAME``.

Peers' environments have NumPy and the peer's packages, so only ``ostraca_fabric`` imports the project's code.
"""
