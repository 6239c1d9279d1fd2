"""The connections to etcd's members, made anew when the certificates that go with them have changed, and when
they fall silent.

Calls under way end on the connection that they began on, which is closed behind them. What goes on for long,
as a watch does, asks ``holds`` now and then, and begins again on a new one.

A connection may carry nothing more though nobody says so, and though new ones are well: what is between, as a
load balancer, has forgotten it. Where that is the only endpoint there is no other to ask, and a lease ends
before a ping finds it out. So one that was heard, and then stayed silent until a call's time was over, is
replaced. One that was never heard is not: it may take longer than that to be made.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from ostraca_fabric.adapters.etcd.faults import is_time_out
from ostraca_fabric.errors import MembershipError, UsageError
from ostraca_fabric.made_of_files import MadeOfFiles
from ostraca_fabric.tasks import Tasks
from ostraca_fabric.tls import Tls, TlsFiles

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ostraca_fabric.adapters.etcd.settings import EtcdSettings, EtcdTls

log = logging.getLogger(__name__)

_RECONNECT_FIRST_MS = 100
_RECONNECT_MAX_MS = 1000
_CONNECTED_WITHIN_MS = 2000
PING_AFTER_MS = 10_000
"""A connection that has heard nothing for so long is pinged, also while nobody waits for an answer, and one
that a network has dropped is made anew: not only when TCP tries again, which may be minutes after the network
is back. etcd ends connections that ping more often than every 5 s."""

PING_TIMEOUT_MS = 5000


class Channels:
    """One connection to each member. Belongs to the event loop it is first used in."""

    def __init__(self, settings: EtcdSettings) -> None:
        """Connect to nothing, and read no file yet."""
        self._settings = settings
        self._credentials: MadeOfFiles[grpc.ChannelCredentials] | None = None
        self._shown: grpc.ChannelCredentials | None = None
        """What the open ones were made with."""

        self._open: list[grpc.aio.Channel] = []
        self._heard_at_s: dict[grpc.aio.Channel, float] = {}
        """When each of them that ever answered did so last, on the loop's clock."""

        self._leaving: list[grpc.aio.Channel] = []
        self._closing = Tasks("connections to etcd")
        self._is_closed = False

    async def close(self) -> None:
        """Close all; calls under way fail."""
        self._is_closed = True
        await self._closing.stop()
        channels = self._open + self._leaving
        self._open, self._leaving = [], []
        for channel in channels:
            await channel.close()

    def to(self, member: int) -> grpc.aio.Channel:
        """Return the connection to a member, by its place among the endpoints. Raises MembershipError."""
        if self._is_closed:
            raise MembershipError("the client of etcd was closed")
        shown = self._current()
        if not self._open or shown is not self._shown:
            before, self._shown = self._open, shown
            self._open = [self._opened(endpoint) for endpoint in self._settings.endpoints]
            for channel in before:
                self._leave(channel)
        return self._open[member]

    @contextmanager
    def asking(self, member: int) -> Iterator[grpc.aio.Channel]:
        """Use the connection to a member for one call, which has its answer when this is left without an
        error. One on which that comes not in time, nor anything else meanwhile, is replaced.
        """
        channel, asked_at_s = self.to(member), asyncio.get_running_loop().time()
        try:
            yield channel
        except grpc.aio.AioRpcError as error:
            if is_time_out(error):
                self.replace_silent(channel, since_s=asked_at_s)
            raise
        self.hear(channel)

    def hear(self, channel: grpc.aio.Channel) -> None:
        """Note that something came over *channel*."""
        if channel in self._open:
            self._heard_at_s[channel] = asyncio.get_running_loop().time()

    def replace_silent(self, channel: grpc.aio.Channel, *, since_s: float) -> None:
        """Have new calls go over another connection than *channel*, if that was heard, and not *since_s*."""
        heard_at_s = self._heard_at_s.get(channel)
        if self._is_closed or heard_at_s is None or heard_at_s >= since_s:
            return
        member = self._open.index(channel)
        log.info("etcd at %s has fallen silent: connecting anew", self._settings.endpoints[member])
        self._open[member] = self._opened(self._settings.endpoints[member])
        self._leave(channel)

    def holds(self, channel: grpc.aio.Channel) -> bool:
        """Whether new calls may go over *channel*: not once what it was made with has changed."""
        return channel in self._open and self._current() is self._shown

    def _leave(self, channel: grpc.aio.Channel) -> None:
        self._heard_at_s.pop(channel, None)
        self._leaving.append(channel)
        self._closing.spawn(self._left(channel))

    async def _left(self, channel: grpc.aio.Channel) -> None:
        """Close what no new call goes over; give those under way the time that they may take."""
        await channel.close(self._settings.watch_silence_max_s + self._settings.request_timeout_s)
        self._leaving.remove(channel)

    def _current(self) -> grpc.ChannelCredentials | None:
        tls = self._settings.tls
        if tls is None:
            return None
        if self._credentials is None:
            try:
                self._credentials = MadeOfFiles(tls.files, lambda: _credentials(tls))
            except UsageError as error:
                message = f"the files for TLS towards etcd can't be used: {error}"
                raise MembershipError(message) from error
        return self._credentials.current()

    def _opened(self, endpoint: str) -> grpc.aio.Channel:
        options = [
            ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
            ("grpc.min_reconnect_backoff_ms", _CONNECTED_WITHIN_MS),  # it is also the time-out of connecting
            ("grpc.max_reconnect_backoff_ms", _RECONNECT_MAX_MS),
            ("grpc.max_receive_message_length", self._settings.message_bytes_max),
            ("grpc.enable_http_proxy", 0),  # etcd is near
            ("grpc.use_local_subchannel_pool", 1),  # a connection is shared with nobody
            ("grpc.keepalive_time_ms", PING_AFTER_MS),
            ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
            ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),  # else a minute, whatever the one above says
        ]
        if self._shown is None:
            return grpc.aio.insecure_channel(endpoint, options)
        return grpc.aio.secure_channel(endpoint, self._shown, options)


def _credentials(tls: EtcdTls) -> grpc.ChannelCredentials:
    # grpc says nothing of files that it can't use, and connects never.
    Tls(TlsFiles(tls.ca, tls.cert, tls.key))
    try:
        return grpc.ssl_channel_credentials(
            tls.ca.read_bytes(),
            tls.key.read_bytes() if tls.key is not None else None,
            tls.cert.read_bytes() if tls.cert is not None else None,
        )
    except OSError as error:
        raise UsageError(f"a file of TLS can't be read: {error}") from error
