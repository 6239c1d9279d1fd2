"""Transfers between an engine's memory and the fabric, shared by all connectors.

- ``settings``: settings common to all connectors, with every limit
- ``rows``: port to the engine's memory
- ``fabric_link``: connection to the fabric in the background
- ``jobs``, ``failed_loads``: pure decisions: jobs under way, chunks to miss after a failed load
- ``health``: backoff from a fabric without answers
- ``explain_command``, ``hash_seed``: reasons of misses, for the log
- ``counters``: metrics of every connector
- ``operations``: lookups, loads and stores under way
"""
