"""The agent: the daemon on a host's DPU, or on the host itself.

Three roles in one process. The *mover* (``mover``) carries blocks between flash and its own workers' arenas.
The *owner* (``owner``) keeps the index of its shards and hands out their space. The *steward* (``steward``)
attaches drives and claims shards. ``session`` is one worker's connection, and ``agent`` puts the parts
together.
"""
