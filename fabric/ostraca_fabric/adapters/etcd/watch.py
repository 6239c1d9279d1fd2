"""What lies under a prefix, and then every change of it, in order: none skipped, none told twice.

First all is listed, at one revision of etcd. Then a watch goes on from the revision behind it. Whatever
ends the watch (a member that stops, that loses its leader, that falls silent), it is begun again at another
member from the revision that comes next. Listed anew is only

- when that revision is compacted away, as after a long absence: nobody can tell then what happened between,
  but what came of it;
- when etcd's revisions went back, or its cluster is another: it was made anew, or from a backup. What it
  says then may be older than what was told before, and ``Listed.went_back`` says so.

A revision's changes come together. That matters: a transaction is one revision.

A progress report tells which revision comes next only where etcd sent it by itself. Those asked for may
overtake changes in etcd before 3.4.25 and 3.5.8, and are a sign of life here, no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from typing import TYPE_CHECKING, TypeAlias

import grpc
import grpc.aio

from ostraca_fabric.adapters.etcd import rpc_pb2 as rpc
from ostraca_fabric.adapters.etcd.client import WATCH, EtcdClient, range_end
from ostraca_fabric.adapters.etcd.faults import in_words
from ostraca_fabric.adapters.etcd.told import Changed, Deleted, Entry, Listed

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from google.protobuf.message import Message

    _WatchCall: TypeAlias = grpc.aio.StreamStreamCall[Message, rpc.WatchResponse]

log = logging.getLogger(__name__)


class Watch:
    """Follows one prefix. Where an error ended ``run``, calling it again goes on behind what was told."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        """Follow *prefix* with *client*."""
        self._client = client
        self._prefix = prefix
        self._next = 0
        """The first revision not told yet; 0: list first."""

        self._cluster = 0
        self._used: tuple[tuple[str, str], ...] = ()
        """The metadata that the last watch was begun with."""

        self._backoff = client.backoff()
        self.heard_at_s = -math.inf
        """When etcd last answered, on the loop's clock."""

        self._went_back = ""
        """What is to be told with the next list of how etcd was found to have forgotten what it had told."""

    async def run(self) -> AsyncGenerator[Listed | Changed, None]:
        """Tell all there is, then each change. Without end: etcd's restarts and absence are waited out.

        Raises MembershipError when etcd refuses, or does not list what there is in time.
        """
        while True:
            if self._next == 0:
                yield await self._list()
            endpoint = self._client.endpoint
            try:
                async with contextlib.aclosing(self._follow()) as changes:
                    async for changed in changes:
                        yield changed
                self._client.move_on(endpoint)
            except grpc.aio.AioRpcError as error:
                if not self._client.can_go_on(error, endpoint, self._used):
                    raise in_words(error, asked="let the fabric be watched", at=endpoint) from error
                log.debug("etcd's member %s ended the watch, or began none: %s", endpoint, error.details())
            if self._next:
                await asyncio.sleep(self._backoff.next_s())

    def list_anew(self) -> None:
        """Tell all there is once more when ``run`` is called next: what was told could not be taken in."""
        self._next = 0

    async def _list(self) -> Listed:
        listed = await self._client.range(self._prefix, end=range_end(self._prefix))
        self._next = listed.header.revision + 1
        self._cluster = listed.header.cluster_id
        self._hear()
        went_back, self._went_back = self._went_back, ""
        return Listed(tuple(map(entry_of, listed.kvs)), listed.header.revision, went_back)

    async def _follow(self) -> AsyncGenerator[Changed, None]:
        """Watch at one member until it ends the watch or falls silent, or until all must be listed anew."""
        asked = rpc.WatchCreateRequest(
            key=self._prefix,
            range_end=range_end(self._prefix),
            start_revision=self._next,
            progress_notify=True,
        )
        self._used = await self._client.metadata()
        channel = self._client.channel()
        call = channel.stream_stream(
            WATCH,
            request_serializer=rpc.WatchRequest.SerializeToString,
            response_deserializer=rpc.WatchResponse.FromString,
        )(metadata=(*self._used, ("hasleader", "true")))
        try:
            await self._write(call, rpc.WatchRequest(create_request=asked))
            while (answer := await self._read(call)) is not None:
                self._client.hear(channel)
                if answer.created and (why := await self._why_not_our_past(answer)):
                    log.info("etcd has forgotten what it had told (%s): listing anew", why)
                    self._went_back, self._next = why, 0
                    return
                if answer.compact_revision:
                    log.info("etcd has compacted what changed from revision %d on: listing anew", self._next)
                    self._next = 0
                    return
                if answer.canceled:
                    log.warning("etcd cancelled the watch, which is begun again: %s", answer.cancel_reason)
                    self._client.forget_token(self._used)
                    return
                if changed := self._take(answer):
                    yield changed
                if not self._client.is_current(channel):
                    log.info("The watch goes on over a new connection, as the certificates have changed")
                    return
        except TimeoutError:
            log.debug("etcd's member %s is silent: the watch is begun again", self._client.endpoint)
            asked_at_s = asyncio.get_running_loop().time() - self._client.settings.watch_silence_max_s / 2
            self._client.replace_silent(channel, since_s=asked_at_s)
        finally:
            call.cancel()

    def _take(self, answer: rpc.WatchResponse) -> Changed | None:
        if answer.events:
            changes = tuple(
                _change_of(event) for event in answer.events if event.kv.mod_revision >= self._next
            )
            last = max(event.kv.mod_revision for event in answer.events)
            self._backoff.reset()
            self._next = max(self._next, last + 1)
            return Changed(changes, last) if changes else None
        if not answer.created and answer.watch_id >= 0:  # sent by itself: nothing is under way before it
            self._next = max(self._next, answer.header.revision + 1)
        return None

    async def _why_not_our_past(self, created: rpc.WatchResponse) -> str:
        """Say how it shows that what was told is not what etcd has been through; empty where it is. The next
        revision would come a second time there, and etcd would wait for it without a word.
        """
        if created.header.cluster_id != self._cluster:
            return "it is another cluster"
        if created.header.revision + 1 >= self._next:
            return ""
        newest = await self._client.range(self._prefix, limit=1)  # this member may lag; all of them can't
        if newest.header.revision + 1 >= self._next:
            return ""
        return f"its revision is {newest.header.revision}, and was {self._next - 1}"

    async def _write(self, call: _WatchCall, request: rpc.WatchRequest) -> None:
        async with asyncio.timeout(self._client.settings.request_timeout_s):
            with contextlib.suppress(asyncio.InvalidStateError):  # it has ended, and the next read says how
                await call.write(request)

    async def _read(self, call: _WatchCall) -> rpc.WatchResponse | None:
        """Return what etcd tells next, None when it ends the watch. Raises TimeoutError when it is silent."""
        reading = asyncio.ensure_future(call.read())
        half_s = self._client.settings.watch_silence_max_s / 2
        try:
            await asyncio.wait([reading], timeout=half_s)
            if not reading.done():
                await self._write(call, rpc.WatchRequest(progress_request=rpc.WatchProgressRequest()))
                await asyncio.wait([reading], timeout=half_s)
            if not reading.done():
                raise TimeoutError
            answer = reading.result()
        finally:
            reading.cancel()
        self._hear()
        return answer if isinstance(answer, rpc.WatchResponse) else None

    def _hear(self) -> None:
        self.heard_at_s = asyncio.get_running_loop().time()


def entry_of(kv: rpc.KeyValue) -> Entry:
    """Return a key and its value as they came."""
    return Entry(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _change_of(event: rpc.Event) -> Entry | Deleted:
    if event.type == rpc.Event.DELETE:
        return Deleted(event.kv.key, event.kv.mod_revision)
    return entry_of(event.kv)
