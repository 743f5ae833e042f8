"""The client of the information service.

inform = client.InformClient(bus)
written = await inform.put("printers/3", b"<printer/>", attributes={"floor": 2})
context = await inform.get("printers/3", max_staleness_s=1.0)
async for change in inform.watch("printers/3"):
    ...
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Literal

import msgspec

from muster.bus import api
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import nearest
from muster.bus.rpc import client
from muster.core import errors
from muster.inform import protocol
from muster.predicates.syntax import parser

TIMEOUT_S = 30.0  # a write waits out a silent primary and the selection of another
HEDGE_S = 0.25  # a read without a reply for so long is also sent to another node
SLOW_HEDGE_S = 3.0  # the same for requests that query all nodes, and for writes
AVOID_S = 15.0  # how long requests go to a node that replies, after another one was silent
FOUND_BYTES_MAX = 32 << 20  # total size of the values in the result of one search
RETRY_S = 0.2
WAIT_S = 5.0  # the longest delay until the loss of the node is noticed


async def watch(
    connected: Callable[[], Awaitable[InformClient]], key: str, *, after_version: int = 0
) -> AsyncIterator[protocol.ContextChange]:
    """Like `InformClient.watch`; calls ``connected`` for the client of each step."""
    position, is_deleted = after_version, False
    while True:
        inform = await connected()
        try:
            changes = await inform.changes(key, after_version=position)
        except errors.NotFound:
            if not is_deleted:
                raise
            position = 0  # the deletion was received and has been purged: all later changes are new
            continue
        for change in changes:
            position, is_deleted = change.version, change.value is None
            yield change


class InformClient:
    def __init__(self, bus: api.Bus, *, node: str = protocol.ANY, timeout_s: float = TIMEOUT_S) -> None:
        """``node``: send all requests to this node; by default to any node."""
        self._bus = nearest.of(bus, protocol.PART, _node_of)
        self._node = node
        self._timeout_s = timeout_s
        self._requests = map(f"{uuid.uuid4().hex[:24]}-{{:x}}".format, itertools.count())
        self._responsive = ""  # a node that replied when another one was silent
        self._responsive_until_s = 0.0

    async def put(
        self,
        key: str | None,
        value: bytes,
        *,
        attributes: Mapping[str, protocol.Attribute] | None = None,
        lease_s: float = 0.0,
        expected_version: int | None = None,
        ack: Literal["logged", "replicated"] = "logged",
    ) -> protocol.WriteResult:
        """Return when the log has the write (``replicated``: when the permanent replicas have it as well).

        Without a ``key`` the system assigns one.  ``expected_version``: `errors.Conflict` if the context has
        another version (0: it must not exist).
        """
        write = protocol.PutContext(
            "" if key is None else protocol.check_key(key),
            value,
            dict(attributes or {}),
            lease_s,
            expected_version,
            ack,
            next(self._requests),
        )
        return await self.write(write)

    async def delete(self, key: str, *, expected_version: int | None = None) -> protocol.WriteResult:
        return await self.write(protocol.DeleteContext(key, expected_version, next(self._requests)))

    async def write(self, write: protocol.PutContext | protocol.DeleteContext) -> protocol.WriteResult:
        """Send a write whose ``request`` id the caller has chosen, and repeat it until a node replies.

        With ``repeat`` the write may have been sent before: within three minutes it is stored at most once.
        `errors.TimedOut`: it may have been stored.
        """
        now_s = asyncio.get_running_loop().time
        sent_at_s = now_s()
        try:
            return await client.unthrottled(lambda _: self._write(write), self._timeout_s)
        except (errors.Conflict, errors.NotFound):
            if write.repeat or now_s() - sent_at_s < SLOW_HEDGE_S:
                raise
        # The first attempt was rejected, but a repetition of it may be under way and still be stored. The
        # rejection of a repetition makes sure that no attempt is stored later.
        return await self._write(msgspec.structs.replace(write, repeat=True))

    async def _write(self, write: protocol.PutContext | protocol.DeleteContext) -> protocol.WriteResult:
        verb = "put" if isinstance(write, protocol.PutContext) else "delete"
        now_s = asyncio.get_running_loop().time
        sent_at_s = now_s()
        try:
            message = await self._exchange(
                verb,
                protocol.encode(write),
                hedge_s=SLOW_HEDGE_S,
                repeated=protocol.encode(msgspec.structs.replace(write, repeat=True)),
            )
            return protocol.result_of(message.data, protocol.WriteResult)
        except errors.TimedOut:
            raise
        except errors.Unavailable as error:
            # It was not executed, unless this is the reply to a repetition: another attempt may be under way.
            if not write.repeat and now_s() - sent_at_s < SLOW_HEDGE_S:
                raise
            raise errors.TimedOut(f"{write.key!r} may have been written: {error}") from error

    async def get(self, key: str, *, max_staleness_s: float | None = None) -> protocol.Context:
        """Read a context; `errors.NotFound` if it does not exist.

        ``max_staleness_s`` sets the freshness of the read: by default a replica of any age (the reply states
        the age), else a replica of at most that age.  With 0 the read is linearizable: the log confirms,
        after the request arrived, that there is nothing newer.
        """
        return await self._request("get", protocol.GetContext(key, max_staleness_s), protocol.Context)

    async def find(
        self, predicate: str, *, limit: int = 100, after: str = "", within_s: float = float("inf")
    ) -> protocol.FindResult:
        """Return the contexts that match the predicate, in key order; at most ``limit``, up to 10,000.

        The result has fewer if the values are large (`FOUND_BYTES_MAX`) or if reading all keys takes longer
        than ``within_s``.  If ``more`` is set, continue with ``after`` set to ``reached``.  Mounted
        registries are searched too; their contexts have the name of the mount as ``source``.
        """
        parser.parse(predicate)  # report syntax errors before any request
        contexts: list[protocol.Context] = []
        failed: dict[str, str] = {}
        silent: dict[str, None] = {}  # in the order of detection
        cut: set[str] = set()
        size = 0
        now_s = asyncio.get_running_loop().time
        until_s = now_s() + within_s
        while True:
            # More names might not fit into a request: the node waits for the others again.
            without = (*itertools.islice(silent, protocol.SILENT_MAX), *failed)
            query = protocol.FindContexts(predicate, limit - len(contexts), after, without)
            page = await self._request("find", query, protocol.FindResult)
            contexts += page.contexts
            silent |= dict.fromkeys(page.silent)
            failed |= page.failed
            cut |= set(page.cut)
            after = page.reached or (contexts[-1].key if contexts else after)
            size += sum(len(context.value) for context in page.contexts)
            enough = len(contexts) >= limit or size > FOUND_BYTES_MAX or (after and now_s() > until_s)
            if enough or not page.more:
                named = sorted(silent)
                return protocol.FindResult(
                    contexts, named, page.more, failed, after, sorted(cut), page.silent_more
                )

    async def history(self, key: str, *, after_version: int = 0) -> protocol.ContextHistory:
        """Return the changes after that version as far back as the log goes, oldest first."""
        first = await self._request(
            "history", protocol.WaitForChanges(key, after_version), protocol.ContextHistory
        )
        changes, more = list(first.changes), first.more
        while more:
            rest = await self._request(
                "history", protocol.WaitForChanges(key, changes[-1].version), protocol.ContextHistory
            )
            changes += rest.changes
            more = rest.more
        return protocol.ContextHistory(changes, first.complete)

    async def watch(self, key: str, *, after_version: int = 0) -> AsyncGenerator[protocol.ContextChange]:
        """Yield every change after that version, in order, without end; continues if a node is lost.

        `errors.NotFound` if the log no longer has the next change. After a deletion, it continues with the
        first change that the log has.
        """

        async def always() -> InformClient:
            return self

        async for change in watch(always, key, after_version=after_version):
            yield change

    async def watch_prefix(
        self, prefix: str, *, after_version: int | None = None
    ) -> AsyncGenerator[protocol.ContextChange]:
        """Yield every change of the contexts whose keys begin with ``prefix``, after that version or from now
        on, in the order of the log.
        """
        position = await self.log_position() if after_version is None else after_version
        while True:
            request = protocol.WaitForChanges(prefix, position, WAIT_S, prefix=True)
            try:
                history = await self._request("changes", request, protocol.ContextHistory, WAIT_S + 2.0)
            except errors.TimedOut:
                continue
            except errors.Unavailable:
                await self._before_repeating()
                continue
            if not history.complete:
                raise errors.NotFound(f"the log has no version {position}: it was restored")
            for change in history.changes:
                yield change
            position = history.position

    async def _before_repeating(self) -> None:
        if self._bus.state is api.ConnectionState.CLOSED:
            raise errors.NotConnected("the connection is closed")
        await asyncio.sleep(RETRY_S)

    async def log_position(self) -> int:
        """The version of the latest change of any context."""
        request = protocol.WaitForChanges("", -1, prefix=True)
        return (await self._request("changes", request, protocol.ContextHistory)).position

    async def changes(self, key: str, *, after_version: int = 0) -> Sequence[protocol.ContextChange]:
        """One step of `watch`: the changes after that version, or none after some seconds."""
        try:
            history = await self._request(
                "changes",
                protocol.WaitForChanges(key, after_version, WAIT_S),
                protocol.ContextHistory,
                WAIT_S + 2.0,
            )
        except errors.TimedOut:
            return ()
        except errors.Unavailable:
            await self._before_repeating()
            return ()
        if after_version and not history.complete:
            raise errors.NotFound(
                f"the changes of {key!r} after version {after_version} are no longer in the log",
                hint="read the context, and watch from the version of the result",
            )
        return history.changes

    async def where(self, key: str) -> protocol.ReplicaList:
        """Return the replicas of a context, the primary first; incomplete if there are ``silent`` nodes."""
        replicas: list[protocol.ReplicaInfo] = []
        silent: set[str] = set()
        silent_more = 0
        after: str | None = ""
        while after is not None:
            page = await self._request("where", protocol.Where(key, after), protocol.ReplicaList)
            replicas += page.replicas
            silent.update(page.silent)
            silent_more = max(silent_more, page.silent_more)
            after = page.next
        return protocol.ReplicaList(replicas, silent=sorted(silent), silent_more=silent_more)

    async def nodes(self) -> list[protocol.NodeInfo]:
        """Return all nodes, as seen by one of them."""
        views: list[protocol.NodeInfo] = []
        after: str | None = ""
        node = self._node
        while after is not None:
            query = protocol.Nodes(after)
            page = await self._request("nodes", query, protocol.Page[protocol.NodeInfo], node=node)
            views += page.items
            after, node = page.next, page.source
        return views

    async def _request(
        self,
        verb: str,
        request: object,
        answer: type[protocol.T],
        timeout_s: float | None = None,
        *,
        node: str | None = None,
    ) -> protocol.T:
        hedge_s = HEDGE_S if verb == "get" else SLOW_HEDGE_S
        if isinstance(request, protocol.WaitForChanges):
            hedge_s += request.wait_s
        data = protocol.encode(request)

        async def attempt(left_s: float) -> protocol.T:
            message = await self._exchange(verb, data, hedge_s=hedge_s, timeout_s=left_s, node=node)
            return protocol.result_of(message.data, answer)

        return await client.unthrottled(attempt, timeout_s or self._timeout_s)

    async def _exchange(
        self,
        verb: str,
        data: bytes,
        *,
        hedge_s: float,
        timeout_s: float | None = None,
        node: str | None = None,
        repeated: bytes | None = None,
    ) -> api.Message:
        """Send a request; after ``hedge_s`` without a reply also to another node, and so on.

        A node that is frozen receives its share of the requests until its broker disconnects it. So after a
        late reply the next requests go directly to the node that sent it.
        """
        now_s = asyncio.get_running_loop().time
        sent_at_s = now_s()
        target = node or self._node
        subject = anywhere = protocol.request_subject(self._bus.identity, verb, target)
        if sent_at_s < self._responsive_until_s and target == protocol.ANY:
            subject = protocol.request_subject(self._bus.identity, verb, self._responsive)
        timeout_s = timeout_s or self._timeout_s
        repeat = api.Repetition(hedge_s, anywhere, repeated)
        try:
            message = await client.exchange_repeated(
                self._bus, subject, data, timeout_s=timeout_s, repeat=repeat
            )
        except errors.TimedOut:
            doubt = "" if repeated is None else "; it may have been written"
            raise errors.TimedOut(f"no reply in {timeout_s:g} s{doubt}") from None
        except errors.Unavailable as error:
            if subject == anywhere:
                raise copy.copy(_ABSENT) from error
            self._responsive_until_s = 0.0
            return await self._exchange(
                verb, data, hedge_s=hedge_s, timeout_s=timeout_s, node=node, repeated=repeated
            )
        if now_s() - sent_at_s >= hedge_s:
            self._responsive = protocol.responder_of(message.data)
            self._responsive_until_s = now_s() + AVOID_S if self._responsive else 0.0
        return message


def _node_of(subject: str) -> str:
    """The node that a request is for."""
    node = subject.split(".", 6)[5]
    return direct_bus.ANY if node == protocol.ANY else node


_ABSENT = errors.Unavailable(
    "no information node listens on this bus", hint="enable [inform] in the settings of the domain"
)
