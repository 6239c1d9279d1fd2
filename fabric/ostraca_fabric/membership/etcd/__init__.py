"""Membership store in etcd, for a fabric with a process per agent.

A small client over ``grpc.aio`` (docs/adr/0003), with ``membership.EtcdMembership`` on top. Modules above
this package do not depend on grpc. The package is loaded only if an agent is configured to use etcd.

Modules from the bottom:

- ``client``: ``settings``, ``rpc_pb2`` (etcd's messages), ``faults`` (meaning of errors),
  ``channels`` (connections), ``client`` (calls), ``watch_events`` and ``watch`` (changes)
- ``lease`` and ``lease_thread``: renewal of leases
- ``schema``: ``keys`` and ``records`` (content of etcd), ``view`` (map built from changes)
- ``store`` (reads and compared writes), ``follower`` (current view), ``membership``
"""

import os

# An agent starts processes to query its host's kernel, and uvloop forks for each. gRPC's fork handlers would
# run in the child between fork and exec, where they have crashed the child. The handlers only help children
# that use their parent's connections, and no child does. gRPC reads this variable when loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
