"""Caches of the literature, for comparison; agents use none of them.

Each file holds a cache. All count blocks of equal size and admit every block, apart from Belady's. None
models the costs of a flash cache: segments and write amplification.
"""
