"""The agent: a daemon on a host's DPU, or on the host itself.

Three roles share the process. The data path (``datapath``) moves blocks between flash and the arenas of
its workers. The shard owner (``shards``) keeps the index of its shards and allocates their space. The
controller (``controller``) attaches drives and claims shards. ``server`` holds connections; ``agent``
assembles the parts.
"""
