"""Direct connections between an agent and its managers, without a broker.

After section 3.4 of the paper: a resource that no firewall hides does not need a broker, at the cost of a
connection to each manager. The messages are those of `protocol`, in frames (`DirectLink`); epochs fence as
usual. The agent connects to every configured manager, because any of them may own its resources
(`AgentLinks`). A manager listens (`endpoint.DirectEndpoint`) and serves both links and bus; it forwards the
agent's requests to the registry (its hello, a secret).

An agent authenticates as it does to a broker: it signs a challenge with its key and presents its signed
document.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Self

from muster.bus import api, subject_patterns
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.manage.direct import frames
from muster.supervision import tasks

events = log.EventLog("manage")

UNSENT_BYTES_MAX = 8 << 20
RECONNECT_S = 0.5
REPLY = "direct"


class DirectMessage:
    """See `api.Message`; replies use the link the message arrived on."""

    headers: ClassVar[api.Headers] = {}
    trace = None

    def __init__(self, frame: frames.DirectFrame, link: DirectLink) -> None:
        self.subject = frame.subject
        self.data = frame.data
        self.reply = f"{subjects.reply_prefix(frame.subject)}{frame.reply}" if frame.reply else None
        self._link = link
        self._frame = frame

    def header(self, name: str) -> str | None:
        return self.headers.get(name)

    async def respond(self, data: bytes, *, headers: api.Headers | None = None) -> None:
        del headers
        self.respond_now(data)

    def respond_now(self, data: bytes) -> bool:
        if not self._frame.reply:
            raise errors.InvalidInput("the message expects no reply")
        with contextlib.suppress(errors.Unavailable):
            self._link.send(frames.DirectFrame(self._frame.reply, "", data))
        return True


class DirectLink:
    """One end of a connection. ``identity`` is the agent's, ``manager`` that of the manager."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: str, manager: str
    ) -> None:
        self.identity = identity
        self.manager = manager
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._pending: dict[str, asyncio.Future[DirectMessage]] = {}

    def send(self, frame: frames.DirectFrame) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            raise errors.NotConnected(f"the link between {self.identity} and {self.manager} is closed")
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            raise errors.Overloaded(f"{self.identity} does not read its messages")
        frames.write(self._writer, frame)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> DirectMessage:
        """Raises `errors.TimedOut` also if the link fails: the request may have been executed."""
        name = f"{REPLY}-{next(self._numbers)}"
        answer: asyncio.Future[DirectMessage] = asyncio.get_running_loop().create_future()
        self._pending[name] = answer
        try:
            self.send(frames.DirectFrame(subject, name, data))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise errors.TimedOut(f"no reply to {subject} within {timeout_s:g} s") from None
        finally:
            del self._pending[name]

    async def run(self, dispatch: Callable[[DirectMessage], None]) -> None:
        """Receive frames until the link fails."""
        try:
            while True:
                frame = await frames.read(self._reader, frames.DirectFrame)
                message = DirectMessage(frame, self)
                pending = self._pending.get(frame.subject)
                if pending is None:
                    dispatch(message)
                elif not pending.done():
                    pending.set_result(message)
        except (OSError, asyncio.IncompleteReadError, errors.InvalidInput) as error:
            events.info("link-failed", agent=self.identity, manager=self.manager, error=error)
        finally:
            self.close()
            for reply in self._pending.values():
                if not reply.done():
                    reply.set_exception(errors.TimedOut("the link failed before the reply arrived"))

    def close(self) -> None:
        self._writer.close()


async def _as_coroutine(work: Awaitable[None]) -> None:
    await work


class SubjectHandlers:
    """Handlers by subject pattern."""

    def __init__(self, supervisor: tasks.TaskSupervisor) -> None:
        self._all: list[tuple[str, api.Handler]] = []
        self._tasks = supervisor

    def add(self, subject: str, handler: api.Handler) -> Callable[[], None]:
        entry = (subject, handler)
        self._all.append(entry)
        return lambda: self._all.remove(entry)

    def dispatch(self, message: DirectMessage) -> bool:
        """Call the handlers of the message. Returns whether there were any."""
        matching = [
            handler for subject, handler in self._all if subject_patterns.matches(subject, message.subject)
        ]
        for handler in matching:
            work = handler(message)
            if work is not None:
                self._tasks.spawn("handler", _as_coroutine(work))
        return bool(matching)


# Agent side


class DirectSubscription:
    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    async def close(self) -> None:
        self._end()


class AgentLinks:
    """An agent's links to managers (``HOST:PORT`` each), reconnected after failures. ``reload`` reads the
    credentials again, which may have been renewed; it blocks."""

    def __init__(
        self,
        creds: Any,
        addresses: Iterable[str],
        *,
        tls: ssl.SSLContext | None = None,
        reload: Callable[[], Any] | None = None,
    ) -> None:
        self.identity: str = creds.identity
        self.links: dict[str, DirectLink] = {}  # by manager
        self._creds = creds
        self._reload = reload
        self._addresses = list(addresses)
        self._tls = tls
        self._tasks = tasks.TaskSupervisor(f"links of {self.identity}")
        self._handlers = SubjectHandlers(self._tasks)

    async def __aenter__(self) -> Self:
        for address in self._addresses:
            self._tasks.loop(f"link {address}", functools.partial(self._keep_connected, address))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()

    @property
    def state(self) -> api.ConnectionState:
        return api.ConnectionState.CONNECTED if self.links else api.ConnectionState.RECONNECTING

    async def publish(self, subject: str, data: bytes) -> None:
        self._link_for(subject).send(frames.DirectFrame(subject, "", data))

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float = api.DEFAULT_TIMEOUT_S
    ) -> api.Message:
        return await self._link_for(subject).request(subject, data, timeout_s)

    async def subscribe(self, subject: str, *, handler: api.Handler) -> DirectSubscription:
        return DirectSubscription(self._handlers.add(subject, handler))

    def _link_for(self, subject: str) -> DirectLink:
        """The link to the manager in the subject; any link for other subjects."""
        named = self.links.get(subject.rpartition(".")[2])
        link = named or (None if _names_manager(subject) else next(iter(self.links.values()), None))
        if link is None:
            raise errors.NotConnected(f"{self.identity} has no link for {subject}")
        return link

    async def _keep_connected(self, address: str) -> None:
        while True:
            try:
                link = await self._connect(address)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, errors.MusterError) as error:
                events.info("link-unavailable", address=address, error=error)
            else:
                self.links[link.manager] = link
                try:
                    await link.run(lambda message: _discard(self._handlers.dispatch(message)))
                finally:
                    if self.links.get(link.manager) is link:
                        del self.links[link.manager]
            await asyncio.sleep(RECONNECT_S)

    async def _connect(self, address: str) -> DirectLink:
        host, _, port = address.rpartition(":")
        if self._reload is not None:
            self._creds = await asyncio.to_thread(self._reload)
        async with asyncio.timeout(frames.HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=self._tls)
            try:
                challenge: frames.LinkChallenge = await frames.read(
                    reader, frames.LinkChallenge, bytes_max=frames.HANDSHAKE_BYTES_MAX
                )
                frames.write(
                    writer, frames.LinkProof(self._creds.user_jwt, self._creds.answer(challenge.nonce))
                )
                welcome: frames.DirectFrame = await frames.read(reader, frames.DirectFrame)
            except BaseException:
                writer.close()
                raise
        if welcome.subject != self.identity:
            writer.close()
            raise errors.Unauthorized(f"{challenge.manager} rejected {self.identity}")
        return DirectLink(reader, writer, self.identity, challenge.manager)


def _names_manager(subject: str) -> bool:
    return subject.split(".")[4:5] in (["beat"], ["event"])


def _discard(_: object) -> None:
    pass
