"""Ostraca beside other stores: all driven by one harness, in turns, in one run.

    python -m benchmarks.peers            all stores; a table, and JSON and a picture in benchmarks/results
    python -m benchmarks.peers redis      ours beside the named stores
    python -m benchmarks.peers --short    smoke test; the figures mean nothing

Each store has a client process (``stores``), which times the operations and compares all bytes. Peers get
environments of their own (``environments``), never the project's.
"""
