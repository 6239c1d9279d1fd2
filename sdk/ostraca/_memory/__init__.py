"""Memory of a worker: arena, slots, host and device blocks, copy pool."""
