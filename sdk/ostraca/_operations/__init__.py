"""Run operations: get, put, lookup and prefetch, for the blocking, ticket and asyncio front ends."""
