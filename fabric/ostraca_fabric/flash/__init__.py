"""Format of flash and the memory index of a shard: pure, bytes in, values out.

- ``superblock``, ``summary``: encoding of pages
- ``volume_records``: copy of the fabric's volumes beside each superblock
- ``recovery``: validity of the pages found after a crash
- ``rebuild``: fabric map and volumes from a set of drives
- ``index``: position of each block
"""
