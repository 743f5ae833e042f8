"""The locator returns the best brokers for a client, so that clients need not be configured with brokers.

After section 4 of the JMS paper. It discovers the brokers itself: from the URL of any broker it finds the
others (each broker lists its cluster to a client), and over the system account it requests their connections,
limits and load. Then it ranks them for the client (`broker_order`), probes the best ones, and returns those
that respond.

It has no permanent connections: it closes every connection before it responds. Connected clients do not
depend on it, so there may be several locators without coordination. It surveys the brokers at most once in
`REFRESH_S`, for all waiting clients together.

Without access to the system account it still works, with distance and a live ping only.

It has no authentication, because its clients are not connected yet. It returns only data that a broker shows
to any client that connects (names, addresses), and nothing about connections or messages. The load on brokers
is limited: one survey a second, and `PROBES_MAX` probes at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import socket
import ssl
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.bus.brokers import config, system_account, topology
from muster.bus.http import server
from muster.bus.locator import broker_order
from muster.core import errors, lifecycle
from muster.core.net import hosts

REFRESH_S = 1.0
FORGET_S = 300.0  # an address without a broker for this time is not tried any more
PROBE_TIMEOUT_S = 1.0
ANSWER_MAX = 8
PROBES_MAX = 16
OF_ADDRESS_MAX = 64  # connections of one client
ADDRESSES_MAX = 1024  # that a survey probes: whatever listens at one of them may report others
DEFAULT_PORT = 4222
AMQP = "amqp"

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class BrokerGreeting:
    """The first message of a broker on a new connection, and its response time."""

    address: Address  # as configured or reported
    reached: str  # its IP address
    info: Mapping[str, Any]
    round_trip_s: float
    same_machine: bool


@dataclass(frozen=True, slots=True)
class BrokerSurvey:
    at_s: float
    candidates: tuple[broker_order.BrokerCandidate, ...]


class Locator(lifecycle.ServiceContext):
    """``async with Locator(["nats://…"]) as locator: … locator.url`` serves ``GET
    /locate?client=ADDRESS``."""

    def __init__(
        self,
        seeds: Iterable[str],
        *,
        access: system_account.SystemAccess | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        tls: ssl.SSLContext | None = None,
        refresh_s: float = REFRESH_S,
        later: Callable[[], Iterable[str]] = tuple,
        gateways: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """``later``: more seeds, asked for at each survey: brokers come and go. ``gateways``: URLs of those
        for AMQP, asked for by each client."""
        self._seeds = [address_of(url) for url in seeds]
        self._later = later
        self._gateways = gateways
        if not self._seeds:
            raise errors.InvalidInput("a locator needs the address of at least one broker to begin with")
        self._access = access
        self._listen = (host, port, tls)
        self._refresh_s = refresh_s
        self._server: server.HttpServer | None = None
        self._survey = BrokerSurvey(float("-inf"), ())
        self._seen_at_s: dict[Address, float] = {}
        self._renewal: asyncio.Task[None] | None = None
        self._messages: dict[str, tuple[float, int]] = {}
        self._sent: Counter[str] = Counter()
        self._probing = asyncio.Semaphore(PROBES_MAX // ANSWER_MAX)

    @property
    def url(self) -> str:
        if self._server is None:
            raise errors.NotConnected("this locator does not listen")
        return self._server.url

    async def start(self) -> None:
        host, port, tls = self._listen
        routes: dict[str, server.Handler] = {"/locate": self._answer, "/livez": _alive}
        self._server = await server.serve(routes, host, port, tls=tls, of_address_max=OF_ADDRESS_MAX)

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    async def locate(
        self,
        client: str,
        *,
        protocol: broker_order.BrokerProtocol = broker_order.BrokerProtocol.NATS,
        count: int = 3,
        via: str | None = None,
    ) -> list[broker_order.BrokerChoice]:
        """Up to ``count`` brokers for the client at this address, best first, each of which has just
        responded.

        ``via`` is the name under which the client reached this machine.
        """
        where = broker_order.parse_address(client)
        survey = await self._fresh()
        known = [_reachable(candidate, where, via) for candidate in survey.candidates]
        choices = broker_order.rank(known, where, protocol=protocol, sent=self._sent)
        alive: list[broker_order.BrokerChoice] = []
        while choices and len(alive) < count:
            tried, choices = choices[: count - len(alive)], choices[count - len(alive) :]
            async with self._probing:
                greetings = await asyncio.gather(*(probe(choice.reached) for choice in tried))
            alive += [
                choice
                for choice, greeting in zip(tried, greetings, strict=True)
                if _welcomes(greeting, choice)
            ]
        if not alive:
            raise errors.Unavailable(
                f"no broker that {client} can reach responds",
                hint="see that brokers run and listen on an address that clients reach",
            )
        self._sent[alive[0].candidate.id] += 1
        return alive

    async def locate_gateways(self, client: str) -> list[str]:
        """The gateways that accept connections now, those first to which fewer clients were sent. Those that
        listen on loopback are for clients of this machine."""
        is_here = broker_order.parse_address(client).is_loopback
        known = ((url, host) for url in dict.fromkeys(self._gateways()) for host, _ in _addresses([url]))
        urls = [url for url, host in known if is_here or not hosts.is_loopback(host)]
        async with self._probing:
            alive = await asyncio.gather(*map(_accepts, urls))
        accepting = [url for url, is_alive in zip(urls, alive, strict=True) if is_alive]
        if not accepting:
            raise errors.Unavailable(
                "no AMQP gateway responds", hint="`muster up --with amqp`, or a machine with the role gateway"
            )
        accepting.sort(key=lambda url: self._sent[url])
        self._sent[accepting[0]] += 1
        return accepting[:ANSWER_MAX]

    async def _answer(self, request: server.HttpRequest) -> server.HttpResponse:
        if request.query.get("protocol") == AMQP:
            urls = await self.locate_gateways(request.query.get("client", request.peer))
            return server.json_response({"gateways": urls, "failover": f"failover:({','.join(urls)})"})
        try:
            protocol = broker_order.BrokerProtocol(request.query.get("protocol", "nats"))
            count = min(ANSWER_MAX, max(1, int(request.query.get("count", "3"))))
            via = urllib.parse.urlsplit(f"//{request.headers.get('host', '')}").hostname
        except ValueError as error:
            raise errors.InvalidInput(f"invalid request: {error}") from None
        choices = await self.locate(
            request.query.get("client", request.peer), protocol=protocol, count=count, via=via
        )
        return server.json_response({"brokers": broker_order.summary(choices)})

    # Survey

    async def _fresh(self) -> BrokerSurvey:
        """The survey, renewed if it is too old. Concurrent callers share one survey."""
        if time.monotonic() - self._survey.at_s > self._refresh_s:
            if self._renewal is None or self._renewal.done():
                self._renewal = asyncio.create_task(self._renew_survey(), name="locator")
            await asyncio.shield(self._renewal)
        return self._survey

    async def _renew_survey(self) -> None:
        greetings = await greet_all([*self._seeds, *_addresses(self._later()), *self._seen_at_s])
        now_s = time.monotonic()
        self._seen_at_s |= {greeting.address: now_s for greeting in greetings}
        self._seen_at_s = {
            address: at_s for address, at_s in self._seen_at_s.items() if now_s - at_s < FORGET_S
        }
        vitals = await self._vitals(greetings)
        self._survey = BrokerSurvey(now_s, tuple(candidates(greetings, vitals)))
        self._sent.clear()

    async def _vitals(self, greetings: Sequence[BrokerGreeting]) -> dict[str, Mapping[str, Any]]:
        """The statistics of each broker by its id, if there is access to the system account."""
        if self._access is None or not greetings:
            return {}
        try:
            answers = await system_account.gather(
                [config.authority(*greeting.address) for greeting in greetings],
                self._access,
                "$SYS.REQ.SERVER.PING.VARZ",
                enough=len({_id(greeting) for greeting in greetings}),
            )
        except errors.MusterError:
            return {}  # a broker failed during the survey: rank by the greetings only
        brokers: dict[str, Mapping[str, Any]] = {}
        for answer in answers:
            page = answer.get("data") or {}
            id = str(page.get("server_id", ""))
            brokers[id] = {**page, "messages_per_s": self._rate(id, int(page.get("in_msgs", 0)))}
        self._messages = {id: self._messages[id] for id in brokers}
        return brokers

    def _rate(self, id: str, messages: int) -> float | None:
        now_s = time.monotonic()
        then_s, before = self._messages.get(id, (now_s, messages))
        self._messages[id] = (now_s, messages)
        return max(0, messages - before) / (now_s - then_s) if now_s > then_s else None


def candidates(
    greetings: Iterable[BrokerGreeting], vitals: Mapping[str, Mapping[str, Any]]
) -> list[broker_order.BrokerCandidate]:
    """One candidate for each broker, from its greetings at each address and its statistics. Pure."""
    by_id: dict[str, broker_order.BrokerCandidate] = {}
    for greeting in greetings:
        name, port = greeting.address
        page = vitals.get(_id(greeting), {})
        cores = page.get("cores")
        before = by_id.get(_id(greeting))
        known = (*(before.hosts if before else ()), broker_order.BrokerHost(name, greeting.reached, port))
        by_id[_id(greeting)] = broker_order.BrokerCandidate(
            id=_id(greeting),
            name=str(greeting.info.get("server_name", "")),
            hosts=tuple(dict.fromkeys(known)),
            port=port,
            tls=bool(greeting.info.get("tls_required")),
            websocket_port=(page.get("websocket") or {}).get("port"),
            mqtt_port=(page.get("mqtt") or {}).get("port"),
            everywhere=greeting.info.get("host") in hosts.EVERYWHERE,
            beside_locator=greeting.same_machine or (before is not None and before.beside_locator),
            leaving=bool(greeting.info.get("ldm")),
            connections=page.get("connections"),
            connections_max=page.get("max_connections"),
            cores=cores,
            cpu_share=page["cpu"] / 100 / cores if cores and "cpu" in page else None,
            messages_per_s=page.get("messages_per_s"),
            uptime_s=topology.seconds(str(page.get("uptime", ""))),
            round_trip_s=min(greeting.round_trip_s, before.round_trip_s or greeting.round_trip_s)
            if before
            else greeting.round_trip_s,
        )
    return list(by_id.values())


async def greet_all(addresses: Sequence[Address]) -> list[BrokerGreeting]:
    """Probe these brokers, and recursively those that they report."""
    probed: set[Address] = set()
    answered: list[BrokerGreeting] = []
    pending = list(dict.fromkeys(addresses))
    while pending := pending[: ADDRESSES_MAX - len(probed)]:
        probed.update(pending)
        new = [greeting for greeting in await asyncio.gather(*map(probe, pending)) if greeting is not None]
        answered += new
        advertised = (_addresses(greeting.info.get("connect_urls")) for greeting in new)
        pending = [
            address for address in dict.fromkeys(itertools.chain(*advertised)) if address not in probed
        ]
    return answered


async def probe(address: Address, *, timeout_s: float = PROBE_TIMEOUT_S) -> BrokerGreeting | None:
    """Connect, read the greeting of the broker, and disconnect. None if there is no valid greeting."""
    writer = None
    began_s = time.monotonic()
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(*address, limit=65_536)
            line = await reader.readline()
            took_s = time.monotonic() - began_s
            here, there = writer.get_extra_info("sockname"), writer.get_extra_info("peername")
        if not line.startswith(b"INFO "):
            return None
        info = json.loads(line[5:])
        if not isinstance(info, dict) or "server_id" not in info:
            return None
        return BrokerGreeting(address, str(there[0]), info, took_s, same_machine=here[0] == there[0])
    except (OSError, TimeoutError, ValueError, RecursionError):
        return None
    finally:
        if writer is not None:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


def address_of(url: str) -> Address:
    try:
        parts = urllib.parse.urlsplit(url if "://" in url else f"nats://{url}")
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError:
        host, port = None, 0
    if not host:
        raise errors.InvalidInput(f"{url!r} is not a broker's address", hint="write nats://HOST:PORT")
    return host, port


def _addresses(urls: Any) -> list[Address]:
    """The valid ones. Others report them: an invalid one must not hide the rest."""
    addresses = []
    with contextlib.suppress(TypeError):
        for url in urls:
            with contextlib.suppress(errors.InvalidInput):
                addresses.append(address_of(str(url)))
    return addresses


async def _accepts(url: str) -> bool:
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            _, writer = await asyncio.open_connection(*address_of(url))
    except (OSError, TimeoutError, ValueError):  # as of a name that cannot be encoded
        return False
    writer.close()
    return True


def _reachable(
    candidate: broker_order.BrokerCandidate, client: broker_order.IPAddress, via: str | None
) -> broker_order.BrokerCandidate:
    """With the address of this machine that leads to the client, if the broker listens on all of them.

    Such a broker reports the addresses of its machine only to the members of its cluster, and none that the
    certificate contains. The client reached the locator under a name: it can reach the broker under the same
    name.
    """
    if not candidate.everywhere or not candidate.beside_locator or client.is_loopback:
        return candidate
    address = _own_address(client)
    if address is None:
        return candidate
    name = via or (socket.gethostname() if candidate.tls else address)
    return dataclasses.replace(
        candidate, hosts=(*candidate.hosts, broker_order.BrokerHost(name, address, candidate.port))
    )


def _own_address(client: broker_order.IPAddress) -> str | None:
    """The local address of connections to the client."""
    family = socket.AF_INET if client.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as towards:
            towards.connect((str(client), 9))  # sends nothing: only selects the route
            return str(towards.getsockname()[0])
    except OSError:
        return None


def _welcomes(greeting: BrokerGreeting | None, choice: broker_order.BrokerChoice) -> bool:
    """Whether it responded, is the expected broker, and is not shutting down."""
    return greeting is not None and _id(greeting) == choice.candidate.id and not greeting.info.get("ldm")


def _id(greeting: BrokerGreeting) -> str:
    return str(greeting.info["server_id"])


def _alive(_: server.HttpRequest) -> server.HttpResponse:
    return server.text("ok\n")
