"""The owner role: the index and the space of the shards this agent owns."""
