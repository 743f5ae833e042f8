"""What hostile clients send before they have logged in costs little, and costs other clients nothing."""

from __future__ import annotations

import asyncio
import socket
import ssl
import tracemalloc

import httpx
import pytest

from muster.bus.http import asgi_server
from muster.core import errors
from muster.core.formats import xml
from muster.gateways.soap import addresses, asgi, client_budget, endpoint, faults
from muster.gateways.soap import server as soap_server
from muster.testing import eventually
from muster.trust import certificates
from tests.gateways.soap.conftest import NS, Echo, message, request, respond

HEADERS = {"content-type": "text/xml", "authorization": "Basic YW5uOnNlc8OkbQ=="}


def declarations(first: int, count: int) -> str:
    return " ".join(f'xmlns:p{number}="u"' for number in range(first, first + count))


# Parsing


def test_a_prefix_at_each_element_costs_its_own_size_only():
    inside = '<a xmlns:z="u"/>' * 20_000
    outer = "".join(f"<a {declarations(level * 60, 60)}>" for level in range(4))
    data = f"{outer}{inside}{'</a>' * 4}".encode()
    tracemalloc.start()
    try:
        root = xml.parse(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20
    innermost = root.children[0].children[0].children[0].children[0]
    assert innermost.namespaces is not None
    assert (innermost.namespaces["z"], innermost.namespaces["p0"], len(innermost.namespaces)) == (
        "u",
        "u",
        241,
    )


def test_prefixes_in_scope_are_bounded():
    levels = 10
    data = "".join(f"<a {declarations(level * 60, 60)}>" for level in range(levels)) + "</a>" * levels
    with pytest.raises(errors.LimitExceeded, match="prefixes"):
        xml.parse(data.encode())


def test_writing_stops_at_its_bound():
    root = xml.parse(f"<a {declarations(0, 60)}>{'<b/>' * 10_000}</a>".encode())
    echoed = xml.XmlElement("all", *root.children)  # 6 MB: each child is written with its 60 prefixes
    tracemalloc.start()
    try:
        with pytest.raises(errors.LimitExceeded):
            xml.write(echoed, bytes_max=8192)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    element = xml.XmlElement("a")
    for _ in range(50):
        element = xml.XmlElement("a", element, element)
    with pytest.raises(errors.LimitExceeded):  # long before it is written
        xml.write(element, bytes_max=8192)
    assert len(xml.write(xml.XmlElement("a", "x" * 100), bytes_max=110)) <= 110
    with pytest.raises(errors.LimitExceeded):
        xml.write(xml.XmlElement("a", "ä" * 100), bytes_max=110)


# Responses that are longer than their requests


@pytest.mark.parametrize(
    ("parameter", "count", "limit"),
    [
        (
            "<p1:a/>",
            60,
            f"more than {addresses.PARAMETERS_BYTES_MAX} bytes",
        ),  # each with 120 prefixes
        ("<a/>", 8000, f"more than {addresses.PARAMETERS_MAX} reference"),  # each with a mark
    ],
)
def test_reference_parameters_that_replies_would_multiply_are_refused(parameter: str, count: int, limit: str):
    wsa = addresses.WSA05
    prefixes = declarations(0, 60) if ":" in parameter else ""
    element = xml.parse(
        f'<x {prefixes}><w:ReplyTo xmlns:w="{wsa}" {prefixes.replace("p", "q")}><w:Address>x</w:Address>'
        f"<w:ReferenceParameters>{parameter * count}</w:ReferenceParameters></w:ReplyTo></x>".encode()
    ).children[0]
    parameters = [child for group in element.all(wsa("ReferenceParameters")) for child in group.children]
    headers = addresses.EndpointReference("x", parameters).headers(wsa)
    assert len(xml.write(xml.XmlElement("all", *headers))) > 2 * addresses.PARAMETERS_BYTES_MAX
    with pytest.raises(faults.SoapFault, match=limit):
        addresses.EndpointReference.read(element)


async def test_a_fault_does_not_multiply_a_long_namespace(echo: Echo):
    header = '<h:a s:mustUnderstand="1"/>'
    data = message(headers=header * 1000).replace(b"<s:Header>", b'<s:Header xmlns:h="%s">' % (b"u" * 5000))
    echo.endpoint.limits = xml.XmlLimits()
    answer = await respond(echo.endpoint, request(data))
    assert b"MustUnderstand" in answer.body
    assert len(answer.body) < endpoint.FAULT_BYTES_MAX


@pytest.mark.parametrize(("of_response", "of_endpoint"), [(4000, 8000), (None, 4000)])
async def test_a_response_is_bounded_by_the_request_and_by_the_endpoint(
    echo: Echo, of_response: int | None, of_endpoint: int
):
    async def handle(_: endpoint.SoapRequest) -> endpoint.SoapResponse:
        return endpoint.SoapResponse([xml.XmlElement(NS("a"), "x" * 5000)], bytes_max=of_response)

    echo.endpoint.handle, echo.endpoint.bytes_max = handle, of_endpoint
    answer = await respond(echo.endpoint, request(message()))
    assert (answer.status, len(answer.body) < 4000) == (400, True)


def test_the_start_of_a_message_is_enough_to_find_its_login():
    start = b"<e:Envelope xmlns:e='x'><e:Body><save xmlns='u'><authInfo> token </authInfo><tModel a="
    assert xml.text_at_start(start, "{u}authInfo") == "token"
    assert xml.text_at_start(start, "{v}authInfo") is None
    assert xml.text_at_start(b"<!DOCTYPE a><authInfo>x</authInfo>", "authInfo") is None
    assert xml.text_at_start(b"<a>" + b"<b/>" * 100 + b"<authInfo>x</authInfo>", "authInfo") is None


# Before a login


async def test_a_wrong_password_is_refused_before_the_message_is_read(echo: Echo, url: str):
    host, port = httpx.URL(url).host, httpx.URL(url).port
    reader, writer = await asyncio.open_connection(host, port)
    writer.write(
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: text/xml\r\nAuthorization: Basic YW5uOng=\r\n"
        b"Content-Length: 10000\r\n\r\n"  # and not a byte of it
    )
    assert await reader.read(12) == b"HTTP/1.1 401"
    writer.close()
    await writer.wait_closed()


async def test_a_client_without_a_login_may_send_little(echo: Echo, url: str):
    echo.endpoint.limits, echo.endpoint.anonymous = xml.XmlLimits(), xml.XmlLimits(bytes=2000, elements=20)
    async with httpx.AsyncClient(headers={"content-type": "text/xml"}) as client:
        assert (await client.post(url, content=message("<e:Open/>"))).status_code == 200
        long = await client.post(url, content=message(f"<e:Open>{'x' * 2000}</e:Open>"))
        assert "longer than 2000 bytes (authenticated clients may send" in long.text
        many = await client.post(url, content=message(f"<e:Open>{'<a/>' * 30}</e:Open>"))
        assert "more than 20 elements" in many.text
        known = await client.post(url, content=message(f"<e:Open>{'<a/>' * 3000}</e:Open>"), headers=HEADERS)
        assert known.status_code == 200


async def test_clients_without_a_login_have_a_budget(echo: Echo):
    now_s, cost = [0.0], client_budget.MESSAGE_BYTES_MIN
    budgets = client_budget.ClientBudgets(
        client_budget.ClientBudget(anonymous_bytes=3 * cost, anonymous_bytes_per_s=cost),
        clock=lambda: now_s[0],
    )
    application = asgi.SoapApplication({"/echo": echo.endpoint}, budgets=budgets)
    async with soap_server.SoapServer(application) as server, httpx.AsyncClient() as client:

        async def post(**headers: str) -> httpx.Response:
            arguments = {"content-type": "text/xml", **headers}
            return await client.post(f"{server.url}/echo", content=message("<e:Open/>"), headers=arguments)

        assert [(await post()).status_code for _ in range(4)] == [200, 200, 200, 429]
        assert (await post(authorization=HEADERS["authorization"])).status_code == 200
        now_s[0] += 1.0
        assert [(await post()).status_code for _ in range(2)] == [200, 429]


def test_requests_under_way_are_bounded_for_each_client():
    budgets = client_budget.ClientBudgets(client_budget.ClientBudget(requests=2))
    with budgets.request("10.0.0.1"), budgets.request("10.0.0.1"):
        with pytest.raises(errors.Overloaded), budgets.request("10.0.0.1"):
            pass
        with budgets.request("10.0.0.2"):
            pass
    assert not budgets._requests


async def test_a_long_message_is_parsed_off_the_loop(echo: Echo, monkeypatch: pytest.MonkeyPatch):
    echo.endpoint.limits = xml.XmlLimits(bytes=2 << 20)
    threads: list[bool] = []
    parse = xml.parse

    def noted(data: bytes, limits: xml.XmlLimits | None = None) -> xml.XmlElement:
        try:
            asyncio.get_running_loop()
            threads.append(False)
        except RuntimeError:
            threads.append(True)
        return parse(data, limits)

    monkeypatch.setattr(xml, "parse", noted)
    assert (await respond(echo.endpoint, request(message(f"<e:Hi>{'x' * 20_000}</e:Hi>")))).status == 200
    assert (await respond(echo.endpoint, request(message()))).status == 200
    assert threads == [True, False]


# HTTP


@pytest.mark.parametrize(
    "start",
    [
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\nHost: x\nContent-Length: 0\n\n",
    ],
)
async def test_an_ambiguous_request_ends_the_connection(url: str, start: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
    writer.write(start + b"GET /echo?wsdl HTTP/1.1\r\nHost: x\r\n\r\n")
    async with asyncio.timeout(10):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 400")
    assert answer.count(b"HTTP/1.1") == 1
    writer.close()
    await writer.wait_closed()


@pytest.mark.may_block(reason="certificates are files")
async def test_tls_handshakes_count_as_connections(echo: Echo, tmp_path):
    authority = certificates.CertificateStore.create(tmp_path / "ca", "test", lifetime_s=3600)
    authority.ensure("door", ["127.0.0.1"])
    pem = str(authority.pair("door").path)
    made = soap_server.SoapServer(echo.application, certificate=pem, key=pem, connections_max=4)
    async with made as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(12)]
        await eventually.eventually(
            lambda: sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) == 8
        )
        assert len(server._server.open) == 4
        for _, writer in silent:
            writer.transport.abort()
        await eventually.eventually(lambda: not server._server.open)
        believed = ssl.create_default_context(cafile=str(authority.bundle))
        async with httpx.AsyncClient(headers=HEADERS, verify=believed) as client:
            assert (await client.post(f"{server.url}/echo", content=message())).status_code == 200


async def test_one_address_cannot_take_all_connections(echo: Echo):
    async with soap_server.SoapServer(echo.application, connections_max=4, of_address_max=2) as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        await eventually.eventually(
            lambda: sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) == 3
        )
        transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
        async with httpx.AsyncClient(headers=HEADERS, transport=transport) as client:
            assert (await client.post(f"{server.url}/echo", content=message())).status_code == 200
        for _, writer in silent:
            writer.transport.abort()
        await eventually.eventually(lambda: not server._server.open)
        async with httpx.AsyncClient(headers=HEADERS) as client:
            assert (await client.post(f"{server.url}/echo", content=message())).status_code == 200


async def test_a_proxy_connects_for_all_clients(echo: Echo):
    made = soap_server.SoapServer(echo.application, connections_max=4, of_address_max=1, behind_proxy=True)
    async with made as server:
        silent = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
        await eventually.eventually(lambda: len(server._server.open) == 3)
        for _, writer in silent:
            writer.transport.abort()
        await eventually.eventually(lambda: not server._server.open)


async def test_an_answer_that_is_not_read_ends_the_connection(echo: Echo, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(asgi_server, "WRITE_TIMEOUT_S", 0.1)
    echo.endpoint.documents = {"wsdl": lambda _: b"x" * 8_000_000}
    async with soap_server.SoapServer(echo.application) as server:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", server.port))
            await loop.sock_sendall(client, b"GET /echo?wsdl HTTP/1.1\r\nHost: x\r\n\r\n")
            await eventually.eventually(lambda: server._server.open)
            await eventually.eventually(lambda: not server._server.open, timeout_s=10)
