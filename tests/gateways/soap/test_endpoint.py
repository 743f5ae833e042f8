"""An endpoint rejects invalid requests with the right fault and counter, and reads no more than it must."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from muster.bus.rpc import origin
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addresses, endpoint, envelope, faults
from muster.trust.login import passwords
from tests.gateways.soap.conftest import NS, message, request, respond

ANN = "Basic YW5uOnNlc8OkbQ=="
V11, V12 = envelope.SoapVersion.V11, envelope.SoapVersion.V12


def body(response) -> xml.XmlElement:
    return envelope.read(xml.parse(response.body)).body[0]


def fault_codes(response) -> tuple[str, str]:
    """A fault's code and subcode."""
    fault = body(response)
    if fault.name == V11("Fault"):
        code = fault.find("faultcode")
        assert code is not None
        return str(code.qname()).rpartition("}")[2], ""
    code = fault.find(V12("Code"))
    assert code is not None
    value, subcode = code.find(V12("Value")), code.find(V12("Subcode"))
    assert value is not None
    inner = subcode.find(V12("Value")) if subcode else None
    return str(value.qname()).rpartition("}")[2], str(inner.qname()) if inner else ""


@pytest.mark.parametrize("version", [V11, V12])
async def test_the_answer_has_the_version_of_the_question(echo, version):
    response = await respond(echo.endpoint, request(message("<e:Hello>ä</e:Hello>", version=version)))
    assert (response.status, response.content_type) == (200, version.content_type)
    content = envelope.read(xml.parse(response.body))
    assert content.version is version
    assert content.body[0] == xml.XmlElement(NS("Hello"), "ä")
    assert content.headers[0].text == "ann"


async def test_an_empty_body_is_answered_by_an_empty_body(echo):
    response = await respond(echo.endpoint, request(message("")))
    assert envelope.read(xml.parse(response.body)).body == []


async def test_requests_to_services_state_the_endpoint_and_the_address(echo):
    stated = []

    async def handle(_: object) -> endpoint.SoapResponse:
        stated.append(origin.headers())
        return endpoint.SoapResponse()

    echo.endpoint.handle = handle
    sent = dataclasses.replace(request(message()), address="192.0.2.7")
    assert (await respond(echo.endpoint, sent)).status == 200
    assert stated == [{origin.HEADER: "echo 192.0.2.7"}]
    assert origin.headers() == {}


@pytest.mark.parametrize(
    ("sent", "code", "status", "reason"),
    [
        (b'<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', "Sender", 400, "doctype"),
        (b"<a", "Sender", 400, "malformed"),
        (b"<a/>", "Sender", 400, "Sender"),
        (message() + b"<b/>", "Sender", 400, "malformed"),
        (
            message("?").replace(b"?", b"\xff"),
            "Sender",
            400,
            "charset",
        ),
        (b"<a>" * 100, "Sender", 400, "Sender"),
        (message("x" * 30_000), "Sender", 400, "Sender"),
        (message().replace(b"soap-envelope", b"soap-new"), "VersionMismatch", 500, "VersionMismatch"),
        (message("<e:Missing/>"), "Sender", 400, "Sender"),
        (message("<e:Bug/>"), "Receiver", 500, "Receiver"),
        (message("<e:Hang/>"), "Receiver", 500, "Receiver"),
        (message("<e:Long/>"), "Sender", 400, "Sender"),
        (message(headers='<e:h s:mustUnderstand="true"/>'), "MustUnderstand", 500, "MustUnderstand"),
    ],
)
async def test_each_kind_of_refusal(echo, sent, code, status, reason):
    response = await respond(echo.endpoint, request(sent))
    assert fault_codes(response)[0] == code
    assert response.status == status
    assert echo.counted(reason)
    assert b"secret" not in response.body


async def test_a_fault_of_the_service_in_both_versions(echo):
    response = await respond(echo.endpoint, request(message("<e:Fault/>")))
    assert fault_codes(response) == ("Sender", NS("Denied"))
    assert b"<s:Detail><e:why>so</e:why></s:Detail>" in response.body
    response = await respond(echo.endpoint, request(message("<e:Fault/>", version=V11)))
    assert (fault_codes(response)[0], response.status) == ("Client", 500)
    assert b"<detail><e:why>so</e:why></detail>" in response.body
    response = await respond(echo.endpoint, request(message("<e:Missing/>", version=V11)))
    assert b"<faultstring>no such thing (look elsewhere)</faultstring>" in response.body


async def test_a_login_that_cannot_be_checked_is_a_fault_of_the_server(echo):
    async def unreadable(*_: str) -> passwords.PasswordLogin:
        raise errors.Unavailable("the account cannot be read")

    echo.endpoint.authenticate = unreadable
    response = await respond(echo.endpoint, request(message()))
    assert (response.status, fault_codes(response)[0]) == (500, "Receiver")


async def test_a_header_that_must_be_understood(echo):
    response = await respond(echo.endpoint, request(message(headers='<e:h s:mustUnderstand="1"/>')))
    content = envelope.read(xml.parse(response.body))
    assert content.headers[0].name == V12("NotUnderstood")
    assert (content.headers[0].namespaces or {})["h"] == NS
    assert content.headers[0].get("qname") == "h:h"
    for wsa in (addresses.WSA04, addresses.WSA05):
        unknown = f'<w:Later xmlns:w="{wsa}" s:mustUnderstand="1"/>'
        assert b"NotUnderstood" in (await respond(echo.endpoint, request(message(headers=unknown)))).body
    for spaced in ('s:mustUnderstand=" true "', 's:mustUnderstand="1" s:role=" "'):
        answer = await respond(echo.endpoint, request(message(headers=f"<e:h {spaced}/>")))
        assert b"NotUnderstood" in answer.body
    for header in (
        '<e:h mustUnderstand="true"/>',  # unqualified: says nothing
        '<e:h s:mustUnderstand="0"/>',
        '<e:h s:mustUnderstand="1" s:role="urn:somebody-else"/>',
        f'<w:To xmlns:w="{addresses.WSA04}" s:mustUnderstand="1">x</w:To>',
    ):
        assert (await respond(echo.endpoint, request(message(headers=header)))).status == 200


async def test_an_unsupported_version_is_refused_with_the_supported_ones(echo):
    echo.endpoint.versions = (V12,)
    response = await respond(echo.endpoint, request(message(version=V11)))
    assert fault_codes(response)[0] == "VersionMismatch"
    upgrade = envelope.read(xml.parse(response.body)).headers[0]
    assert upgrade.name == faults.SOAP12("Upgrade")
    assert (upgrade.children[0].namespaces or {})["s"] == V12.value
    assert echo.calls == []


@pytest.mark.parametrize(
    "header",
    [None, "", "Basic", "Basic !!!", "Bearer abc", "Basic YW5u", "Basic YW5uOndyb25n", "Basic /////w=="],
)
async def test_unknown_clients_are_refused(echo, header):
    sent = request(message())
    headers = (
        {"content-type": "text/xml"}
        if header is None
        else {"content-type": "text/xml", "authorization": header}
    )
    response = await respond(echo.endpoint, request(sent.body, headers=headers))
    assert response.status == 401
    assert response.headers["WWW-Authenticate"].startswith("Basic realm=")
    assert echo.calls == []
    assert echo.counted("unauthorized")


async def test_what_needs_no_login(echo):
    headers = {"content-type": "text/xml"}
    response = await respond(echo.endpoint, request(message("<e:Open/>"), headers=headers))
    assert response.status == 200
    assert echo.calls[0].caller is None
    wrong = {**headers, "authorization": "Basic YW5uOndyb25n"}
    assert (await respond(echo.endpoint, request(message("<e:Open/>"), headers=wrong))).status == 401


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"method": "PUT"}, 405),
        ({"method": "GET"}, 405),
        ({"method": "GET", "query": "nothing"}, 404),
        ({"headers": {"content-type": "text/plain"}}, 415),
        ({"headers": {}}, 415),
        ({"headers": {"content-type": "text/xml", "content-encoding": "gzip"}}, 415),
        (
            {"headers": {"content-type": "text/xml; charset=utf-16", "authorization": ANN}},
            500,
        ),
    ],
)
async def test_what_is_not_as_http_has_it(echo, changes, status):
    response = await respond(echo.endpoint, request(message(), **changes))
    assert response.status == status
    assert echo.calls == []


async def test_the_wsdl_names_the_address_that_it_was_asked_at(echo):
    response = await respond(echo.endpoint, request(b"", method="GET", query="WSDL"))
    assert response.body == b"<wsdl at='http://here/echo'/>"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.binary(max_size=100),
    st.dictionaries(
        st.sampled_from(["content-type", "authorization", "soapaction"]),
        st.one_of(
            st.text(max_size=20), st.sampled_from(["text/xml;charset", "Basic YW5uOnNlc8OkbQ==", "text/xml"])
        ),
    ),
    st.sampled_from(["POST", "GET", "HEAD", "DELETE"]),
)
async def test_every_input_gets_a_reply(echo, data, headers, method):
    for sent in (data, message() + data, message(headers="<e:a/>").replace(b"<e:a/>", data)):
        response = await respond(echo.endpoint, request(sent, headers=headers, method=method))
        assert response.status in (200, 400, 401, 404, 405, 415, 500)
        if response.content_type.endswith("UTF-8") and response.body:
            envelope.read(xml.parse(response.body))


async def test_addressing_of_both_namespaces():
    for wsa in (addresses.WSA04, addresses.WSA05):
        headers = (
            f'<w:MessageID xmlns:w="{wsa}"> id-1 </w:MessageID><w:Action xmlns:w="{wsa}">urn:do</w:Action>'
            f'<w:ReplyTo xmlns:w="{wsa}"><w:Address>http://back/</w:Address><w:ReferenceParameters>'
            f"<e:key>7</e:key></w:ReferenceParameters></w:ReplyTo>"
        )
        content = addresses.read(envelope.read(xml.parse(message(headers=headers))))
        assert content is not None
        assert (content.wsa, content.message_id, content.action, content.repeated) == (
            wsa,
            "id-1",
            "urn:do",
            [],
        )
        assert not content.replies_on_connection()
        reply = content.reply_headers("urn:done", new_id=lambda: "id-2")
        assert [(reply_header.local, reply_header.text) for reply_header in reply] == [
            ("To", "http://back/"),
            ("Action", "urn:done"),
            ("MessageID", "id-2"),
            ("RelatesTo", "id-1"),
            ("key", "7"),
        ]
        marked = reply[-1].get(addresses.WSA05("IsReferenceParameter"))
        assert marked == ("true" if wsa == addresses.WSA05 else None)
        twice = addresses.read(envelope.read(xml.parse(message(headers=headers + headers))))
        assert twice is not None
        assert set(twice.repeated) == {"MessageID", "Action", "ReplyTo"}
    assert addresses.read(envelope.read(xml.parse(message()))) is None
