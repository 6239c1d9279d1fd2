"""Shard owner: index and allocation of the shards owned by this agent.

``core`` makes the decisions, purely; ``shard`` runs one core over a drive, with group commit; ``service``
answers data paths, local and remote, and never handles a block's bytes.
"""
