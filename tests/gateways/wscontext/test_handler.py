"""WS-Context over a real information node: activities, contents, nesting, faults."""

from __future__ import annotations

import pytest

from muster.core.formats import xml
from muster.gateways.soap import addresses, envelope, xsd_types
from muster.inform import activities, client, protocol
from muster.testing.eventually import eventually
from tests.gateways.wscontext.conftest import WSCTX

V11, V12 = envelope.SoapVersion.V11, envelope.SoapVersion.V12


@pytest.mark.parametrize("version", [V11, V12])
async def test_an_activity_from_its_beginning_to_its_end(wscontext, version):
    wscontext.version = version
    id = await wscontext.begin()
    assert id.startswith("urn:uuid:")
    assert (await wscontext.ask("<getStatus/>", id)).text == "ACTIVE"
    assert (
        await wscontext.ask("<setContents><x:a k='1'>one</x:a><x:b/></setContents>", id)
    ).local == "contentsSet"
    child = (await wscontext.ask("<getContents/>", id)).children[0]
    assert child.name == WSCTX("context")
    assert child.get("expiresAt", "").endswith("Z")
    assert child.children[-2:] == [
        xml.XmlElement("{urn:x}a", "one", attributes={"k": "1"}),
        xml.XmlElement("{urn:x}b"),
    ]
    assert (await wscontext.ask("<setContents><x:c/></setContents>", id)).local == "contentsSet"  # replaces
    assert [element.local for element in (await wscontext.ask("<getContents/>", id)).children[0].children][
        -1
    ] == "c"
    assert (await wscontext.ask("<complete/>", id)).local == "completed"
    assert (await wscontext.ask("<getStatus/>", id)).text == "COMPLETED"
    assert await wscontext.fault("<complete/>", id) == "invalidStateFault"
    assert await wscontext.fault("<setContents><x:d/></setContents>", id) == "invalidStateFault"
    assert await wscontext.fault("<begin/>", id) == "invalidStateFault"


async def test_activities_inside_others(wscontext):
    outer = await wscontext.begin(body="<begin><timeout>60</timeout></begin>")
    inner = await wscontext.begin(outer, "<begin><timeout>3600</timeout></begin>")
    child = (await wscontext.ask("<getContents/>", inner)).children[0]
    parent = child.find(WSCTX("parent-context"))
    assert parent is not None
    assert parent.text_of(WSCTX("context-identifier")) == outer
    ends = [
        xsd_types.parse_datetime((await wscontext.ask("<getContents/>", item)).children[0].get("expiresAt"))
        for item in (outer, inner)
    ]
    assert abs((ends[0] - ends[1]).total_seconds()) < 1  # a child does not outlive its parent
    assert await wscontext.fault("<complete/>", outer) == "childActivityPendingFault"
    assert (await wscontext.ask("<complete/>", inner)).local == "completed"
    assert (await wscontext.ask("<complete/>", outer)).local == "completed"


async def test_timeouts(wscontext):
    assert int((await wscontext.ask("<getTimeout/>")).text) == activities.TIMEOUT_S
    assert (await wscontext.ask("<setTimeout><timeout>90</timeout></setTimeout>")).local == "timeoutSet"
    assert (await wscontext.ask("<getTimeout/>")).text == "90"
    wscontext.user = "bob"
    assert int((await wscontext.ask("<getTimeout/>")).text) == activities.TIMEOUT_S
    wscontext.user = "ann"
    for bad in ("-1", "2147483000", "soon", ""):
        assert (
            await wscontext.fault(f"<setTimeout><timeout>{bad}</timeout></setTimeout>")
            == "timeoutOutOfRangeFault"
        )
    assert (await wscontext.ask("<getTimeout/>")).text == "90"
    assert (await wscontext.ask("<setTimeout><timeout>0</timeout></setTimeout>")).local == "timeoutSet"
    assert int((await wscontext.ask("<getTimeout/>")).text) == activities.TIMEOUT_S

    short = await wscontext.begin(body="<begin><timeout>1</timeout></begin>")

    async def over() -> bool:
        return bool((await wscontext.ask("<getStatus/>", short)).text == "NO_ACTIVITY")

    await eventually(over, timeout_s=30)
    assert await wscontext.fault("<complete/>", short) == "invalidActivityFault"
    assert await wscontext.fault("<getContents/>", short) == "unknownContextFault"


async def test_faults_and_nothing_changed(wscontext, connect):
    id = await wscontext.begin()
    await wscontext.ask("<setContents><x:a/></setContents>", id)
    unknown = "urn:uuid:00000000-0000-0000-0000-000000000000"
    assert (await wscontext.ask("<getStatus/>", unknown)).text == "NO_ACTIVITY"
    assert (await wscontext.ask("<getStatus/>")).text == "NO_ACTIVITY"
    twice = f"<c:context><c:context-identifier>{id}</c:context-identifier></c:context>" * 2
    for body, context, headers, expected in [
        ("<complete/>", None, "", "noActivityFault"),
        ("<complete/>", unknown, "", "invalidActivityFault"),
        ("<complete/>", "../../etc", "", "validContextExpectedFault"),
        ("<complete/>", "x" * 1000, "", "validContextExpectedFault"),
        ("<complete/>", None, "<c:context/>", "validContextExpectedFault"),
        ("<complete/>", None, twice, "validContextExpectedFault"),
        ("<begin/>", unknown, "", "invalidActivityFault"),
        ("<getContents/>", None, "", "validContextExpectedFault"),
        ("<getContents/>", unknown, "", "unknownContextFault"),
        ("<setContents><x:b/></setContents>", unknown, "", "unknownContextFault"),
        ("<setContents>text</setContents>", id, "", "generalFault"),
        ("<setContents><context/></setContents>", id, "", "generalFault"),
        ("<complete><completion-status>MAYBE</completion-status></complete>", id, "", "generalFault"),
        ("<other/>", id, "", "generalFault"),
        ("", id, "", "generalFault"),
    ]:
        assert await wscontext.fault(body, context, headers) == expected, body
    assert (await wscontext.ask("<getContents/>", id)).children[0].children[-1].name == "{urn:x}a"
    matches = await client.InformClient(await connect("eve")).find("kind = 'session'")
    assert len(matches.contexts) == 1
    assert isinstance(matches.contexts[0], protocol.Context)


async def test_contents_that_are_no_xml(wscontext, connect):
    id = await wscontext.begin()
    direct = activities.Activities(client.InformClient(await connect("zoe")), lambda: 0)
    key = activities.PREFIX + id.removeprefix("urn:uuid:")
    context = await client.InformClient(await connect("yan")).get(key)
    written = client.InformClient(await connect("xia"))
    await written.put(key, b"\x00\xff", attributes=context.attributes, lease_s=60)
    shown = (await wscontext.ask("<getContents/>", id)).children[0].children[-1]
    assert (shown.local, shown.text) == ("bytes", "AP8=")
    body = "<setContents><x:q xmlns:x='urn:muster:context:1'/></setContents>"
    assert (await wscontext.ask(body.replace("x:q", "x:bytes"), id)).local == "contentsSet"
    assert (await direct.get(id.removeprefix("urn:uuid:"))).contents == b""


async def test_answers_go_elsewhere_only_where_allowed(wscontext):
    def reply_to(url: str, wsa: str = addresses.WSA05) -> str:
        return (
            f'<w:MessageID xmlns:w="{wsa}">m-1</w:MessageID>'
            f'<w:ReplyTo xmlns:w="{wsa}"><w:Address>{url}</w:Address></w:ReplyTo>'
        )

    for wsa in (addresses.WSA04, addresses.WSA05):
        assert (await wscontext.ask("<begin/>", headers=reply_to(wscontext.sink_url, wsa))).name == "accepted"
        answer = wscontext.sink.pop()
        assert answer.first is not None
        assert answer.first.name == WSCTX("begun")
        relates = answer.header(xml.XmlNamespace(wsa)("RelatesTo"))
        assert relates is not None
        assert relates.text == "m-1"
    assert (await wscontext.ask("<complete/>", headers=reply_to(wscontext.sink_url))).name == "accepted"
    fault = wscontext.sink.pop().first
    assert fault is not None
    assert fault.local == "Fault"
    assert (await wscontext.ask("<begin/>", headers=reply_to(addresses.NONE))).name == "accepted"
    anonymous = await wscontext.ask("<getStatus/>", headers=reply_to(addresses.ANONYMOUS[addresses.WSA05]))
    assert anonymous.text == "NO_ACTIVITY"
    assert "m-1" in wscontext.last.text
    twice = reply_to(addresses.ANONYMOUS[addresses.WSA05]) * 2
    assert (await wscontext.ask("<begin/>", headers=twice)).local == "Fault"
    for url in ("http://127.0.0.1:1/", wscontext.sink_url.replace("replies", "other"), "file:///etc/passwd"):
        assert (await wscontext.ask("<begin/>", headers=reply_to(url))).local == "Fault"
    assert wscontext.sink == []


async def test_hostile_and_mistaken_messages(wscontext):
    wscontext.version = V12
    await wscontext.begin()
    good = wscontext.last.request.content
    before = wscontext.node.log.applied
    for data, word in [
        (b'<!DOCTYPE a [<!ENTITY x "y">]>' + good, "document type"),
        (b'<!DOCTYPE a SYSTEM "http://127.0.0.1:1/">' + good, "document type"),
        (good[:-5], "not XML"),
        (good.replace(b"<c:begin/>", b"<x>" * 70), "nested deeper"),
        (good.replace(b"soap-envelope", b"soap-next"), "VersionMismatch"),
        (good.replace(b"<s:Header>", b'<s:Header><q s:mustUnderstand="1"/>'), "MustUnderstand"),
    ]:
        answer = await wscontext.post(data)
        assert answer.status_code in (400, 500)
        assert word in answer.text, answer.text
    anonymous = await wscontext.http.post(
        f"{wscontext.url}/context", content=good, headers={"content-type": "text/xml"}
    )
    assert anonymous.status_code == 401
    wrong = await wscontext.http.post(
        f"{wscontext.url}/context", content=good, headers={"content-type": "text/xml"}, auth=("ann", "wrong")
    )
    assert wrong.status_code == 401
    assert wscontext.node.log.applied == before, "nothing changed"
    assert (await wscontext.post(good)).status_code == 200


async def test_answers_and_faults_go_where_the_request_wants_each(wscontext):
    """Of the four combinations none is lost, and none goes to the wrong side."""
    wsa = addresses.WSA05
    here, there = addresses.ANONYMOUS[wsa], wscontext.sink_url
    for body, local in (("<begin/>", "begun"), ("<complete/>", "Fault")):
        for reply_to, fault_to in ((here, there), (there, here), (there, there), (there, ""), (here, "")):
            wscontext.sink.clear()
            headers = f'<w:MessageID xmlns:w="{wsa}">u:1</w:MessageID>' + "".join(
                f'<w:{name} xmlns:w="{wsa}"><w:Address>{address}</w:Address></w:{name}>'
                for name, address in (("ReplyTo", reply_to), ("FaultTo", fault_to))
                if address
            )
            answer = await wscontext.ask(body, headers=headers)
            to = (fault_to or reply_to) if local == "Fault" else reply_to
            if to == here:
                assert (answer.local, wscontext.sink) == (local, [])
            else:
                assert answer.name == "accepted"
                (sent,) = wscontext.sink
                assert sent.first is not None
                assert sent.first.local == local
