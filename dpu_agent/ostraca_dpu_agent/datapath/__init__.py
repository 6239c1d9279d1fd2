"""Data path: moves blocks between flash and the arenas of the agent's workers.

``data_path`` accepts requests; ``get``, ``put``, ``prefetch`` and ``queries`` execute them, with the services
of ``request``. ``location`` finds shard owners and extents, and ``space`` holds space reserved for a put.
``staging`` manages memory and the DRAM cache. ``flash_io`` loads verified blocks from flash into staging.
``admission`` estimates latencies and decides which gets are worth their cost.
"""
