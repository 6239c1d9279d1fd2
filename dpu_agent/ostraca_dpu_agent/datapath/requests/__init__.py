"""Shared parts of requests: blocks, deadline, counters and services."""
