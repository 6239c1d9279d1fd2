"""Cycle of the segments of a shard, and division among pools. Pure."""
