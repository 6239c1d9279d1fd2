"""NIXL code shared by worker and agent: identity, runtime, resource checks."""
