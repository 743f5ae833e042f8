"""The manager's side of direct links: it accepts agents, and uses a link where there is one."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
from collections.abc import Awaitable, Callable
from typing import Any, Self

from muster.bus import api
from muster.bus.rpc import client
from muster.core import errors, subjects
from muster.core.telemetry import log
from muster.manage import protocol
from muster.manage.direct import frames, links
from muster.supervision import tasks

events = log.EventLog("manage")

#: Requests of an agent to the registry, and the suffix of the forwarded subject.
_FORWARDED: dict[str, tuple[str, ...]] = {
    protocol.HELLO: (),
    f"request.{protocol.SECRET}": (protocol.SECRET,),
}

#: From an agent's document, a challenge and its signature to the agent's identity; raises `core.errors`.
Check = Callable[[str, str, bytes], Awaitable[str]]


class DirectEndpoint:
    """Accepts links of agents; ``transport`` is the manager's bus, which uses a link if there is one."""

    def __init__(
        self,
        bus: api.Bus,
        check: Check,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.links: dict[str, links.DirectLink] = {}  # by agent
        self.transport = ManagerTransport(bus, self)
        self._bus = bus
        self._check = check
        self._listen = (host, port, tls)
        self._tasks = tasks.TaskSupervisor(f"direct links of {bus.identity}")
        self._handlers = links.SubjectHandlers(self._tasks)
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        host, port, tls = self._listen
        self._server = await asyncio.start_server(self._begin, host, port, ssl=tls)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._tasks.close()

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def listen(self, subject: str, handler: api.Handler) -> None:
        self._handlers.add(subject, handler)

    def _begin(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.spawn("link", self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                challenge = frames.LinkChallenge(secrets.token_urlsafe(16), self._bus.identity)
                frames.write(writer, challenge)
                proof: frames.LinkProof = await frames.read(
                    reader, frames.LinkProof, bytes_max=frames.HANDSHAKE_BYTES_MAX
                )
                identity = await self._check(proof.jwt, challenge.nonce, proof.signature)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, errors.MusterError) as error:
            events.warning("link-rejected", error=error)
            writer.close()
            return
        link = self.links[identity] = links.DirectLink(reader, writer, identity, self._bus.identity)
        recheck = functools.partial(self._check, proof.jwt, challenge.nonce, proof.signature)
        link.send(frames.DirectFrame(identity, "", b""))
        events.info("link-open", agent=identity)
        try:
            await link.run(lambda message: self._receive(link, message, recheck))
        finally:
            if self.links.get(identity) is link:
                del self.links[identity]

    def _receive(
        self, link: links.DirectLink, message: links.DirectMessage, recheck: Callable[[], Awaitable[str]]
    ) -> None:
        """An agent may only use its own subjects of the management service."""
        identity = link.identity
        if not message.subject.startswith(subjects.from_identity(protocol.PART, identity, "")):
            events.warning("link-forged-subject", agent=identity, subject=message.subject[:200])
            return
        forwarded = _FORWARDED.get(message.subject.split(".", 4)[4])
        if forwarded is not None:
            subject = protocol.vouch_subject(self._bus.identity, identity, *forwarded)
            self._tasks.spawn("request", self._forward(link, message, subject, recheck))
        else:
            self._handlers.dispatch(message)

    async def _forward(
        self,
        link: links.DirectLink,
        message: links.DirectMessage,
        subject: str,
        recheck: Callable[[], Awaitable[str]],
    ) -> None:
        """Forward a request, and check that the agent is still authorized: it announces itself
        periodically.
        """
        try:
            await recheck()
        except errors.MusterError as error:
            events.warning("link-closed", agent=link.identity, error=error)
            link.close()
            return
        with contextlib.suppress(errors.Unavailable, errors.InvalidInput):
            answer = await client.exchange_once(self._bus, subject, message.data)
            await message.respond(answer.data)


class ManagerTransport:
    """The manager's bus, with links where they exist; everything else is passed to the bus."""

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
        tokens = subject.split(".", 4)
        link = self._endpoint.links.get(tokens[3]) if tokens[2] == "to" else None
        if link is not None:
            return await link.request(subject, data, timeout_s)
        return await self._bus.request(subject, data, timeout_s=timeout_s, **options)
