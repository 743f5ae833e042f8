"""Subscriptions: pushed to addresses that are allowed, renewed, expired, refused."""

from __future__ import annotations

from muster.gateways.soap import envelope, faults
from muster.gateways.wsman import event_delivery
from muster.gateways.wsman.wire import namespaces
from muster.testing.eventually import eventually
from tests.gateways.wsman.conftest import V12, fault_details

P = namespaces.RESOURCE


def subscribe(url: str, more: str = "", mode: str = "", end_to: str = "") -> str:
    attribute = f' Mode="{mode}"' if mode else ""
    return (
        f"<e:Subscribe>{end_to}<e:Delivery{attribute}><e:NotifyTo><a:Address>{url}</a:Address>"
        "<a:ReferenceParameters><x:key xmlns:x='urn:x'>7</x:key></a:ReferenceParameters></e:NotifyTo>"
        f"</e:Delivery>{more}</e:Subscribe>"
    )


async def begin(wsman, *attribute, **options) -> str:
    answer = (await wsman.ask(namespaces.SUBSCRIBE, subscribe(*attribute, **options))).first
    assert answer is not None
    assert answer.name == namespaces.WSE("SubscribeResponse"), answer
    return str(next(node.text for node in answer.walk() if node.name == namespaces.WSE("Identifier")))


def about(id: str) -> str:
    return f"<e:Identifier>{id}</e:Identifier>"


async def test_events_are_pushed_until_unsubscribed(wsman, create, sink):
    await create("a")
    await create("b")
    id = await begin(
        wsman, sink.url, f"<w:Filter Dialect=\"{namespaces.PREDICATE}\">resource = 'a'</w:Filter>"
    )
    assert id.startswith("uuid:")
    await wsman.fleet.client.execute("b", "stop")
    await wsman.fleet.client.put("a", desired="down")
    event = await sink.next()
    assert event.first is not None
    assert event.first.name == P("StateChanged")
    assert event.first.text_of(P("Name")) == "a"
    header_texts = {header.local: header.text for header in event.headers}
    assert (header_texts["To"], header_texts["Action"], header_texts["key"]) == (
        sink.url,
        f"{P}/StateChanged",
        "7",
    )

    answer = await wsman.ask(
        namespaces.RENEW, "<e:Renew><e:Expires>PT300.000000S</e:Expires></e:Renew>", headers=about(id)
    )
    assert answer.first is not None
    assert answer.first.text_of(namespaces.WSE("Expires")) == "PT300S"
    answer = await wsman.ask(namespaces.GET_STATUS, "<e:GetStatus/>", headers=about(id))
    assert answer.first is not None

    wsman.user = "bob"  # it belongs to another user
    assert (await wsman.fault(namespaces.UNSUBSCRIBE, "<e:Unsubscribe/>", headers=about(id)))[
        1
    ] == "wsa:DestinationUnreachable"
    wsman.user = "ann"
    assert (await wsman.ask(namespaces.UNSUBSCRIBE, "<e:Unsubscribe/>", headers=about(id))).body == []
    assert len(wsman.wsman_endpoint.eventing.subscriptions) == 0
    assert await wsman.fault(namespaces.RENEW, "<e:Renew/>", headers=about(id)) == (
        "s:Receiver",
        "wse:UnableToRenew",
        "",
    )
    assert (await wsman.fault(namespaces.RENEW, "<e:Renew/>"))[1] == "wse:InvalidMessage"


async def test_one_resource_by_its_selector(wsman, create, sink):
    await create("a")
    await create("b")
    answer = await wsman.ask(namespaces.SUBSCRIBE, subscribe(sink.url), name="b")
    assert answer.first is not None
    assert answer.first.local == "SubscribeResponse"
    for name in ("a", "b"):
        await wsman.fleet.client.put(name, desired="down")
        await wsman.is_now(name, "down")
    event = await sink.next()
    assert event.first is not None
    assert event.first.text_of(P("Name")) == "b"


async def test_a_subscription_that_is_not_renewed_ends(wsman, sink):
    id = await begin(wsman, sink.url, "<e:Expires>PT0.3S</e:Expires>")
    kept = await begin(wsman, sink.url, "<e:Expires>PT0.3S</e:Expires>")
    await wsman.ask(namespaces.RENEW, "<e:Renew><e:Expires>PT60S</e:Expires></e:Renew>", headers=about(kept))
    await eventually(lambda: len(wsman.wsman_endpoint.eventing.subscriptions) == 1)
    assert (await wsman.fault(namespaces.RENEW, "<e:Renew/>", headers=about(id)))[1] == "wse:UnableToRenew"
    assert wsman.wsman_endpoint.eventing.subscriptions.find(kept, "ann") is not None


async def test_acknowledged_delivery(wsman, create, sink):
    await create("a")
    sink.acknowledges = True
    await begin(wsman, sink.url, mode=namespaces.PUSH_WITH_ACK)
    await wsman.fleet.client.put("a", desired="down")
    event = await sink.next()
    assert event.header(namespaces.WSMAN("AckRequested")) is not None
    assert len(wsman.wsman_endpoint.eventing.subscriptions) == 1


async def test_a_failing_receiver_is_retried_and_then_gets_the_end(wsman, create, sink, monkeypatch):
    monkeypatch.setattr(event_delivery, "PAUSE_S", 0.01)
    await create("a")
    end_to = f"<e:EndTo><a:Address>{sink.url}/end</a:Address></e:EndTo>"
    await begin(wsman, sink.url, end_to=end_to)
    sink.answers = [(500, ""), (503, "")]
    await wsman.fleet.client.put("a", desired="down")
    assert (await sink.next()).first is not None  # the third attempt
    while not sink.taken.empty():
        sink.taken.get_nowait()
    sink.answers = [(500, "")] * event_delivery.ATTEMPTS
    await wsman.fleet.client.put("a", desired="up")
    while True:
        message = await sink.next()
        assert message.first is not None
        if message.first.name == namespaces.WSE("SubscriptionEnd"):
            break
    assert message.first.text_of(namespaces.WSE("Status")) == f"{namespaces.WSE}/DeliveryFailure"
    await eventually(lambda: len(wsman.wsman_endpoint.eventing.subscriptions) == 0)


async def test_a_subscription_ends_when_the_password_or_the_role_changes(wsman, create, sink):
    await create("a")
    await begin(wsman, sink.url, end_to=f"<e:EndTo><a:Address>{sink.url}/end</a:Address></e:EndTo>")
    wsman.changed.add(wsman.user)
    await wsman.fleet.client.put("a", desired="down")
    message = await sink.next()
    assert message.first is not None
    assert message.first.name == namespaces.WSE("SubscriptionEnd"), "no event is delivered"
    assert "has changed" in message.first.text_of(namespaces.WSE("Reason"))
    await eventually(lambda: len(wsman.wsman_endpoint.eventing.subscriptions) == 0)


async def test_a_receiver_that_refuses_is_not_asked_again(wsman, create, sink):
    await create("a")
    await begin(wsman, sink.url)
    refusal = faults.SoapFault(faults.SoapFaultCode.SENDER, "no", subcode=namespaces.WSMAN("DeliveryRefused"))
    sink.answers = [(500, envelope.write_fault(V12, refusal).decode())]
    await wsman.fleet.client.put("a", desired="down")
    await eventually(lambda: len(wsman.wsman_endpoint.eventing.subscriptions) == 0)
    assert sink.requests == 1


async def test_addresses_that_are_not_allowed_are_never_called(wsman, create, sink):
    await create("a")
    unusable = ("s:Sender", "wsman:EventDeliverToUnusable", "UnusableAddress")
    root = sink.url.removesuffix("/events")
    for url in (
        f"{root}/other",
        f"{sink.url}/../other",
        f"{root.replace('127.0.0.1', 'localhost')}/events",
        "http://169.254.169.254/latest/",
        "file:///etc/passwd",
        "",
    ):
        assert await wsman.fault(namespaces.SUBSCRIBE, subscribe(url)) == unusable, url
        end_to = f"<e:EndTo><a:Address>{url}</a:Address></e:EndTo>"
        assert await wsman.fault(namespaces.SUBSCRIBE, subscribe(sink.url, end_to=end_to)) == unusable, url
    assert len(wsman.wsman_endpoint.eventing.subscriptions) == 0
    await wsman.fleet.client.put("a", desired="down")
    await wsman.is_now("a", "down")
    assert sink.requests == 0


async def test_what_is_not_offered_is_refused(wsman, sink):
    for body, expected in [
        (subscribe(sink.url, mode=f"{namespaces.PREFIX}/Pull"), ("wse:DeliveryModeRequestedUnavailable", "")),
        (subscribe(sink.url, "<w:Bookmark/>"), ("wsman:UnsupportedFeature", "Bookmarks")),
        (subscribe(sink.url, "<e:Filter>x</e:Filter>"), ("wse:FilteringRequestedUnavailable", "")),
        (subscribe(sink.url, "<e:Expires>PT0S</e:Expires>"), ("wse:InvalidExpirationTime", "")),
        ("<e:Subscribe/>", ("wsman:SchemaValidationError", "")),
        ("<e:Subscribe><e:Delivery/></e:Subscribe>", ("wsman:SchemaValidationError", "")),
    ]:
        assert fault_details(await wsman.ask(namespaces.SUBSCRIBE, body))[1:] == expected, body
    for dialect, text, code in (
        ("urn:other", "x", "wse:FilteringRequestedUnavailable"),
        (namespaces.PREDICATE, "name =", "wsman:CannotProcessFilter"),
        (namespaces.QUERIES[0], "select * from Win32_Service", "wsman:CannotProcessFilter"),
    ):
        body = subscribe(sink.url, f'<w:Filter Dialect="{dialect}">{text}</w:Filter>')
        assert fault_details(await wsman.ask(namespaces.SUBSCRIBE, body))[1] == code
    assert fault_details(await wsman.ask(namespaces.SUBSCRIBE, subscribe(sink.url), name="none")) == (
        *("s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI"),
    )
    unknown = await wsman.ask(namespaces.SUBSCRIBE, subscribe(sink.url), uri="http://127.0.0.1/none")
    assert fault_details(unknown)[1:] == ("wsa:DestinationUnreachable", "InvalidResourceURI")
    for option, expected in (
        ("<w:Heartbeats>PT5S</w:Heartbeats>", ("wsman:UnsupportedFeature", "Heartbeats")),
        ('<w:Auth Profile="urn:x"/>', ("wsman:UnsupportedFeature", "AuthorizationMode")),
        ("<w:ContentEncoding>UTF-16</w:ContentEncoding>", ("wsman:EncodingLimit", "CharacterSet")),
    ):
        body = subscribe(sink.url).replace("</e:Delivery>", f"{option}</e:Delivery>")
        assert fault_details(await wsman.ask(namespaces.SUBSCRIBE, body))[1:] == expected
    assert len(wsman.wsman_endpoint.eventing.subscriptions) == 0
