"""Identity of KV bytes, shared by all connectors. Pure.

Engines share blocks only if every fact that decides the bytes is equal.

- ``identity``: these facts, and the layout and volume name derived from them
- ``chains``: chains of blocks from an engine's prefix keys
"""
