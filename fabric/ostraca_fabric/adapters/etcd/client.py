"""One call to etcd at a time: over several members, with TLS, a user's token, time-outs and waits.

A call goes to the member that answered last. When that does not answer in ``request_timeout_s``, or says that
it can't, the next one is asked, after a random wait, until ``operation_timeout_s`` is over; where there is
one only, that one, over a new connection if the one before has fallen silent. Whether a member
that did not answer did what it was asked is then unknown, so **a call may be done twice**. Whoever changes
something compares in a transaction, and reads again when a comparison fails: it may be his own change that he
finds.

A client belongs to the event loop it is first used in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio

from ostraca_fabric.adapters.etcd import rpc_pb2 as rpc
from ostraca_fabric.adapters.etcd.backoff import Backoff, Dice
from ostraca_fabric.adapters.etcd.channels import Channels
from ostraca_fabric.adapters.etcd.faults import Remedy, in_words, remedy
from ostraca_fabric.adapters.etcd.patience import Patience
from ostraca_fabric.errors import FormatError, LeaseEndedError, MembershipError, StoreAwayError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from google.protobuf.message import Message

    from ostraca_fabric.adapters.etcd.settings import EtcdSettings, EtcdUser

_Answer = TypeVar("_Answer", bound="Message")
_Given = TypeVar("_Given")
_Metadata = tuple[tuple[str, str], ...]
_Ask = Callable[[_Metadata, float], Awaitable[_Given]]
"""One try, with metadata and a time-out in seconds."""

RANGE = "/etcdserverpb.KV/Range"
TXN = "/etcdserverpb.KV/Txn"
WATCH = "/etcdserverpb.Watch/Watch"
LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
LEASE_KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"

_LEAST_TIMEOUT_S = 0.001


def range_end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with *prefix*."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class EtcdClient:
    """Asks etcd. Every method raises MembershipError when it can't be reached in time, or refuses."""

    def __init__(self, settings: EtcdSettings, *, dice: Dice, patience: Patience | None = None) -> None:
        """Connect to nothing yet; *dice* choose the first member asked, and how long to wait; *patience* says
        whether to.
        """
        self.settings = settings
        self.patience = Patience() if patience is None else patience
        self._dice = dice
        self._channels = Channels(settings)
        self._at = int(dice.uniform(0, len(settings.endpoints))) % len(settings.endpoints)
        self._token: str | None = None
        self._logging_in: asyncio.Task[str] | None = None
        """The login under way, which everybody waits for who needs a token."""

        self._turns = asyncio.Semaphore(settings.inflight_max)

    @property
    def endpoint(self) -> str:
        """The member that is asked next."""
        return self.settings.endpoints[self._at]

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        if (login := self._logging_in) is not None:
            login.cancel()
            await asyncio.wait([login])
        await self._channels.close()

    def backoff(self) -> Backoff:
        """Return the waits of something that is to be tried again."""
        return Backoff(self.settings.backoff_min_s, self.settings.backoff_max_s, self._dice)

    def move_on(self, endpoint: str) -> None:
        """Ask another member than *endpoint* from now on, unless somebody else saw to that already."""
        if endpoint == self.endpoint:
            self._at = (self._at + 1) % len(self.settings.endpoints)

    def channel(self) -> grpc.aio.Channel:
        """Return the connection to the member that is asked next. Raises MembershipError."""
        return self._channels.to(self._at)

    def is_current(self, channel: grpc.aio.Channel) -> bool:
        """Whether what goes on for long may stay on *channel*: not once our certificates have changed."""
        return self._channels.holds(channel)

    def hear(self, channel: grpc.aio.Channel) -> None:
        """Note that what goes on for long was told something over *channel*."""
        self._channels.hear(channel)

    def replace_silent(self, channel: grpc.aio.Channel, *, since_s: float) -> None:
        """Connect anew where *channel* was heard, and nothing of it *since_s*, on the loop's clock."""
        self._channels.replace_silent(channel, since_s=since_s)

    async def metadata(self) -> _Metadata:
        """Return what goes with each call: the user's token, if there is a user."""
        user = self.settings.user
        if user is None:
            return ()
        if (token := self._token) is None:
            if self._logging_in is None:
                self._logging_in = asyncio.get_running_loop().create_task(self._log_in(user))
                self._logging_in.add_done_callback(self._logged_in)
            token = await asyncio.shield(self._logging_in)
        return (("token", token),)

    def forget_token(self, used: _Metadata) -> None:
        """Get a new token before the next call, unless there is another by now than went with *used*."""
        if used == (("token", self._token),):
            self._token = None

    def can_go_on(self, error: grpc.aio.AioRpcError, endpoint: str, used: _Metadata) -> bool:
        """See to it that the next try may do better than that at *endpoint* with the metadata *used*; say
        whether it may.
        """
        match remedy(error):
            case Remedy.ASK_ANOTHER:
                self.move_on(endpoint)
                return True
            case Remedy.LOG_IN if self.settings.user is not None:
                self.forget_token(used)
                return True
            case _:
                return False

    async def range(self, key: bytes, *, end: bytes = b"", limit: int = 0) -> rpc.RangeResponse:
        """Read a key, or all from *key* to before *end*, as they stand now: linearizable."""
        asked = rpc.RangeRequest(key=key, range_end=end, limit=limit)
        return await self.call(RANGE, asked, rpc.RangeResponse, "read")

    async def txn(
        self,
        compare: Iterable[rpc.Compare],
        success: Iterable[rpc.RequestOp],
        failure: Iterable[rpc.RequestOp] = (),
    ) -> rpc.TxnResponse:
        """Do *success* if every comparison holds, else *failure*: in one step."""
        asked = rpc.TxnRequest(compare=compare, success=success, failure=failure)
        return await self.call(TXN, asked, rpc.TxnResponse, "take a transaction")

    async def lease_grant(self, ttl_s: int) -> rpc.LeaseGrantResponse:
        """Begin a lease. One that is asked for and not heard of ends by itself."""
        asked = rpc.LeaseGrantRequest(TTL=ttl_s)
        return await self.call(LEASE_GRANT, asked, rpc.LeaseGrantResponse, "grant a lease")

    async def lease_revoke(self, lease: int) -> None:
        """End a lease with all its keys; not an error when it has ended."""
        asked = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self.call(LEASE_REVOKE, asked, rpc.LeaseRevokeResponse, "revoke a lease")
        except LeaseEndedError:
            return

    async def lease_keep_alive(self, lease: int) -> int:
        """Renew a lease once; return its time to live in seconds, 0 when it has ended."""

        async def renew(metadata: _Metadata, timeout_s: float) -> int:
            with self._channels.asking(self._at) as channel:
                call = channel.stream_stream(
                    LEASE_KEEP_ALIVE,
                    request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
                )(iter([rpc.LeaseKeepAliveRequest(ID=lease)]), timeout=timeout_s, metadata=metadata)
                try:
                    async for answer in call:
                        return int(answer.TTL)
                finally:
                    call.cancel()  # else, cancelled as it begins, it leaves a task of grpc's that never ends
                message = f"etcd at {self.endpoint} ended a lease's stream without an answer"
                raise MembershipError(message)

        return await self._until_answered(renew, "renew a lease")  # also for who ends: he still writes

    async def call(self, path: str, asked: Message, answer: type[_Answer], what: str) -> _Answer:
        """Make one call; *what* says in an error what etcd did not do."""

        async def ask(metadata: _Metadata, timeout_s: float) -> _Answer:
            with self._channels.asking(self._at) as channel:
                call = channel.unary_unary(
                    path,
                    request_serializer=type(asked).SerializeToString,
                    response_deserializer=answer.FromString,
                )
                given: _Answer = await call(asked, timeout=timeout_s, metadata=metadata)
            return given

        self.patience.check(what)
        try:
            return await self._until_answered(ask, what)
        except StoreAwayError as error:
            self.patience.note(error)
            raise

    async def _until_answered(self, ask: _Ask[_Given], what: str) -> _Given:
        until_s = asyncio.get_running_loop().time() + self.settings.operation_timeout_s
        try:
            async with asyncio.timeout_at(until_s):
                await self._turns.acquire()
        except TimeoutError as error:
            message = f"etcd did not {what} in time: {self.settings.inflight_max} other calls were under way"
            raise StoreAwayError(message) from error
        try:
            return await self._asked_until(until_s, ask, what)
        finally:
            self._turns.release()

    async def _asked_until(self, until_s: float, ask: _Ask[_Given], what: str) -> _Given:
        loop = asyncio.get_running_loop()
        backoff = self.backoff()
        failed: MembershipError | None = None
        while True:
            endpoint, metadata = self.endpoint, _Metadata()
            try:
                async with asyncio.timeout_at(until_s):
                    metadata = await self.metadata()
                    left_s = max(_LEAST_TIMEOUT_S, until_s - loop.time())
                    return await ask(metadata, min(left_s, self.settings.request_timeout_s))
            except grpc.aio.AioRpcError as error:
                wait_s = backoff.next_s()
                failed = in_words(error, asked=what, at=endpoint)
                if not self.can_go_on(error, endpoint, metadata) or loop.time() + wait_s >= until_s:
                    raise failed from error
            except TimeoutError as error:
                if failed is not None:  # it says more than that the time is over
                    raise failed from error
                message = f"etcd at {endpoint} did not {what} within {self.settings.operation_timeout_s:g} s"
                raise StoreAwayError(message) from error
            await asyncio.sleep(wait_s)

    async def _log_in(self, user: EtcdUser) -> str:
        asked = rpc.AuthenticateRequest(name=user.name, password=_password(user))
        with self._channels.asking(self._at) as channel:
            call = channel.unary_unary(
                AUTHENTICATE,
                request_serializer=rpc.AuthenticateRequest.SerializeToString,
                response_deserializer=rpc.AuthenticateResponse.FromString,
            )
            given = await call(asked, timeout=self.settings.request_timeout_s)
        return str(given.token)

    def _logged_in(self, login: asyncio.Task[str]) -> None:
        """Keep what a login gave; how it failed is told by everybody who waited for it."""
        self._logging_in = None
        if not login.cancelled() and login.exception() is None:  # noqa: LOG004 (a task's)
            self._token = login.result()


def _password(user: EtcdUser) -> str:
    try:
        return user.read_password()
    except FormatError as error:
        message = f"the password of etcd's user {user.name} can't be read: {error}"
        raise MembershipError(message) from error
