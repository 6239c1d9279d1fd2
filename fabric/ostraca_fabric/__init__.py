"""Code shared by agents, clients, enclosures and tools: value types, formats, ports and adapters.

Read in dependency order: ``errors`` and ``model``, then ``tables``, ``wire`` and ``policies``, then
``flash``. Everything up to there is pure: no I/O, no clock, no randomness. ``ports`` states the duties of
adapters; ``connection``, ``drives`` and ``membership`` implement the ports.
"""
