"""Modules on the path of a get, measured on a running fabric.

``python -m scripts.structure.get_path`` starts etcd, two agents and a worker as processes. The worker asks
one agent for blocks on flash, and receives the blocks by NIXL; the other agent owns the blocks. A module
counts if every measured get executes a line of the module between call and return, in any thread of any
process. Background work coincides with some gets only, and doesn't count.
"""
