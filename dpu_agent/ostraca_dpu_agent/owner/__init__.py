"""The owner: keeps the index of its shards and hands out their space.

``core`` decides, purely; ``shard`` runs one core over a drive, with group commit; ``service`` answers movers,
wherever they are, and never carries a block's bytes.
"""
