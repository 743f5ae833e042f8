"""What agents report, and receivers that do not answer, harm no other subscription."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from muster.bus.http import server
from muster.core import errors
from muster.core.formats import xml
from muster.core.telemetry import metrics
from muster.gateways.soap import addresses, envelope, faults
from muster.gateways.soap import endpoint as soap_endpoint
from muster.gateways.wsman import endpoint, event_delivery
from muster.gateways.wsman.wire import fragments, headers, namespaces, representations
from muster.manage import client, protocol, rows
from muster.testing.eventually import eventually
from muster.trust.login import passwords
from muster.trust.permissions import roles
from tests.gateways.soap import conftest

P = namespaces.RESOURCE
ANN = passwords.PasswordLogin("ann", roles.Role.VIEWER)
SINK = "http://127.0.0.1:9/sink"


class Events:
    """A fleet that reports what a test puts in, to each subscription."""

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[Any]] = []

    @contextlib.asynccontextmanager
    async def visit(self, _: passwords.PasswordLogin) -> AsyncIterator[client.ManageClient]:
        yield self  # type: ignore[misc]

    @contextlib.asynccontextmanager
    async def listening(self, *_: str, where: str = "") -> AsyncIterator[AsyncIterator[Any]]:
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self.queues.append(queue)

        async def each() -> AsyncIterator[Any]:
            while True:
                yield await queue.get()

        yield each()

    def report(self, event: object) -> None:
        for queue in self.queues:
            queue.put_nowait(event)


class Receivers:
    """Takes events unless ``dead``; the end of a subscription is answered when ``release`` is set."""

    def __init__(self) -> None:
        self.taken: list[str] = []
        self.dead = False
        self.ending = asyncio.Event()
        self.release = asyncio.Event()

    async def post(
        self, url: str, body: bytes, *, headers: dict[str, str], body_bytes_max: int
    ) -> server.HttpResponse:
        if url.endswith("/end"):
            self.ending.set()
            await self.release.wait()
        elif self.dead:
            raise errors.Unavailable("dead")
        self.taken.append(url)
        return server.HttpResponse(202)


@pytest.fixture
def events() -> Events:
    return Events()


@pytest.fixture
def receivers() -> Receivers:
    return Receivers()


@pytest.fixture
async def subscriptions(
    events: Events, receivers: Receivers
) -> AsyncIterator[event_delivery.EventSubscriptions]:
    made = event_delivery.EventSubscriptions(
        events.visit, [SINK], measure=metrics.Metrics(), post=receivers.post
    )
    yield made
    receivers.release.set()
    await made.close()


def subscription() -> event_delivery.EventSubscription:
    notify, end = addresses.EndpointReference(SINK), addresses.EndpointReference(f"{SINK}/end")
    return event_delivery.EventSubscription("ann", notify, end, namespaces.PUSH, "http://here/wsman")


@pytest.mark.parametrize("at_ms", [1_800_000_000_000_000, -(1 << 62), 1 << 62])
async def test_an_agents_timestamp_ends_no_subscription(
    subscriptions: event_delivery.EventSubscriptions, events: Events, receivers: Receivers, at_ms: int
):
    for _ in range(3):
        await subscriptions.begin(ANN, subscription(), [], "", 600)
    events.report(protocol.ResourceEvent(resource="r", what="x", details={}, at_ms=at_ms))
    await eventually(lambda: receivers.taken == [SINK] * 3)
    assert len(subscriptions) == 3


async def test_an_event_that_cannot_be_shown_is_passed_over(
    subscriptions: event_delivery.EventSubscriptions,
    events: Events,
    receivers: Receivers,
    monkeypatch: pytest.MonkeyPatch,
):
    await subscriptions.begin(ANN, subscription(), [], "", 600)
    shown = representations.event

    def broken(event: protocol.ResourceEvent) -> tuple[str, xml.XmlElement]:
        if event.what == "bad":
            raise ZeroDivisionError
        return shown(event)

    monkeypatch.setattr(representations, "event", broken)
    for what in ("bad", "good"):
        events.report(protocol.ResourceEvent(resource="r", what=what, details={}, at_ms=1))
    await eventually(lambda: receivers.taken == [SINK])
    assert len(subscriptions) == 1


async def test_a_subscription_that_is_ending_cannot_be_renewed(
    subscriptions: event_delivery.EventSubscriptions,
    events: Events,
    receivers: Receivers,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(event_delivery, "ATTEMPTS", 1)
    receivers.dead = True
    made = await subscriptions.begin(ANN, subscription(), [], "", 600)
    events.report(protocol.ResourceEvent(resource="r", what="x", details={}, at_ms=1))
    await receivers.ending.wait()
    assert subscriptions.find(made.id, "ann") is None
    assert not subscriptions.renew(made, 600)


async def test_closing_notifies_all_receivers_in_parallel_with_a_time_limit(
    subscriptions: event_delivery.EventSubscriptions, receivers: Receivers, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(event_delivery, "CLOSE_S", 0.2)
    for _ in range(20):
        await subscriptions.begin(ANN, subscription(), [], "", 600)
    began_s = time.monotonic()
    async with asyncio.timeout(60):
        await subscriptions.close()  # not one of them answers
    assert time.monotonic() - began_s < 2.0
    assert len(subscriptions) == 0


# Fragments and values


@pytest.mark.parametrize(
    ("path", "left"),
    [("Config/Item[2]", ["one", "new", "three"]), ("Config/Item", ["new"]), ("Config/Item[0]", None)],
)
def test_a_fragment_replaces_what_its_path_selects(path: str, left: list[str] | None):
    items = (xml.XmlElement(P("Item"), name, attributes={"Name": name}) for name in ("one", "two", "three"))
    resource = xml.XmlElement(
        P("Resource"), xml.XmlElement(P("Name"), "a"), xml.XmlElement(P("Config"), *items)
    )
    selected, text = fragments.read(xml.XmlElement(namespaces.WSMAN("FragmentTransfer"), path), P)
    new = xml.XmlElement(P("Item"), "new", attributes={"Name": "new"})
    fragment = xml.XmlElement(namespaces.WSMAN("XmlFragment"), new)
    if left is None:
        assert fragments.select(resource, selected) == []
        with pytest.raises(faults.SoapFault, match="no element at this path"):
            fragments.put(resource, selected, fragment, text=text)
        return
    config = fragments.put(resource, selected, fragment, text=text).find(P("Config"))
    assert config is not None
    assert [child.get("Name") for child in config.children] == left


def description(config: dict[str, Any]) -> rows.ResourceDescription:
    return rows.ResourceDescription(
        name="r",
        type="process",
        agent="a",
        desired="up",
        state="up",
        generation=1,
        spec=protocol.ResourceSpec(name="r", type="process", agent="a", config=config),
    )


@pytest.mark.parametrize("text", ["\x1b[1mok\x0c", "\x00", "\ufffe", "plain", " \r\n\t", "", '"\\u001b"'])
def test_what_is_read_and_put_back_changes_nothing(text: str):
    config = {"prompt": text, f"k{text}": [text, {"inner": text}]}
    described = description(config)
    body = xml.parse(xml.write(representations.resource(described), namespaces.PREFIXES))
    entry, generation = representations.entry(body)
    assert generation == 1
    assert representations.changes(described, entry) == {}
    assert entry["config"] == config


# Headers


async def get(
    *more: xml.XmlElement,
    soap_action: str = "",
    described: rows.ResourceDescription | None = None,
    reply_to: tuple[xml.XmlElement, ...] = (),
) -> tuple[server.HttpResponse, list[str]]:
    """The response to a Get with these headers, and the names of the resources that it read."""
    read: list[str] = []

    async def authenticate(name: str, _: str, __: str) -> passwords.PasswordLogin:
        return passwords.PasswordLogin(name, roles.Role.OPERATOR)

    class HostileFleet:
        async def describe(self, name: str) -> rows.ResourceDescription:
            read.append(name)
            if described is None:
                raise errors.NotFound(name)
            return described

    @contextlib.asynccontextmanager
    async def visit(_: passwords.PasswordLogin) -> AsyncIterator[client.ManageClient]:
        yield HostileFleet()  # type: ignore[misc]

    wsa, selector = (
        namespaces.WSA,
        xml.XmlElement(namespaces.WSMAN("Selector"), "r", attributes={"Name": "Name"}),
    )
    data = envelope.write(
        envelope.SoapVersion.V12,
        [],
        [
            xml.XmlElement(wsa("To"), "x"),
            xml.XmlElement(wsa("Action"), namespaces.GET),
            xml.XmlElement(wsa("MessageID"), "uuid:1"),
            xml.XmlElement(namespaces.WSMAN("ResourceURI"), str(P)),
            xml.XmlElement(
                wsa("ReplyTo"), xml.XmlElement(wsa("Address"), addresses.ANONYMOUS[wsa]), *reply_to
            ),
            xml.XmlElement(namespaces.WSMAN("SelectorSet"), selector),
            *more,
        ],
    )
    request_headers = {
        "content-type": "application/soap+xml",
        "authorization": "Basic YTpi",
        "soapaction": soap_action,
    }
    request = soap_endpoint.SoapHttpRequest("POST", "/wsman", headers=request_headers, body=data)
    answer = await conftest.respond(endpoint.WsManEndpoint(visit).soap_endpoint(authenticate), request)
    return answer, read


@pytest.mark.parametrize(
    ("soap_action", "refused"),
    [
        (namespaces.DELETE, True),
        ("urn:other", True),
        (namespaces.GET, False),
        (f'"{namespaces.GET}"', False),
        ("", False),
    ],
)
async def test_a_soap_action_other_than_the_messages_own_is_refused(soap_action: str, refused: bool):
    """A proxy that filters by SOAPAction must not be passed by a message that asks for something else."""
    answer, read = await get(soap_action=soap_action)
    assert (b"ActionMismatch" in answer.body) == refused
    assert bool(read) != refused


@pytest.mark.parametrize("exists", [True, False])
async def test_no_answer_is_longer_than_the_client_allows(exists: bool):
    """Also if the headers that it has to repeat are: here in 20 reference parameters of 1 KB."""
    described = description({})
    size = headers.ENVELOPE_BYTES_MIN
    parameters = [xml.XmlElement(P("parameter"), "x" * 1000) for _ in range(20)]
    answer, read = await get(
        xml.XmlElement(namespaces.WSMAN("MaxEnvelopeSize"), str(size)),
        reply_to=(xml.XmlElement(namespaces.WSA("ReferenceParameters"), *parameters),),
        described=described if exists else None,
    )
    assert read == ["r"]
    assert (b"EncodingLimit" if exists else b"DestinationUnreachable") in answer.body
    assert len(answer.body) <= size
