"""A direct connection between an agent and its managers, without a broker, where both ends reach each other.

After section 3.4 of the paper: a broker is not needed by a resource that no firewall hides, at the price of a
connection for each agent in each manager.  The messages are those of `protocol`, framed (`Link`); epochs
fence as ever.  The agent dials every manager it is told of, because any of them may come to own its resources
(`Lines` is its road then).  A manager listens (`Endpoint`) and hears and answers over lines what otherwise
comes over the bus; it passes on what an agent says to the registry (its hello, a secret it needs), and
vouches for it.

An agent proves who it is as to a broker: it signs a challenge with its key and shows its document.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import secrets
import ssl
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, ClassVar, Self

import msgspec

from muster.bus import api, subject_patterns
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.manage import protocol

events = log.EventLog("manage")

FRAME_BYTES_MAX = 4 << 20
UNSENT_BYTES_MAX = 8 << 20
HANDSHAKE_S = 5.0
REDIAL_S = 0.5
REPLY = "direct"


class LinkChallenge(msgspec.Struct, frozen=True):
    nonce: str
    manager: str


class LinkProof(msgspec.Struct, frozen=True):
    jwt: str
    signature: bytes


class DirectFrame(msgspec.Struct, frozen=True, array_like=True):
    """``reply`` names a question, and its answer's ``subject`` is that name."""

    subject: str
    reply: str
    data: bytes


class DirectMessage:
    """See `api.Message`; answered over the line it came by."""

    headers: ClassVar[api.Headers] = {}
    trace = None

    def __init__(self, frame: DirectFrame, link: DirectLink) -> None:
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
            raise errors.InvalidInput("nobody waits for an answer to this")
        with contextlib.suppress(errors.Unavailable):
            self._link.send(DirectFrame(self._frame.reply, "", data))
        return True


class DirectLink:
    """One connection, either end. ``identity`` is the agent's, ``manager`` the other's."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, identity: str, manager: str
    ) -> None:
        self.identity = identity
        self.manager = manager
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._questions: dict[str, asyncio.Future[DirectMessage]] = {}

    def send(self, frame: DirectFrame) -> None:
        transport = self._writer.transport
        if transport.is_closing():
            raise errors.NotConnected(f"the line between {self.identity} and {self.manager} is closed")
        if transport.get_write_buffer_size() > UNSENT_BYTES_MAX:
            raise errors.Overloaded(f"{self.identity} does not read what is sent to it")
        _write(self._writer, frame)

    async def request(self, subject: str, data: bytes, timeout_s: float) -> DirectMessage:
        """`errors.TimedOut` also where the line broke: what was asked may have been done."""
        name = f"{REPLY}-{next(self._numbers)}"
        answer: asyncio.Future[DirectMessage] = asyncio.get_running_loop().create_future()
        self._questions[name] = answer
        try:
            self.send(DirectFrame(subject, name, data))
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise errors.TimedOut(f"no answer to {subject} in {timeout_s:g} s") from None
        finally:
            del self._questions[name]

    async def run(self, hear: Callable[[DirectMessage], None]) -> None:
        """Until the line breaks."""
        try:
            while True:
                frame = await _read(self._reader, DirectFrame)
                message = DirectMessage(frame, self)
                question = self._questions.get(frame.subject)
                if question is None:
                    hear(message)
                elif not question.done():
                    question.set_result(message)
        except (OSError, asyncio.IncompleteReadError, errors.InvalidInput) as error:
            events.info("line-broke", agent=self.identity, manager=self.manager, error=error)
        finally:
            self.close()
            for one in self._questions.values():
                if not one.done():
                    one.set_exception(errors.TimedOut("the line broke before the answer came"))

    def close(self) -> None:
        self._writer.close()


def _write(writer: asyncio.StreamWriter, value: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(value)
    writer.write(len(data).to_bytes(4, "big") + data)


async def _read(reader: asyncio.StreamReader, kind: type[Any]) -> Any:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > FRAME_BYTES_MAX:
        raise errors.InvalidInput(f"a frame of {size} bytes")
    try:
        return msgspec.msgpack.decode(await reader.readexactly(size), type=kind)
    except msgspec.MsgspecError as error:
        raise errors.InvalidInput(f"not a frame: {error}") from error


class _Ears:
    """Handlers by the subjects they want."""

    def __init__(self) -> None:
        self._all: list[tuple[str, api.Handler]] = []
        self._tasks: set[asyncio.Future[None]] = set()

    def add(self, subject: str, handler: api.Handler) -> Callable[[], None]:
        entry = (subject, handler)
        self._all.append(entry)
        return lambda: self._all.remove(entry)

    def hear(self, message: DirectMessage) -> bool:
        """Whether anybody wanted it."""
        wanting = [
            handler for subject, handler in self._all if subject_patterns.matches(subject, message.subject)
        ]
        for handler in wanting:
            work = handler(message)
            if work is not None:
                task = asyncio.ensure_future(work)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        return bool(wanting)


# The agent's side


class DirectSubscription:
    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end

    async def close(self) -> None:
        self._end()


class AgentLinks:
    """An agent's road that is lines to managers (``HOST:PORT`` each), kept open and dialled again."""

    def __init__(self, creds: Any, addresses: Iterable[str], *, tls: ssl.SSLContext | None = None) -> None:
        self.identity: str = creds.identity
        self.links: dict[str, DirectLink] = {}  # by manager
        self._creds = creds
        self._addresses = list(addresses)
        self._tls = tls
        self._ears = _Ears()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._keep(one), name=f"line {one}") for one in self._addresses]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def publish(self, subject: str, data: bytes) -> None:
        self._link_for(subject).send(DirectFrame(subject, "", data))

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float = api.DEFAULT_TIMEOUT_S
    ) -> api.Message:
        return await self._link_for(subject).request(subject, data, timeout_s)

    async def subscribe(self, subject: str, *, handler: api.Handler) -> DirectSubscription:
        return DirectSubscription(self._ears.add(subject, handler))

    def _link_for(self, subject: str) -> DirectLink:
        """To the manager that the subject names; what names none goes to any."""
        named = self.links.get(subject.rpartition(".")[2])
        link = named or (None if _names_manager(subject) else next(iter(self.links.values()), None))
        if link is None:
            raise errors.NotConnected(f"{self.identity} has no line for {subject}")
        return link

    async def _keep(self, address: str) -> None:
        while True:
            try:
                link = await self._dial(address)
            except (OSError, TimeoutError, asyncio.IncompleteReadError, errors.MusterError) as error:
                events.info("no-line", address=address, error=error)
            else:
                self.links[link.manager] = link
                try:
                    await link.run(lambda message: _discard(self._ears.hear(message)))
                finally:
                    if self.links.get(link.manager) is link:
                        del self.links[link.manager]
            await asyncio.sleep(REDIAL_S)

    async def _dial(self, address: str) -> DirectLink:
        host, _, port = address.rpartition(":")
        async with asyncio.timeout(HANDSHAKE_S):
            reader, writer = await asyncio.open_connection(host, int(port), ssl=self._tls)
            try:
                challenge: LinkChallenge = await _read(reader, LinkChallenge)
                _write(writer, LinkProof(self._creds.user_jwt, self._creds.answer(challenge.nonce)))
                welcome: DirectFrame = await _read(reader, DirectFrame)
            except BaseException:
                writer.close()
                raise
        if welcome.subject != self.identity:
            writer.close()
            raise errors.Unauthorized(f"{challenge.manager} refuses {self.identity}")
        return DirectLink(reader, writer, self.identity, challenge.manager)


def _names_manager(subject: str) -> bool:
    return subject.split(".")[4:5] in (["beat"], ["event"])


def _discard(_: object) -> None:
    pass


# The manager's side


#: What an agent says to the registry, and how its manager's word for it ends.
_PASSED_ON: dict[str, tuple[str, ...]] = {
    protocol.HELLO: (),
    f"request.{protocol.SECRET}": (protocol.SECRET,),
}

#: From an agent's document, a challenge and its signature to the agent's identity; raises our errors.
Check = Callable[[str, str, bytes], Awaitable[str]]


class DirectEndpoint:
    """Where agents dial; and a bus (`Road`) for the manager that takes a line where there is one."""

    def __init__(
        self,
        bus: api.Bus,
        check: Check,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.links: dict[str, DirectLink] = {}  # by agent
        self.road = ManagerTransport(bus, self)
        self._bus = bus
        self._check = check
        self._listen = (host, port, tls)
        self._ears = _Ears()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        host, port, tls = self._listen
        self._server = await asyncio.start_server(self._begin, host, port, ssl=tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def port(self) -> int:
        assert self._server is not None
        found: int = self._server.sockets[0].getsockname()[1]
        return found

    def listen(self, subject: str, handler: api.Handler) -> None:
        self._ears.add(subject, handler)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer), name="direct")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                challenge = LinkChallenge(secrets.token_urlsafe(16), self._bus.identity)
                _write(writer, challenge)
                proof: LinkProof = await _read(reader, LinkProof)
                identity = await self._check(proof.jwt, challenge.nonce, proof.signature)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, errors.MusterError) as error:
            events.warning("line-refused", error=error)
            writer.close()
            return
        link = self.links[identity] = DirectLink(reader, writer, identity, self._bus.identity)
        still = functools.partial(self._check, proof.jwt, challenge.nonce, proof.signature)
        link.send(DirectFrame(identity, "", b""))
        events.info("line-open", agent=identity)
        try:
            await link.run(lambda message: self._hear(link, message, still))
        finally:
            if self.links.get(identity) is link:
                del self.links[identity]

    def _hear(self, link: DirectLink, message: DirectMessage, still: Callable[[], Awaitable[str]]) -> None:
        """An agent speaks for itself only, and only about management."""
        identity = link.identity
        if not message.subject.startswith(subjects.from_identity(protocol.PART, identity, "")):
            events.warning("line-forged", agent=identity, subject=message.subject[:200])
            return
        passed_on = _PASSED_ON.get(message.subject.split(".", 4)[4])
        if passed_on is not None:
            subject = protocol.vouch_subject(self._bus.identity, identity, *passed_on)
            task = asyncio.create_task(self._vouch(link, message, subject, still))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._ears.hear(message)

    async def _vouch(
        self, link: DirectLink, message: DirectMessage, subject: str, still: Callable[[], Awaitable[str]]
    ) -> None:
        """Pass it on; and see whether the agent may still come in: it says hello now and then."""
        try:
            await still()
        except errors.MusterError as error:
            events.warning("line-cut", agent=link.identity, error=error)
            link.close()
            return
        with contextlib.suppress(errors.Unavailable, errors.InvalidInput):
            answer = await self._bus.request(subject, message.data)
            await message.respond(answer.data)


class ManagerTransport:
    """The manager's bus, with lines where there are any; everything else is the bus's own."""

    def __init__(self, bus: api.Bus, endpoint: DirectEndpoint) -> None:
        self._bus = bus
        self._endpoint = endpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bus, name)

    async def subscribe(self, subject: str, **options: Any) -> api.Subscription:
        self._endpoint.listen(subject, options["handler"])
        return await self._bus.subscribe(subject, **options)

    async def request(
        self, subject: str, data: bytes, *, timeout_s: float = api.DEFAULT_TIMEOUT_S, **options: Any
    ) -> api.Message:
        words = subject.split(".", 4)
        link = self._endpoint.links.get(words[3]) if words[2] == "to" else None
        if link is not None:
            return await link.request(subject, data, timeout_s)
        return await self._bus.request(subject, data, timeout_s=timeout_s, **options)
