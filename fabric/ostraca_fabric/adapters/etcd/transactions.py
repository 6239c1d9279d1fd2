"""What transactions are made of: comparisons, and what is done when they hold."""

from __future__ import annotations

from ostraca_fabric.adapters.etcd import rpc_pb2 as rpc


def is_absent(key: bytes) -> rpc.Compare:
    """Holds when there is no such key."""
    return is_unchanged(key, 0)


def is_there(key: bytes) -> rpc.Compare:
    """Holds when there is such a key."""
    return rpc.Compare(key=key, target=rpc.Compare.VERSION, result=rpc.Compare.GREATER, version=0)


def is_unchanged(key: bytes, modified: int) -> rpc.Compare:
    """Holds when the key was last written in revision *modified*; 0: when there is no such key."""
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=modified)


def none_written(first: bytes, end: bytes, *, since: int) -> rpc.Compare:
    """Holds when no key that lies from *first* to before *end* was written after revision *since*. What was
    deleted meanwhile does not count.
    """
    return rpc.Compare(
        key=first,
        range_end=end,
        target=rpc.Compare.MOD,
        result=rpc.Compare.LESS,
        mod_revision=since + 1,
    )


def is_empty(first: bytes, end: bytes) -> rpc.Compare:
    """Holds when no key lies from *first* to before *end*."""
    return none_written(first, end, since=0)


def put(key: bytes, value: bytes, lease: int = 0) -> rpc.RequestOp:
    """Write a key, bound to a lease unless that is 0."""
    return rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value, lease=lease))


def delete(key: bytes) -> rpc.RequestOp:
    """Delete a key."""
    return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))


def get(key: bytes) -> rpc.RequestOp:
    """Read a key."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=key))


def get_all(first: bytes, end: bytes) -> rpc.RequestOp:
    """Read the keys from *first* to before *end*."""
    return rpc.RequestOp(request_range=rpc.RangeRequest(key=first, range_end=end))
