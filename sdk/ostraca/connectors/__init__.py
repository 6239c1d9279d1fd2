"""Connectors of the SDK to engines, one package for each.

Shared parts: ``kv_identity``, identity of KV bytes; ``transfers``, movement of chunks. Importing this package
loads none of them.
"""
