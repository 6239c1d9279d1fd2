"""etcd, as the membership store of a fabric whose agents are processes of their own.

A small client over ``grpc.aio`` (docs/adr/0003), and over it ``membership.EtcdMembership``. Nothing above
this package knows of grpc, and nothing here is loaded unless an agent is told to use etcd. From the bottom:
``settings`` and ``backoff``, ``rpc_pb2`` (etcd's messages) and ``faults`` (what its errors mean),
``channels`` (the connections), ``client`` (one call), ``lease`` (what keeps an agent in the fabric), ``told``
and ``watch`` (what has changed), ``keys`` and ``records`` (what lies there), ``store`` (reads and compared
writes), ``view`` (the map made of what is told) and ``follower`` (who keeps it up to date), ``membership``.
"""

import os

# An agent starts processes to ask its host's kernel, and uvloop forks for that. gRPC's own handlers would run
# in the child, between fork and exec, and there they have crashed it. They are of use only to children that
# go on with their parent's connections, and there are none. gRPC reads this when it is loaded.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
