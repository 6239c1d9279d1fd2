"""What lies on flash, and the index of it in memory. Pure: bytes in, values out.

``geometry`` says where things are in a shard, ``superblock`` and ``summary`` how pages are encoded,
``recovery`` what can be believed of the pages found after a crash, ``index`` keeps where each block lies.
"""
