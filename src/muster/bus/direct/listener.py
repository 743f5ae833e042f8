"""Accepts direct connections for a bus.

Before its client is authenticated a connection costs little: their number is limited, for each address too,
and so are the size of what is read from them, their time, and the share of the event loop that handshakes
of an address use. Afterwards the connections of an identity are limited, and what they hold in memory.
What a broker checks at a login is checked every `AUDIT_S` again: a revoked or expired identity is
disconnected, and changed permissions take effect.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import secrets
import ssl
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from muster.bus import api
from muster.bus.client import credential_source
from muster.bus.direct import bus as direct_bus
from muster.bus.direct import frames, link
from muster.bus.rpc import requests, server
from muster.core import errors, lifecycle, subjects
from muster.core.net import connection_limits, hosts
from muster.core.telemetry import log
from muster.supervision import tasks

events = log.EventLog("direct")

AUDIT_S = 1.0
CONNECTIONS_MAX, OF_IDENTITY_MAX = 4_096, 256
HANDSHAKES_MAX, OF_ADDRESS_MAX = 256, 64  # connections that are not authenticated yet
HANDSHAKE = (
    4.0  # ms of the event loop, charged to the address (`admission`): signatures, and the keys are read
)
HELD_BYTES_MAX = 32 << 20  # in memory for one identity: unsent to it, and frames that have not ended
GROUP = "direct"
OPERATION = f"{server.READ}.direct"  # asks a service for the address of one of its processes


def port_of(ports: Sequence[int], number: int) -> int | None:
    """The port of process ``number`` (from 1), where ``ports`` are configured: 0 is a free one, also for
    further processes; None: it does not listen."""
    if number <= len(ports):
        return ports[number - 1]
    return 0 if ports and ports[-1] == 0 else None


class Admitted(Protocol):
    """The rights of an identity."""

    @property
    def identity(self) -> str: ...
    @property
    def public_key(self) -> str: ...
    @property
    def allow(self) -> Sequence[str]: ...
    @property
    def deny(self) -> Sequence[str]: ...
    @property
    def expires_at(self) -> int: ...  # 0: never


class LoginCheck(Protocol):
    """Decides as the brokers do; see `muster.trust.peer_admission`. Its methods block.

    ``version`` differs when a decision may have changed.
    """

    def admit(self, document: str) -> Admitted: ...
    def version(self) -> object: ...
    def check_answer(self, public_key: str, nonce: str, answer: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class _Login:
    document: str
    version: object
    admitted: Admitted


class DirectListener(lifecycle.ServiceContext):
    """``creds``: those of this process, which prove its identity. ``names``: the hosts to announce. ``part``:
    the service that this process belongs to, if clients may use any of its processes: then they may ask for
    the address (`nearest`)."""

    def __init__(
        self,
        bus: direct_bus.DirectBus,
        check: LoginCheck,
        creds: Callable[[], credential_source.CredentialSource],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        names: Sequence[str] = (),
        part: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        if tls is None and not hosts.is_loopback(host):
            raise errors.InvalidInput(
                f"direct connections on {host} need TLS", hint="listen on loopback, or enable bus.tls"
            )
        self.refused: Counter[str] = Counter()  # connections, by reason
        self._bus = bus
        self._check = check
        self._creds = creds
        self._listen = (host, port)
        self._tls = tls
        self._names = tuple(names) or (host,)
        self._part = part
        self._clock = clock
        self._server: asyncio.Server | None = None
        self._asked: server.RpcServer | None = None
        self._subscription: api.Subscription | None = None
        self._greeting = connection_limits.ConnectionLimits(HANDSHAKES_MAX, OF_ADDRESS_MAX)
        self._links: dict[link.DirectLink, _Login] = {}
        self._of_identity: dict[str, list[link.DirectLink]] = {}
        self._tasks = tasks.TaskSupervisor(f"direct connections to {bus.identity}")

    def __len__(self) -> int:
        return len(self._links)

    async def start(self) -> None:
        host, port = self._listen
        self._server = await asyncio.get_running_loop().create_server(
            lambda: link.DirectLink(
                self._bus.deliver,
                payload_bytes_max=self._bus.payload_bytes_max,
                on_connected=self._connected,
            ),
            host,
            port,
        )
        creds = await asyncio.to_thread(self._creds)
        port = self._server.sockets[0].getsockname()[1]
        self.address = frames.PeerAddress(
            identity=self._bus.identity,
            addresses=tuple(f"[{name}]:{port}" if ":" in name else f"{name}:{port}" for name in self._names),
            key=creds.public_key,
            tls=self._tls is not None,
        )
        self._tasks.loop("audit", self._audit_always)
        if self._part:
            await self._answer_clients()
        events.info("listening", addresses=", ".join(self.address.addresses))

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()
        if self._asked is not None:
            await self._asked.close()
        if self._server is not None:
            self._server.close()
        for opened in list(self._links):
            opened.close("the listener has stopped")
        await self._tasks.close()

    async def _answer_clients(self) -> None:
        async def announce() -> frames.PeerAddress:
            return self.address

        operation = server.RpcOperation.plain(OPERATION, announce)
        asked = self._asked = server.RpcServer(self._bus.as_bus(), self._part, [operation])
        pattern = subjects.from_identity(self._part, "*", OPERATION)

        def receive(message: api.Message) -> None:
            caller = requests.accept(message, pattern, asked.refused, admit=asked.admit)
            if caller is not None:
                asked.submit(caller, operation)

        self._subscription = await self._bus.subscribe(pattern, group=GROUP, handler=receive)

    # A connection.

    def _connected(self, made: link.DirectLink) -> None:
        budgets, now_s = self._bus.admission, asyncio.get_running_loop().time()
        address = f"@{hosts.network(made.address)}"  # no identity
        if budgets.wait_s(address, now_s) or not self._greeting.add(made, made.address):
            self._count("handshakes")
            made.close("too many connections are in their handshake")
            return
        budgets.charge(address, HANDSHAKE, now_s)
        self._tasks.spawn("connection", self._serve(made))

    def _count(self, reason: str) -> None:
        if not self.refused[reason]:
            events.warning("connection-refused", reason=reason)
        self.refused[reason] += 1

    async def _serve(self, made: link.DirectLink) -> None:
        try:
            async with asyncio.timeout(frames.HANDSHAKE_S):
                login = await self._authenticate(made)
        except errors.Refused as error:
            self._count("credentials")
            made.refuse(str(error))
            return
        except (OSError, TimeoutError, errors.MusterError) as error:
            self._count("handshake")
            made.close(str(error) or "the handshake took too long")
            return
        except BaseException:
            made.close()
            raise
        finally:
            self._greeting.discard(made)
        identity = login.admitted.identity
        if len(self._links) >= CONNECTIONS_MAX or len(self._of_identity.get(identity, ())) >= OF_IDENTITY_MAX:
            self._count("connections")
            made.refuse("it has too many connections")
            return
        made.open(identity, self._bus.identity)
        made.may_send = _may_publish(login.admitted)
        made.budgets = self._bus.admission
        made.on_held = functools.partial(self._limit_held, identity)
        self._links[made] = login
        self._of_identity.setdefault(identity, []).append(made)
        remove = self._bus.add(made)
        try:
            with contextlib.suppress(errors.NotConnected):  # it has ended meanwhile
                made.control(frames.WELCOME)
            events.info("link-open", peer=identity, address=made.address)
            await asyncio.wait((made.ended,))
        finally:
            made.close()
            remove()
            del self._links[made]
            self._of_identity[identity].remove(made)
            if not self._of_identity[identity]:
                del self._of_identity[identity]

    def _limit_held(self, identity: str) -> None:
        """Many connections must not keep in memory what one may not."""
        held = {made: made.held_bytes() for made in self._of_identity[identity] if made.is_open}
        if sum(held.values()) > HELD_BYTES_MAX:
            self._count("held")
            max(held, key=held.__getitem__).close("the peer does not read its messages, or ends no frame")

    async def _authenticate(self, made: link.DirectLink) -> _Login:
        await made.start_tls(self._tls)
        hello = await made.greeting(frames.DirectHello)
        creds = await asyncio.to_thread(self._creds)
        nonce, me = secrets.token_urlsafe(16), self._bus.identity
        signed = frames.signed_by_listener(hello.nonce, self.address.addresses)
        made.greet(frames.DirectChallenge(me, nonce, self.address.addresses, creds.answer(signed)))
        proof = await made.greeting(frames.DirectProof)
        login = await asyncio.to_thread(self._admit, proof.user_jwt)
        signed = frames.signed_by_client(nonce, me)
        self._check.check_answer(login.admitted.public_key, signed, proof.answer)
        return login

    # Revocation and expiry.

    async def _audit_always(self) -> None:
        while True:
            await asyncio.sleep(AUDIT_S)
            held = list(self._links.items())
            for made, audited in await asyncio.to_thread(self._audit, held):
                if made not in self._links:
                    continue
                if isinstance(audited, errors.MusterError):
                    self._count("revoked")
                    made.refuse(str(audited))
                else:
                    self._links[made] = audited
                    made.may_send = _may_publish(audited.admitted)

    def _admit(self, document: str) -> _Login:
        version = self._check.version()  # first: a change during the decision is noticed
        return _Login(document, version, self._check.admit(document))

    def _audit(
        self, held: Sequence[tuple[link.DirectLink, _Login]]
    ) -> list[tuple[link.DirectLink, _Login | errors.MusterError]]:
        """The links whose login is not what it was, or is over. Blocks."""
        changed: list[tuple[link.DirectLink, _Login | errors.MusterError]] = []
        version, now_s = self._check.version(), self._clock()
        for made, login in held:
            try:
                if 0 < login.admitted.expires_at <= now_s:
                    raise errors.Unauthorized(f"the credentials of {made.identity} have expired")
                if login.version != version:
                    changed.append((made, self._admit(login.document)))
            except errors.MusterError as error:
                changed.append((made, error))
        return changed


def _may_publish(admitted: Admitted) -> Callable[[str], bool]:
    """The decision of a broker: no subject is allowed that is denied, and no other than those allowed."""
    allow = subjects.SubjectPatternSet(admitted.allow or (">",))
    deny = subjects.SubjectPatternSet(admitted.deny)
    return lambda subject: allow.match(subject) and not deny.match(subject)
