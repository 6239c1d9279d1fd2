"""Redis, without persistence: SETs in a pipeline, MGET, and EXISTS in a pipeline.

The client library returns new bytes; the store copies them into the caller's memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np
import redis

from benchmarks.peers.stores.servers import free_port, server
from benchmarks.peers.stores.turns import Order, Rows, Store, serve


class RedisStore(Store[list[str]]):
    """Client of a Redis server."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self.version = client.info()["redis_version"]

    def names(self, labels: Sequence[str]) -> list[str]:
        """Return the labels."""
        return list(labels)

    def put(self, names: list[str], rows: Rows) -> None:
        """SET."""
        if len(names) == 1:
            self._client.set(names[0], rows[0].data)
            return
        pipeline = self._client.pipeline(transaction=False)
        for name, row in zip(names, rows, strict=True):
            pipeline.set(name, row.data)
        pipeline.execute()

    def get(self, names: list[str], rows: Rows) -> None:
        """GET or MGET, and a copy."""
        values = self._client.mget(names) if len(names) > 1 else [self._client.get(names[0])]
        for row, value in zip(rows, values, strict=True):
            row[:] = np.frombuffer(value, np.uint8)

    def count(self, names: list[str]) -> int:
        """EXISTS of each key: a single command for all keys would answer with their number alone."""
        pipeline = self._client.pipeline(transaction=False)
        for name in names:
            pipeline.exists(name)
        return sum(pipeline.execute())

    def forget(self, names: list[str]) -> None:
        """DEL."""
        self._client.delete(*names)


@contextlib.contextmanager
def _open_store(order: Order, _: Rows) -> Iterator[RedisStore]:
    port = free_port()
    options = {"bind": "127.0.0.1", "port": port, "save": "", "appendonly": "no", "dir": order.directory}
    command = [
        order.variant,
        *(word for name, value in options.items() for word in (f"--{name}", f"{value}")),
    ]
    with server(command, port=port), contextlib.closing(redis.Redis("127.0.0.1", port)) as client:
        yield RedisStore(client)


if __name__ == "__main__":
    serve(_open_store)
