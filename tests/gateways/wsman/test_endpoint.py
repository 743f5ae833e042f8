"""Each action of the standard against a real fleet, and the faults it must answer with."""

from __future__ import annotations

from typing import Any

import msgspec

from muster.core.formats import xml
from muster.gateways.wsman import enumeration_contexts
from muster.gateways.wsman.wire import namespaces
from muster.testing.eventually import eventually
from tests.gateways.wsman.conftest import V12, fault_details

P = namespaces.RESOURCE


def child(element: xml.XmlElement | None, name: str) -> xml.XmlElement:
    assert element is not None
    matches = element.find(name)
    assert matches is not None, (name, element)
    return matches


async def test_identify_needs_no_login(wsman):
    request_text = (
        f'<s:Envelope xmlns:s="{V12.value}" xmlns:i="{namespaces.WSMID}"><s:Header/>'
        "<s:Body><i:Identify/></s:Body></s:Envelope>"
    )
    answer = await wsman.http.post(
        wsman.url, content=request_text, headers={"content-type": "application/soap+xml;charset=UTF-8"}
    )
    assert answer.status_code == 200
    assert f"<wsmid:ProtocolVersion>{namespaces.WSMAN}</wsmid:ProtocolVersion>" in answer.text
    assert "http/basic" in answer.text
    other = await wsman.http.post(
        wsman.url,
        content=request_text.replace("Identify", "Other"),
        headers={"content-type": "application/soap+xml"},
    )
    assert other.status_code == 401


async def test_create_get_put_rename_delete(wsman):
    body = (
        "<p:Resource><p:Name>a-1</p:Name><p:Type>memory</p:Type><p:Agent>host-a</p:Agent>"
        '<p:Labels><p:Item Name="tier">front</p:Item></p:Labels>'
        '<p:Config><p:Item Name="value" Type="map"><p:Item Name="n" Type="integer">7</p:Item>'
        '<p:Item Name="l" Type="list"><p:Item>x</p:Item><p:Item Type="boolean">true</p:Item></p:Item>'
        "</p:Item></p:Config></p:Resource>"
    )
    answer = await wsman.ask(namespaces.CREATE, body)
    created = answer.first
    assert created is not None
    assert created.name == namespaces.WXF("ResourceCreated")
    assert [node.text for node in created.walk() if node.name == namespaces.WSMAN("Selector")] == ["a-1"]
    assert (answer.header(namespaces.WSA("RelatesTo")) or created).text == "uuid:1"
    assert (answer.header(namespaces.WSA("Action")) or created).text == f"{namespaces.CREATE}Response"
    await wsman.fleet.client.wait("a-1", "up")
    described = await wsman.fleet.client.describe("a-1")
    assert described.spec.config == {"value": {"n": 7, "l": ["x", True]}}
    assert described.spec.labels == {"tier": "front"}
    assert described.applied_by == "wsman-ann"

    actual = (await wsman.ask(namespaces.GET, name="a-1")).first
    assert actual is not None
    assert (actual.text_of(P("Name")), actual.text_of(P("State"))) == ("a-1", "up")

    # What was read is sent back with one property changed.
    sent = xml.write(actual).decode().replace("<p:Desired>up", "<p:Desired>down")
    changed = (await wsman.ask(namespaces.PUT, sent, name="a-1")).first
    assert changed is not None
    assert changed.text_of(P("Desired")) == "down"
    assert (await wsman.fleet.client.describe("a-1")).spec.config == described.spec.config
    # …and sent once more, as it was read then: it is of an earlier generation by now.
    stale = sent.replace(">down<", ">drained<")
    assert await wsman.fault(namespaces.PUT, stale, name="a-1") == ("s:Sender", "wsman:Concurrency", "")

    # A Put that changes the key renames.
    renamed = xml.write(changed).decode().replace("<p:Name>a-1", "<p:Name>b-1")
    answer = await wsman.ask(namespaces.PUT, renamed, name="a-1", headers="<w:RequestEPR/>")
    reference = answer.header(namespaces.WSMAN("RequestedEPR"))
    assert reference is not None
    assert [node.text for node in reference.walk() if node.name == namespaces.WSMAN("Selector")] == ["b-1"]
    # So does the method, once that is done.
    await wsman.fleet.client.wait("b-1", "down")
    answer = await wsman.ask(
        f"{P}/Rename", "<p:Rename_INPUT><p:NewName>c-1</p:NewName></p:Rename_INPUT>", name="b-1"
    )
    assert answer.first is not None
    assert answer.first.name == P("Rename_OUTPUT")
    assert (answer.header(namespaces.WSA("Action")) or answer.first).text == f"{P}/RenameResponse"
    assert await wsman.fault(namespaces.GET, name="a-1") == (
        "s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI",
    )  # fmt: skip

    answer = await wsman.ask(namespaces.DELETE, name="c-1")
    assert (answer.body, wsman.last.status_code) == ([], 200)
    await wsman.fleet.client.wait_gone("c-1")


async def test_fragments(wsman, create):
    await create("a", tier="front")

    def at(path: str, dialect: str = "") -> str:
        return f'<w:FragmentTransfer s:mustUnderstand="true"{dialect}>{path}</w:FragmentTransfer>'

    for path, expected in [
        ("Desired", "<p:Desired>up</p:Desired>"),
        ("p:Desired/text()", "up"),
        ("/p:Resource/p:Config/p:Item[1]/text()", "1"),
    ]:
        answer = await wsman.ask(namespaces.GET, name="a", headers=at(path))
        assert f"<wsman:XmlFragment>{expected}</wsman:XmlFragment>" in wsman.last.text
        assert answer.header(namespaces.WSMAN("FragmentTransfer")) is not None
    await wsman.ask(namespaces.GET, name="a", headers=at("Nothing"))
    assert 'xsi:nil="true"' in wsman.last.text

    put = "<w:XmlFragment><Desired>down</Desired></w:XmlFragment>"  # without a namespace, as `wsl` does
    await wsman.ask(namespaces.PUT, put, name="a", headers=at("Desired"))
    assert (await wsman.fleet.client.describe("a")).desired == "down"
    await wsman.ask(
        namespaces.PUT, "<w:XmlFragment>up</w:XmlFragment>", name="a", headers=at("Desired/text()")
    )
    described = await wsman.fleet.client.describe("a")
    assert (described.desired, described.spec.labels) == ("up", {"tier": "front"})

    refused = await wsman.fault(namespaces.GET, name="a", headers=at("Desired", ' Dialect="urn:x"'))
    assert refused[1] == "wsman:FragmentDialectNotSupported"
    assert (await wsman.fault(namespaces.GET, name="a", headers=at("//Desired[text()='x']")))[0] == "s:Sender"
    for bad in ("<w:XmlFragment/>", "<p:Desired>up</p:Desired>", "<w:XmlFragment><Other/></w:XmlFragment>"):
        assert await wsman.fault(namespaces.PUT, bad, name="a", headers=at("Desired")) == (
            "s:Sender", "wxf:InvalidRepresentation", "InvalidFragment",
        )  # fmt: skip
    assert (await wsman.fleet.client.describe("a")).generation == described.generation


async def test_methods(wsman, create):
    await create("a")
    answer = await wsman.ask(f"{P}/stop", "<p:stop_INPUT/>", name="a")
    assert answer.first is not None
    assert answer.first.text_of(P("ReturnValue")) == "0"
    assert (await wsman.ask(f"{P}/logs", name="a")).first is not None  # a body may be absent
    assert (await wsman.fault(f"{P}/fly", "<p:fly_INPUT/>", name="a"))[0] == "s:Sender"
    assert await wsman.fault(f"{P}/stop", "<p:start_INPUT/>", name="a") == (
        "s:Sender", "wsman:SchemaValidationError", "",
    )  # fmt: skip
    for bad in ("<p:Rename_INPUT/>", "<p:Rename_INPUT><p:Other>b</p:Other></p:Rename_INPUT>"):
        assert await wsman.fault(f"{P}/Rename", bad, name="a") == (
            "s:Sender", "wsman:InvalidParameter", "InvalidName",
        )  # fmt: skip
    twice = "<p:stop_INPUT><p:x>1</p:x><p:x>2</p:x></p:stop_INPUT>"
    assert (await wsman.fault(f"{P}/stop", twice, name="a"))[1] == "wsman:InvalidParameter"


async def pull_all(wsman, answer, **options) -> list[xml.XmlElement]:
    """All items, pulled to the end."""
    items: list[xml.XmlElement] = []
    context = child(answer.first, namespaces.WSEN("EnumerationContext")).text
    first = answer.first.find(namespaces.WSMAN("Items"))
    items += first.children if first else []
    while context:
        more = options.get("pull", "")
        body = f"<n:Pull><n:EnumerationContext>{context}</n:EnumerationContext>{more}</n:Pull>"
        reported = (
            await wsman.ask(
                namespaces.PULL, body, uri=options.get("uri", P), size=options.get("size", 153600)
            )
        ).first
        matches = reported.find(namespaces.WSEN("EnumerationContext"))
        items += child(reported, namespaces.WSEN("Items")).children
        assert (matches is None) == (reported.find(namespaces.WSEN("EndOfSequence")) is not None)
        context = matches.text if matches is not None else ""
    return items


async def test_enumerations(wsman, create):
    for number in range(5):
        await create(f"r-{number}", tier="front" if number % 2 else "back", text="x" * 900)
    one_by_one = await pull_all(wsman, await wsman.ask(namespaces.ENUMERATE, "<n:Enumerate/>"))
    assert [element.text_of(P("Name")) for element in one_by_one] == [f"r-{n}" for n in range(5)]
    assert len(wsman.wsman_endpoint.enumeration.contexts) == 0

    # Optimised, in one answer: the context is empty, and the items are WS-Management's.
    body = "<n:Enumerate><w:OptimizeEnumeration/><w:MaxElements>50</w:MaxElements>{}</n:Enumerate>"
    answer = await wsman.ask(
        namespaces.ENUMERATE, body.format(""), headers="<w:RequestTotalItemsCountEstimate/>"
    )
    assert child(answer.first, namespaces.WSEN("EnumerationContext")).text == ""
    assert child(answer.first, namespaces.WSMAN("EndOfSequence")) is not None
    assert len(child(answer.first, namespaces.WSMAN("Items")).children) == 5
    count = answer.header(namespaces.WSMAN("TotalItemsCountEstimate"))
    assert count is not None
    assert count.text == "5"

    # Modes.
    mode = "<w:EnumerationMode>{}</w:EnumerationMode>"
    answer = await wsman.ask(namespaces.ENUMERATE, body.format(mode.format("EnumerateEPR")))
    items = child(answer.first, namespaces.WSMAN("Items")).children
    assert {element.name for element in items} == {namespaces.WSA("EndpointReference")}
    answer = await wsman.ask(namespaces.ENUMERATE, body.format(mode.format("EnumerateObjectAndEPR")))
    items = child(answer.first, namespaces.WSMAN("Items")).children
    assert [element.local for element in items[0].children] == ["Resource", "EndpointReference"]
    refused = await wsman.fault(namespaces.ENUMERATE, body.format(mode.format("EnumerateNothing")))
    assert refused == ("s:Sender", "wsman:UnsupportedFeature", "EnumerationMode")

    # No more at once than fit into the requested envelope.
    small = "<n:Enumerate><w:OptimizeEnumeration/><w:MaxElements>50</w:MaxElements></n:Enumerate>"
    answer = await wsman.ask(namespaces.ENUMERATE, small, size=8192)
    assert len(wsman.last.content) <= 8192
    assert 0 < len(child(answer.first, namespaces.WSMAN("Items")).children) < 5
    pull = "<n:MaxElements>50</n:MaxElements>"
    assert len(await pull_all(wsman, answer, pull=pull, size=8192)) == 5


SELECTOR_A = '<w:SelectorSet><w:Selector Name="Name">a</w:Selector></w:SelectorSet>'


async def test_filters(wsman, create):
    await create("a", tier="back")
    await create("b", tier="front")
    for space, dialect, text, expected in [
        ("w", namespaces.PREDICATE, "tier = 'front'", ["b"]),
        ("n", namespaces.PREDICATE, "name LIKE 'b%'", ["b"]),
        ("w", "http://schemas.dmtf.org/wbem/wsman/1/WQL", "select * from resource where Name = 'b'", ["b"]),
        ("w", namespaces.QUERIES[2], "select * from Resource where Name='a' or tier='front'", ["a", "b"]),
        ("w", namespaces.QUERIES[3], "SELECT * FROM Resource", ["a", "b"]),
        ("w", namespaces.SELECTOR_FILTER, SELECTOR_A, ["a"]),
    ]:
        filter_element = f'<{space}:Filter Dialect="{dialect}">{text}</{space}:Filter>'
        answer = await wsman.ask(namespaces.ENUMERATE, f"<n:Enumerate>{filter_element}</n:Enumerate>")
        assert [element.text_of(P("Name")) for element in await pull_all(wsman, answer)] == expected, text


async def test_a_pull_is_limited_by_characters(wsman, create):
    for number in range(3):
        await create(f"r-{number}", text="ü" * 400)
    item = (await wsman.ask(namespaces.GET, name="r-0")).first
    characters = len(xml.write(item, namespaces.PREFIXES).decode())
    answer = await wsman.ask(namespaces.ENUMERATE, "<n:Enumerate/>")
    context = child(answer.first, namespaces.WSEN("EnumerationContext")).text

    def pull(limits: str) -> str:
        return f"<n:Pull><n:EnumerationContext>{context}</n:EnumerationContext>{limits}</n:Pull>"

    for limits in (
        "<n:MaxCharacters>0</n:MaxCharacters>",
        "<n:MaxTime>soon</n:MaxTime>",
        "<n:MaxTime>PT0S</n:MaxTime>",
    ):
        refused = await wsman.fault(namespaces.PULL, pull(limits))
        assert refused == ("s:Sender", "wsman:SchemaValidationError", ""), limits
    many = "<n:MaxTime>PT1S</n:MaxTime><n:MaxElements>9</n:MaxElements><n:MaxCharacters>{}</n:MaxCharacters>"
    refused = await wsman.fault(namespaces.PULL, pull(many.format(characters // 2)))
    assert refused == ("s:Sender", "wsman:EncodingLimit", "MaxEnvelopeSize")
    answer = await wsman.ask(namespaces.PULL, pull(many.format(characters * 2 + 40)))
    assert len(child(answer.first, namespaces.WSEN("Items")).children) == 2
    answer = await wsman.ask(namespaces.PULL, pull(many.format(100_000)))
    assert len(child(answer.first, namespaces.WSEN("Items")).children) == 1


async def test_filters_that_cannot_be(wsman):
    def filtered(dialect: str, text: str) -> str:
        return f'<n:Enumerate><w:Filter Dialect="{dialect}">{text}</w:Filter></n:Enumerate>'

    association = "http://schemas.dmtf.org/wbem/wsman/1/cimbinding/associationFilter"
    for dialect in (association, namespaces.XPATH, "urn:other"):
        unknown = await wsman.fault(namespaces.ENUMERATE, filtered(dialect, "x"))
        assert unknown[1] == "wsen:FilterDialectRequestedUnavailable"
    assert f"<wsen:SupportedDialect>{namespaces.PREDICATE}</wsen:SupportedDialect>" in wsman.last.text
    for dialect, text in [
        (namespaces.PREDICATE, "name ="),
        (namespaces.PREDICATE, "<p:x/>"),
        (namespaces.QUERIES[0], "drop table Resource"),
        (namespaces.QUERIES[0], "select * from Win32_Service where Name = 'a'"),
        (namespaces.QUERIES[3], "select * from Agent"),
        (namespaces.SELECTOR_FILTER, "x"),
        (namespaces.SELECTOR_FILTER, '<w:SelectorSet><w:Selector Name="a b">1</w:Selector></w:SelectorSet>'),
    ]:
        assert (await wsman.fault(namespaces.ENUMERATE, filtered(dialect, text)))[
            1
        ] == "wsen:CannotProcessFilter", text
    twice = f'<w:Filter Dialect="{namespaces.PREDICATE}">a = 1</w:Filter>' * 2
    assert (await wsman.fault(namespaces.ENUMERATE, f"<n:Enumerate>{twice}</n:Enumerate>"))[
        1
    ] == "wsen:CannotProcessFilter"
    assert len(wsman.wsman_endpoint.enumeration.contexts) == 0


async def test_contexts_end_and_belong_to_their_creator(wsman, create, monkeypatch):
    await create("a")
    await create("b")

    async def begin(more: str = "") -> str:
        return child((await wsman.ask(namespaces.ENUMERATE, f"<n:Enumerate>{more}</n:Enumerate>")).first,
                     namespaces.WSEN("EnumerationContext")).text  # fmt: skip

    def pull(context: str) -> str:
        return f"<n:Pull><n:EnumerationContext>{context}</n:EnumerationContext></n:Pull>"

    lost = ("s:Receiver", "wsen:InvalidEnumerationContext", "")
    context = await begin()
    release = f"<n:Release><n:EnumerationContext>{context}</n:EnumerationContext></n:Release>"
    assert (await wsman.ask(namespaces.RELEASE, release)).body == []
    assert await wsman.fault(namespaces.PULL, pull(context)) == lost
    assert await wsman.fault(namespaces.RELEASE, release) == lost
    assert await wsman.fault(namespaces.PULL, pull("made up")) == lost
    assert await wsman.fault(namespaces.PULL, "<n:Pull/>") == ("s:Sender", "wsman:SchemaValidationError", "")

    context = await begin()
    wsman.user = "bob"
    assert await wsman.fault(namespaces.PULL, pull(context)) == lost
    wsman.user = "ann"
    assert (await wsman.fault(namespaces.PULL, pull(context), uri=namespaces.AGENT))[0] == "s:Sender"
    assert fault_details(
        await wsman.ask(
            namespaces.PULL, pull(context).replace("</n:Pull>", "<n:MaxElements>x</n:MaxElements></n:Pull>")
        )
    )
    assert (await wsman.ask(namespaces.PULL, pull(context))).first is not None

    context = await begin("<n:Expires>PT60S</n:Expires>")
    now_s = wsman.wsman_endpoint.enumeration._now_s
    monkeypatch.setattr(wsman.wsman_endpoint.enumeration, "_now_s", lambda: now_s() + 61)
    assert await wsman.fault(namespaces.PULL, pull(context)) == lost
    for bad in ("PT0S", "-PT1S", "yesterday", "2001-01-01T00:00:00Z"):
        assert (
            await wsman.fault(
                namespaces.ENUMERATE, f"<n:Enumerate><n:Expires>{bad}</n:Expires></n:Enumerate>"
            )
        )[1] == ("wsen:InvalidExpirationTime")
    while len(wsman.wsman_endpoint.enumeration.contexts) < enumeration_contexts.OF_USER_MAX:
        await begin()
    assert (await wsman.fault(namespaces.ENUMERATE, "<n:Enumerate/>"))[1] == "wsman:QuotaLimit"


async def test_agents_and_managers_can_be_read(wsman):
    await eventually(wsman.fleet.client.agents)
    await eventually(wsman.fleet.client.managers)
    for uri, name in ((namespaces.AGENT, "host-a"), (namespaces.MANAGER, "manager-1")):
        actual = (await wsman.ask(namespaces.GET, uri=uri, name=name)).first
        assert actual is not None
        assert actual.text_of(uri("Name")) == name
        listed = await pull_all(
            wsman, await wsman.ask(namespaces.ENUMERATE, "<n:Enumerate/>", uri=uri), uri=uri
        )
        assert [element.text_of(uri("Name")) for element in listed] == [name]
        assert (await wsman.fault(namespaces.DELETE, uri=uri, name=name))[1] == "wsa:ActionNotSupported"
    assert (await wsman.fault(namespaces.GET, uri=namespaces.AGENT, name="host-z"))[
        1
    ] == "wsa:DestinationUnreachable"


def resource(name: str, more: str) -> str:
    return f"<p:Resource><p:Name>{name}</p:Name>{more}</p:Resource>"


MICROSOFT = "http://schemas.microsoft.com/wbem/wsman/1/wsman.xsd"
REFUSED: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    ({"action": "urn:other"}, ("s:Sender", "wsa:ActionNotSupported", "")),
    ({"action": ""}, ("s:Sender", "wsa:MessageInformationHeaderRequired", "")),
    ({"uri": "urn:other"}, ("s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI")),
    ({"name": None}, ("s:Sender", "wsman:InvalidSelectors", "InsufficientSelectors")),
    ({"name": ""}, ("s:Sender", "wsman:InvalidSelectors", "InvalidValue")),
    ({"name": "missing"}, ("s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI")),
    ({"name": None, "headers": '<w:SelectorSet><w:Selector Name="Id">a</w:Selector></w:SelectorSet>'},
     ("s:Sender", "wsman:InvalidSelectors", "UnexpectedSelectors")),
    ({"name": None, "headers": '<w:SelectorSet><w:Selector Name="Name">a</w:Selector>'
      '<w:Selector Name="Name">b</w:Selector></w:SelectorSet>'},
     ("s:Sender", "wsman:InvalidSelectors", "DuplicateSelectors")),
    ({"headers": "<w:OperationTimeout>soon</w:OperationTimeout>"},
     ("s:Sender", "wsa:InvalidMessageInformationHeader", "OperationTimeout")),
    ({"headers": "<w:OperationTimeout>PT0S</w:OperationTimeout>"}, ("s:Receiver", "wsman:TimedOut", "")),
    ({"size": 100}, ("s:Sender", "wsman:EncodingLimit", "MinimumEnvelopeLimit")),
    ({"reply_to": "http://127.0.0.1:1/"}, ("s:Sender", "wsman:UnsupportedFeature", "AddressingMode")),
    ({"headers": "<a:MessageID>2</a:MessageID>"}, ("s:Sender", "wsa:InvalidMessageInformationHeader", "")),
    ({"headers": '<w:Locale s:mustUnderstand="true" xml:lang="tlh"/>'},
     ("s:Sender", "wsman:UnsupportedFeature", "Locale")),
    ({"headers": '<w:OptionSet><w:Option Name="x" MustComply="true"/></w:OptionSet>'},
     ("s:Sender", "wsman:InvalidOptions", "NotSupported")),
    ({"headers": '<e:Strange s:mustUnderstand="true"/>'}, ("s:MustUnderstand", "", "")),
    ({"headers": f'<x:CompressionType xmlns:x="{MICROSOFT}" s:mustUnderstand="true"/>'},
     ("s:MustUnderstand", "", "")),
    ({"uri": "http://schemas.microsoft.com/wbem/wsman/1/wmi/Win32_Service", "name": "x"},
     ("s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI")),
    ({"uri": "http://schemas.dmtf.org/wbem/wscim/1/*", "name": None, "action": namespaces.ENUMERATE,
      "body": "<n:Enumerate/>", "headers": SELECTOR_A},
     ("s:Sender", "wsa:DestinationUnreachable", "InvalidResourceURI")),
    ({"action": namespaces.PUT, "body": ""}, ("s:Sender", "wxf:InvalidRepresentation", "MissingValues")),
    ({"action": namespaces.PUT, "body": "<p:Other/>"},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidValues")),
    ({"action": namespaces.PUT, "body": '<Resource xmlns="urn:x"/>'},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidNamespace")),
    ({"action": namespaces.PUT, "body": resource("a", "<p:Odd/>")},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidValues")),
    ({"action": namespaces.PUT, "body": resource("a", "<p:Desired>sideways</p:Desired>")},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidValues")),
    ({"action": namespaces.PUT, "body": resource("a", "<p:Config><p:Item Name='x' Type='date'/></p:Config>")},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidValues")),
    ({"action": namespaces.CREATE, "body": resource("a", "<p:Type>memory</p:Type><p:Agent>host-a</p:Agent>")},
     ("s:Sender", "wsman:AlreadyExists", "")),
    ({"action": namespaces.CREATE, "name": None,
      "body": resource("z", "<p:Type>unheard</p:Type><p:Agent>host-a</p:Agent>")},
     ("s:Sender", "wxf:InvalidRepresentation", "InvalidValues")),
    ({"action": namespaces.CREATE, "body": "<p:Resource><p:Name>z</p:Name></p:Resource>"},
     ("s:Sender", "wsman:InvalidSelectors", "InvalidValue")),
    ({"action": namespaces.DELETE, "headers": "<w:FragmentTransfer>Group</w:FragmentTransfer>"},
     ("s:Sender", "wsman:UnsupportedFeature", "FragmentLevelAccess")),
    ({"action": f"{P}/restart", "headers": "<w:FragmentTransfer>Group</w:FragmentTransfer>"},
     ("s:Sender", "wsman:UnsupportedFeature", "FragmentLevelAccess")),
    ({"action": namespaces.ENUMERATE, "body": "<n:Enumerate/>"},
     ("s:Sender", "wsman:InvalidSelectors", "UnexpectedSelectors")),
    ({"action": f"{P}/Rename", "body": "<p:Rename_INPUT><p:NewName>b</p:NewName></p:Rename_INPUT>"},
     ("s:Sender", "wsman:AlreadyExists", "")),
    ({"action": namespaces.PULL, "body": "<n:Release/>"}, ("s:Sender", "wsman:SchemaValidationError", "")),
]  # fmt: skip


async def test_what_is_refused_has_its_fault_and_changes_nothing(wsman, create):
    await create("a")
    await create("b")
    before = {name: await described(wsman, name) for name in ("a", "b")}
    for options, expected in REFUSED:
        request_options: dict[str, Any] = {"action": namespaces.GET, "name": "a", "body": "", **options}
        answer = await wsman.ask(
            request_options.pop("action"), request_options.pop("body"), **request_options
        )
        assert fault_details(answer) == expected, options
        assert wsman.last.status_code == (400 if expected[0] == "s:Sender" else 500)
        action = answer.header(namespaces.WSA("Action"))
        assert action is not None
        assert action.text.endswith("/fault")
    assert {name: await described(wsman, name) for name in await wsman.fleet.client.names()} == before


async def described(wsman, name: str) -> dict[str, Any]:
    """Without the time of its state: on a slow machine it may be late for a moment, and stable later."""
    actual = msgspec.structs.asdict(await wsman.fleet.client.describe(name))
    return {key: value for key, value in actual.items() if key not in ("since_ms", "status", "stable")}


async def test_hostile_xml(wsman, create):
    await create("a")
    before = await wsman.fleet.client.describe("a")
    good = (await wsman.ask(namespaces.GET, name="a")) and wsman.last.request.content
    bomb = b'<!DOCTYPE s [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    for data, subcode, detail in [
        (bomb + good, "wsman:SchemaValidationError", ""),
        (b'<!DOCTYPE s SYSTEM "http://127.0.0.1:1/x">' + good, "wsman:SchemaValidationError", ""),
        (b'<!DOCTYPE s [<!ENTITY x SYSTEM "file:///etc/passwd">]>' + good.replace(b">a<", b">&x;<"),
         "wsman:SchemaValidationError", ""),
        (good.decode().encode("utf-16"), "wsman:EncodingLimit", "CharacterSet"),
        (good + b" " * (600 << 10), "wsman:EncodingLimit", "ServiceEnvelopeLimit"),
        (good.replace(b"<s:Body>", b"<s:Body>" + b"<x>" * 99), "wsman:EncodingLimit", "ServiceEnvelopeLimit"),
        (b"<html/>", "", ""),
    ]:  # fmt: skip
        answer = await wsman.post(data)
        assert fault_details(answer)[:1] + fault_details(answer)[1:] == ("s:Sender", subcode, detail), data[
            :60
        ]
        assert "root:" not in wsman.last.text
    declared = b'<?xml version="1.0" encoding="ISO-8859-1"?>' + good
    answer = await wsman.post(declared, **{"content-type": "application/soap+xml"})
    assert fault_details(answer) == ("s:Sender", "wsman:EncodingLimit", "CharacterSet")
    assert (await wsman.post(declared)).first.name == P("Resource"), "what HTTP says goes first"
    old = good.replace(V12.value.encode(), b"http://schemas.xmlsoap.org/soap/envelope/")
    await wsman.post(old)
    assert "VersionMismatch" in wsman.last.text
    assert "Upgrade" in wsman.last.text
    assert await wsman.fleet.client.describe("a") == before


async def test_a_viewer_looks_and_changes_nothing(wsman, create):
    await create("a")
    wsman.user = "vic"
    assert (await wsman.ask(namespaces.GET, name="a")).first is not None
    for action in (namespaces.DELETE, namespaces.PUT, namespaces.CREATE, f"{P}/stop"):
        assert (await wsman.fault(action, name="a"))[1] == "wsman:AccessDenied"
    assert [row.state for row in await wsman.fleet.client.get("a")] == ["up"]


async def test_an_operation_that_takes_too_long(wsman):
    await wsman.fleet.client.create(
        {"name": "slow", "type": "memory", "agent": "host-a", "config": {"hangs": ["stop"]}}
    )
    await wsman.fleet.client.wait("slow", "up")
    timeout = "<w:OperationTimeout>PT0.3S</w:OperationTimeout>"
    assert (await wsman.fault(f"{P}/stop", name="slow", headers=timeout))[:2] == (
        "s:Receiver",
        "wsman:TimedOut",
    )
