"""Calls to etcd: over several members, with TLS, a user's token, timeouts and backoff.

A call goes to the member that answered last. Without an answer in ``request_timeout_s``, or after a refusal
for the moment, the client waits randomly and asks the next member, until ``operation_timeout_s``. A single
member is asked again, over a new connection if the old connection is silent.

A member without an answer may have executed the call, so **a call may be executed twice**. Therefore changes
compare in a transaction, and the caller reads again after a failed comparison: the difference may be its own
change.

A client belongs to the event loop of its first use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from ostraca_fabric.errors import FormatError, LeaseEndedError, MembershipError, StoreAwayError
from ostraca_fabric.membership.etcd.client import rpc_pb2 as rpc
from ostraca_fabric.membership.etcd.client.channels import Channels
from ostraca_fabric.membership.etcd.client.faults import Remedy, in_words, remedy
from ostraca_fabric.membership.etcd.client.settings import EtcdSettings, EtcdUser
from ostraca_fabric.policies.backoff import Backoff, Dice

_Answer = TypeVar("_Answer", bound="Message")
_Given = TypeVar("_Given")
_Metadata = tuple[tuple[str, str], ...]
_Ask = Callable[[_Metadata, float], Awaitable[_Given]]
"""Attempt with metadata and a timeout in seconds."""

RANGE = "/etcdserverpb.KV/Range"
TXN = "/etcdserverpb.KV/Txn"
WATCH = "/etcdserverpb.Watch/Watch"
LEASE_GRANT = "/etcdserverpb.Lease/LeaseGrant"
LEASE_REVOKE = "/etcdserverpb.Lease/LeaseRevoke"
LEASE_KEEP_ALIVE = "/etcdserverpb.Lease/LeaseKeepAlive"
AUTHENTICATE = "/etcdserverpb.Auth/Authenticate"

_LEAST_TIMEOUT_S = 0.001


def range_end(prefix: bytes) -> bytes:
    """Return the first key after all keys that begin with *prefix*."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\0"


class EtcdClient:
    """Client of etcd.

    Every method raises MembershipError if etcd is unreachable until the timeout, or refuses.
    """

    def __init__(
        self, settings: EtcdSettings, *, dice: Dice, shutdown_budget: ShutdownBudget | None = None
    ) -> None:
        """Create the client without a connection.

        *dice* selects the first member and the waits. *shutdown_budget* decides whether to wait at all.
        """
        self.settings = settings
        self.shutdown_budget = ShutdownBudget() if shutdown_budget is None else shutdown_budget
        self._dice = dice
        self.channels = Channels(settings)
        self._at = int(dice.uniform(0, len(settings.endpoints))) % len(settings.endpoints)
        self._token: str | None = None
        self._logging_in: asyncio.Task[str] | None = None
        """Login under way, shared by all callers without a token."""

        self._turns = asyncio.Semaphore(settings.inflight_max)

    @property
    def endpoint(self) -> str:
        """Endpoint of the next call."""
        return self.settings.endpoints[self._at]

    async def close(self) -> None:
        """Close every connection; calls under way fail."""
        if (login := self._logging_in) is not None:
            login.cancel()
            await asyncio.wait([login])
        await self.channels.close()

    def backoff(self) -> Backoff:
        """Return a new series of waits between attempts."""
        return Backoff(self.settings.backoff_min_s, self.settings.backoff_max_s, self._dice)

    def move_on(self, endpoint: str) -> None:
        """Switch to another member than *endpoint*, unless already done."""
        if endpoint == self.endpoint:
            self._at = (self._at + 1) % len(self.settings.endpoints)

    def channel(self) -> grpc.aio.Channel:
        """Return the connection for the next call. Raises MembershipError."""
        return self.channels.to(self._at)

    async def metadata(self) -> _Metadata:
        """Return the metadata of each call: the user's token, or empty without a user."""
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
        """Log in again before the next call, unless the token has changed since *used*."""
        if used == (("token", self._token),):
            self._token = None

    def can_go_on(self, error: grpc.aio.AioRpcError, endpoint: str, used: _Metadata) -> bool:
        """Prepare the next attempt after *error*; tell whether an attempt may succeed.

        *endpoint* and *used* are the member and the metadata of the failed attempt.
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
        """Read a key, or all keys from *key* to before *end*. The read is linearizable."""
        asked = rpc.RangeRequest(key=key, range_end=end, limit=limit)
        return await self.call(RANGE, asked, rpc.RangeResponse, "read")

    async def txn(
        self,
        compare: Iterable[rpc.Compare],
        success: Iterable[rpc.RequestOp],
        failure: Iterable[rpc.RequestOp] = (),
    ) -> rpc.TxnResponse:
        """Apply *success* if every comparison holds, else *failure*, in one step."""
        asked = rpc.TxnRequest(compare=compare, success=success, failure=failure)
        return await self.call(TXN, asked, rpc.TxnResponse, "take a transaction")

    async def lease_grant(self, ttl_s: int) -> rpc.LeaseGrantResponse:
        """Begin a lease. A lease whose answer is lost ends by itself."""
        asked = rpc.LeaseGrantRequest(TTL=ttl_s)
        return await self.call(LEASE_GRANT, asked, rpc.LeaseGrantResponse, "grant a lease")

    async def lease_revoke(self, lease: int) -> None:
        """End a lease with all its keys; no error if already ended."""
        asked = rpc.LeaseRevokeRequest(ID=lease)
        try:
            await self.call(LEASE_REVOKE, asked, rpc.LeaseRevokeResponse, "revoke a lease")
        except LeaseEndedError:
            return

    async def lease_keep_alive(self, lease: int) -> int:
        """Renew a lease once; return the time to live in seconds, or 0 if ended."""

        async def renew(metadata: _Metadata, timeout_s: float) -> int:
            with self.channels.asking(self._at) as channel:
                call = channel.stream_stream(
                    LEASE_KEEP_ALIVE,
                    request_serializer=rpc.LeaseKeepAliveRequest.SerializeToString,
                    response_deserializer=rpc.LeaseKeepAliveResponse.FromString,
                )(iter([rpc.LeaseKeepAliveRequest(ID=lease)]), timeout=timeout_s, metadata=metadata)
                try:
                    async for answer in call:
                        return int(answer.TTL)
                finally:
                    call.cancel()  # otherwise a call cancelled at its start leaves an endless grpc task
                raise MembershipError(f"etcd at {self.endpoint} ended a lease's stream without an answer")

        return await self._until_answered(renew, "renew a lease")  # also during shutdown, which still writes

    async def call(self, path: str, asked: Message, answer: type[_Answer], what: str) -> _Answer:
        """Make a call; errors name the action *what*."""
        self.shutdown_budget.check(what)
        try:
            return await self._until_answered(partial(self._ask_once, path, asked, answer), what)
        except StoreAwayError as error:
            self.shutdown_budget.note(error)
            raise

    async def _ask_once(
        self, path: str, asked: Message, answer: type[_Answer], metadata: _Metadata, timeout_s: float
    ) -> _Answer:
        with self.channels.asking(self._at) as channel:
            call = channel.unary_unary(
                path,
                request_serializer=type(asked).SerializeToString,
                response_deserializer=answer.FromString,
            )
            given: _Answer = await call(asked, timeout=timeout_s, metadata=metadata)
        return given

    async def _until_answered(self, ask: _Ask[_Given], what: str) -> _Given:
        until_s = asyncio.get_running_loop().time() + self.settings.operation_timeout_s
        try:
            async with asyncio.timeout_at(until_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise StoreAwayError(
                f"etcd did not {what} in time: {self.settings.inflight_max} other calls were under way"
            ) from error
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
                if failed is not None:  # the earlier error says more than the timeout
                    raise failed from error
                raise StoreAwayError(
                    f"etcd at {endpoint} did not {what} within {self.settings.operation_timeout_s:g} s"
                ) from error
            await asyncio.sleep(wait_s)

    async def _log_in(self, user: EtcdUser) -> str:
        asked = rpc.AuthenticateRequest(name=user.name, password=_password(user))
        timeout_s = self.settings.request_timeout_s
        given = await self._ask_once(AUTHENTICATE, asked, rpc.AuthenticateResponse, (), timeout_s)
        return str(given.token)

    def _logged_in(self, login: asyncio.Task[str]) -> None:
        """Store the token of a login; waiting callers report a failure."""
        self._logging_in = None
        if not login.cancelled() and login.exception() is None:  # noqa: LOG004 (a task's)
            self._token = login.result()


def _password(user: EtcdUser) -> str:
    try:
        return user.read_password()
    except FormatError as error:
        raise MembershipError(f"the password of etcd's user {user.name} can't be read: {error}") from error


def is_absent(key: bytes) -> rpc.Compare:
    """Return the condition that the key is absent."""
    return is_unchanged(key, 0)


def is_unchanged(key: bytes, modified: int) -> rpc.Compare:
    """Return the condition that the key's last write is revision *modified*; 0: absent."""
    return rpc.Compare(key=key, target=rpc.Compare.MOD, result=rpc.Compare.EQUAL, mod_revision=modified)


def none_written(first: bytes, end: bytes, *, since: int) -> rpc.Compare:
    """Return the condition that no key was written after revision *since*.

    Compares the keys from *first* to before *end*. Deleted keys do not count.
    """
    return rpc.Compare(
        key=first,
        range_end=end,
        target=rpc.Compare.MOD,
        result=rpc.Compare.LESS,
        mod_revision=since + 1,
    )


def is_empty(first: bytes, end: bytes) -> rpc.Compare:
    """Return the condition that no key exists from *first* to before *end*."""
    return none_written(first, end, since=0)


def put(key: bytes, value: bytes, lease: int = 0) -> rpc.RequestOp:
    """Write a key, bound to *lease* unless 0."""
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


class ShutdownBudget:
    """Shutdown limit shared by all users of etcd for a membership, in any thread."""

    def __init__(self) -> None:
        """Begin with the normal timeouts."""
        self._is_short = False
        self._failed = ""

    def shorten(self) -> None:
        """Stop asking etcd after the next operation that fails because etcd is away."""
        self._is_short = True

    def note(self, error: StoreAwayError) -> None:
        """Record that a wait for etcd failed."""
        if self._is_short and not self._failed:
            self._failed = str(error)

    def check(self, what: str) -> None:
        """Raise StoreAwayError if etcd must not be asked any more.

        The error names the action *what*.
        """
        if self._failed:
            raise StoreAwayError(
                f"etcd was not asked to {what}: etcd is unreachable, and this process is shutting down"
            )
