"""Connections to etcd's members, replaced after a change of certificates or silence.

Calls under way end on their own connection, which then closes. A long call, such as a watch, checks ``holds``
now and then, and begins again on a new connection.

A connection may stop carrying data without an error, for example after a load balancer forgot the connection,
while new connections work. A single endpoint has no alternative, and a lease ends before a ping detects the
loss. Therefore a connection heard earlier, and then silent until a call's timeout, is replaced. A connection
never heard is kept: connecting may take longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from ostraca_fabric.errors import MembershipError, UsageError
from ostraca_fabric.membership.etcd.client.faults import code_of
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings
from ostraca_fabric.runtime.file_reload import ReloadedFiles
from ostraca_fabric.runtime.os_errors import explained
from ostraca_fabric.runtime.tasks import Tasks
from ostraca_fabric.sockets.tls import Tls, TlsFiles

log = logging.getLogger(__name__)

_RECONNECT_FIRST_MS = 100
_RECONNECT_MAX_MS = 1000
_CONNECTED_WITHIN_MS = 2000
PING_AFTER_MS = 10_000
"""Silence before a ping, also without a pending call. A dropped connection is thus replaced at once, not
after TCP's next attempt, which may be minutes after the network returns. etcd ends connections with more
than one ping per 5 s."""

PING_TIMEOUT_MS = 5000


class Channels:
    """Connection to each member. Belongs to the event loop of its first use."""

    def __init__(self, settings: EtcdSettings) -> None:
        """Store the settings, without connecting or reading a file."""
        self._settings = settings
        self._credentials: ReloadedFiles[grpc.ChannelCredentials] | None = None
        self._shown: grpc.ChannelCredentials | None = None
        """Credentials of the open connections."""

        self._open: list[grpc.aio.Channel] = []
        self._heard_at_s: dict[grpc.aio.Channel, float] = {}
        """Time of the last answer on each connection that ever answered, on the loop's clock."""

        self._replaced: dict[grpc.aio.Channel, grpc.aio.Channel] = {}
        """Silent connections and their replacements, until the replacement is heard."""

        self._leaving: list[grpc.aio.Channel] = []
        self._closing = Tasks("connections to etcd")
        self._is_closed = False

    async def close(self) -> None:
        """Close all connections; calls under way fail."""
        self._is_closed = True
        await self._closing.stop()
        channels = [*self._open, *self._replaced, *self._leaving]
        self._open, self._leaving = [], []
        self._replaced.clear()
        for channel in channels:
            await channel.close()

    def to(self, member: int) -> grpc.aio.Channel:
        """Return the connection to the member at a position among the endpoints.

        Raises MembershipError.
        """
        if self._is_closed:
            raise MembershipError("the client of etcd was closed")
        shown = self._current()
        if not self._open or shown is not self._shown:
            before, self._shown = [*self._open, *self._replaced], shown
            self._replaced.clear()
            self._open = [self._opened(endpoint) for endpoint in self._settings.endpoints]
            for channel in before:
                self._leave(channel)
        return self._open[member]

    @contextmanager
    def asking(self, member: int) -> Iterator[grpc.aio.Channel]:
        """Use the connection to a member for a single call.

        Leaving the block without an error means that the call has its answer. A connection silent until the
        call's timeout is replaced.
        """
        channel, asked_at_s = self.to(member), asyncio.get_running_loop().time()
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            if code_of(error) is grpc.StatusCode.DEADLINE_EXCEEDED:
                self.replace_silent(channel, since_s=asked_at_s)
            raise
        self.hear(channel)

    def hear(self, channel: grpc.aio.Channel) -> None:
        """Record that a message arrived over *channel*."""
        if channel in self._open:
            self._heard_at_s[channel] = asyncio.get_running_loop().time()
            for before in [old for old, new in self._replaced.items() if new is channel]:
                del self._replaced[before]
                self._leave(before)

    def replace_silent(self, channel: grpc.aio.Channel, *, since_s: float) -> None:
        """Move new calls off *channel* if heard earlier, but not after *since_s*."""
        heard_at_s = self._heard_at_s.get(channel)
        if self._is_closed or heard_at_s is None or heard_at_s >= since_s:
            return
        member = self._open.index(channel)
        log.info("etcd at %s has fallen silent: connecting anew", self._settings.endpoints[member])
        self._open[member] = self._opened(self._settings.endpoints[member])
        self._heard_at_s.pop(channel, None)
        self._replaced[channel] = self._open[member]

    def holds(self, channel: grpc.aio.Channel) -> bool:
        """Whether a watch may stay on *channel*; False after a change of credentials.

        A watch stays on a silent, replaced connection until the replacement is heard. A network may pass
        answers but no requests, so that a new watch could not begin.
        """
        return (channel in self._open or channel in self._replaced) and self._current() is self._shown

    def _leave(self, channel: grpc.aio.Channel) -> None:
        self._heard_at_s.pop(channel, None)
        self._leaving.append(channel)
        self._closing.spawn(self._left(channel))

    async def _left(self, channel: grpc.aio.Channel) -> None:
        """Close a connection without new calls, after the time limit of calls under way."""
        await channel.close(self._settings.watch_silence_max_s + self._settings.request_timeout_s)
        self._leaving.remove(channel)

    def _current(self) -> grpc.ChannelCredentials | None:
        tls = self._settings.tls
        if tls is None:
            return None
        if self._credentials is None:
            try:
                self._credentials = ReloadedFiles(tls.paths, lambda: _credentials(tls))
            except UsageError as error:
                raise MembershipError(f"the files for TLS towards etcd can't be used: {error}") from error
        return self._credentials.current()

    def _opened(self, endpoint: str) -> grpc.aio.Channel:
        options = [
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
            ("grpc.min_reconnect_backoff_ms", _CONNECTED_WITHIN_MS),  # also the timeout of connecting
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
            ("grpc.max_receive_message_length", self._settings.message_bytes_max),
            ("grpc.enable_http_proxy", 0),  # etcd is near
            ("grpc.use_local_subchannel_pool", 1),  # connections are not shared
            ("grpc.keepalive_time_ms", PING_AFTER_MS),
            ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # otherwise a minute, despite the line above
        ]
        if self._shown is None:
            return grpc.aio.insecure_channel(endpoint, options)
        return grpc.aio.secure_channel(endpoint, self._shown, options)


def _credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    # Check the files first: grpc does not report unusable files, and never connects.
    Tls(tls)
    try:
        return grpc.ssl_channel_credentials(
            tls.ca.read_bytes(),
            tls.key.read_bytes() if tls.key is not None else None,
            tls.cert.read_bytes() if tls.cert is not None else None,
        )
    except OSError as error:
        raise UsageError(f"a file of TLS can't be read: {explained(error)}") from error
