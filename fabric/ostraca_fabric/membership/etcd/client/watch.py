"""Watch of a prefix: a list, then every change in order, without gaps or repetition.

The first list has a single revision of etcd, and the watch continues from the next revision. If the watch
ends (a member stops, loses its leader, or falls silent), the watch begins again at another member, from the
next revision. Only two events cause a new list:

- The next revision is compacted away, as after a long absence. Only the result of the changes in between is
  then known.
- etcd's revisions went back, or the cluster is another: etcd was created anew or restored from a backup. The
  list may then be older than earlier changes; ``EntryList.went_back`` has the evidence.

Changes of one revision come together, because a transaction is one revision.

Only an unsolicited progress report confirms the next revision. Requested reports may overtake changes in etcd
before 3.4.25 and 3.5.8, and serve only as a sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator
from typing import TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import Message

from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.client import WATCH, EtcdClient, range_end
from ostraca_fabric.membership.etcd.client.faults import in_words
from ostraca_fabric.membership.etcd.client.watch_events import DeletedEntry, Entry, EntryChanges, EntryList

_WatchCall: TypeAlias = grpc.aio.StreamStreamCall[Message, rpc.WatchResponse]

log = logging.getLogger(__name__)


class Watch:
    """Watch of one prefix. After an error, a new ``run`` continues behind the last change."""

    def __init__(self, client: EtcdClient, prefix: bytes) -> None:
        """Watch *prefix* with *client*."""
        self._client = client
        self._prefix = prefix
        self._next = 0
        """First revision not reported yet; 0: list first."""

        self._cluster = 0
        self._used: tuple[tuple[str, str], ...] = ()
        """Metadata of the last watch."""

        self._backoff = client.backoff()
        self.heard_at_s = -math.inf
        """Time of etcd's last answer, on the loop's clock."""

        self._went_back = ""
        """Evidence that etcd has lost reported changes, for the next list."""

    async def run(self) -> AsyncGenerator[EntryList | EntryChanges, None]:
        """Yield a list, then each change, without end.

        Restarts and absence of etcd are waited out. Raises MembershipError if etcd refuses, or does not list
        in time.
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
        """List again at the next ``run``, because changes could not be applied."""
        self._next = 0

    async def _list(self) -> EntryList:
        listed = await self._client.range(self._prefix, end=range_end(self._prefix))
        self._next = listed.header.revision + 1
        self._cluster = listed.header.cluster_id
        self._hear()
        went_back, self._went_back = self._went_back, ""
        return EntryList(tuple(map(entry_of, listed.kvs)), listed.header.revision, went_back)

    async def _follow(self) -> AsyncGenerator[EntryChanges, None]:
        """Watch at one member until its end or silence, or until a new list is necessary."""
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
                self._client.channels.hear(channel)
                if answer.created and (why := await self._why_not_our_past(answer)):
                    log.info("etcd has lost changes reported before (%s): listing again", why)
                    self._went_back, self._next = why, 0
                    return
                if answer.compact_revision:
                    log.info("etcd has compacted the changes from revision %d on: listing again", self._next)
                    self._next = 0
                    return
                if answer.canceled:
                    log.warning("etcd cancelled the watch; watching again: %s", answer.cancel_reason)
                    self._client.forget_token(self._used)
                    return
                if changed := self._take(answer):
                    yield changed
                if not self._client.channels.holds(channel):
                    log.info("The watch goes on over a new connection")
                    return
        except TimeoutError:
            log.debug("etcd's member %s is silent: the watch is begun again", self._client.endpoint)
            asked_at_s = asyncio.get_running_loop().time() - self._client.settings.watch_silence_max_s / 2
            self._client.channels.replace_silent(channel, since_s=asked_at_s)
        finally:
            call.cancel()

    def _take(self, answer: rpc.WatchResponse) -> EntryChanges | None:
        if answer.events:
            changes = tuple(
                _change_of(event) for event in answer.events if event.kv.mod_revision >= self._next
            )
            last = max(event.kv.mod_revision for event in answer.events)
            self._backoff.reset()
            self._next = max(self._next, last + 1)
            return EntryChanges(changes, last) if changes else None
        if not answer.created and answer.watch_id >= 0:  # unsolicited: no earlier change is under way
            self._next = max(self._next, answer.header.revision + 1)
        return None

    async def _why_not_our_past(self, created: rpc.WatchResponse) -> str:
        """Return the evidence that etcd's history differs from the reported history, or empty.

        Without this check etcd would wait silently for the next revision, and then give its number a second
        time.
        """
        if created.header.cluster_id != self._cluster:
            return "it is another cluster"
        if created.header.revision + 1 >= self._next:
            return ""
        newest = await self._client.range(self._prefix, limit=1)  # linearizable: this member may lag
        if newest.header.revision + 1 >= self._next:
            return ""
        return f"revision {newest.header.revision} now, {self._next - 1} before"

    async def _write(self, call: _WatchCall, request: rpc.WatchRequest) -> None:
        async with asyncio.timeout(self._client.settings.request_timeout_s):
            with contextlib.suppress(
                asyncio.InvalidStateError
            ):  # the call has ended; the next read tells why
                await call.write(request)

    async def _read(self, call: _WatchCall) -> rpc.WatchResponse | None:
        """Return etcd's next answer, or None at the end of the watch.

        Raises TimeoutError if etcd is silent.
        """
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
    """Return a key and its value as received."""
    return Entry(kv.key, kv.value, kv.create_revision, kv.mod_revision, kv.lease)


def _change_of(event: rpc.Event) -> Entry | DeletedEntry:
    if event.type == rpc.Event.DELETE:
        return DeletedEntry(event.kv.key, event.kv.mod_revision)
    return entry_of(event.kv)
