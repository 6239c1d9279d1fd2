"""What lies on flash, and the index of it in memory. Pure: bytes in, values out.

``geometry`` says where things are in a shard, ``superblock`` and ``summary`` how pages are encoded,
``volume_records`` the copy of the fabric's volumes that lies beside each superblock, ``recovery`` what can be
believed of the pages found after a crash, ``rebuild`` what fabric a set of drives is. ``index`` keeps where
each block lies.
"""
