"""The endpoints over real sockets: alone behind uvicorn, and mounted in a web application."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator

import fastapi
import httpx
import pytest
from starlette import routing

from muster.bus.http import asgi_server
from muster.core import errors
from muster.gateways.soap import asgi
from muster.gateways.soap import server as soap_server
from muster.trust import certificates
from tests.gateways.soap.conftest import message

HEADERS = {"content-type": "text/xml", "authorization": "Basic YW5uOnNlc8OkbQ=="}


async def test_a_connection_serves_many_requests(echo, url):
    async with httpx.AsyncClient(headers=HEADERS) as client:
        for _ in range(3):
            answer = await client.post(url, content=message())
            assert answer.status_code == 200
            assert "Hello" in answer.text
        assert (await client.get(f"{url}?wsdl")).text == f"<wsdl at='{url}'/>"
        head = await client.head(f"{url}?wsdl")
        assert (head.status_code, head.text) == (200, "")
        assert (await client.post(url.replace("/echo", "/other"), content=message())).status_code == 404
        assert (await client.post(f"{url}/", content=message())).status_code == 200


async def test_a_body_that_is_too_long_gets_its_fault(echo, url):
    async with httpx.AsyncClient(headers=HEADERS) as client:
        answer = await client.post(url, content=b"x" * 3_000_000)
        assert answer.status_code in (400, 500)
        assert "longer than 20000 bytes" in answer.text
        assert (await client.post(url, content=message())).status_code == 200
    assert echo.counted("Sender")


async def test_a_body_in_pieces_and_one_that_waits_to_be_asked_for(echo, url):
    async def pieces() -> AsyncIterator[bytes]:
        for piece in message():
            yield bytes([piece])

    async with httpx.AsyncClient(headers=HEADERS) as client:
        assert (await client.post(url, content=pieces())).status_code == 200
        answer = await client.post(url, content=message(), headers={"Expect": "100-continue"})
        assert answer.status_code == 200


async def test_a_body_that_never_ends_and_a_head_that_never_ends_are_given_up(echo, url, monkeypatch):
    monkeypatch.setattr(asgi, "BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(asgi_server, "HEAD_TIMEOUT_S", 0.1)
    port = httpx.URL(url).port
    for output in (
        b"",
        b"POST /echo HTTP/1.1\r\nHost: x\r\n",
        b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Type: text/xml\r\nContent-Length: 9\r\n\r\nabc",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(output)
        async with asyncio.timeout(30):
            answer = await reader.read(12)
        assert answer in (b"", b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()
    assert echo.calls == []


async def test_no_more_at_once_than_were_allowed(echo):
    application = asgi.SoapApplication({"/echo": echo.endpoint}, concurrent_max=1)
    async with soap_server.SoapServer(application) as server, httpx.AsyncClient(headers=HEADERS) as client:
        url = f"{server.url}/echo"
        first = asyncio.create_task(client.post(url, content=message("<e:Hang/>")))
        await echo.called.wait()
        assert (await client.post(url, content=message())).status_code == 503
        assert (await first).status_code == 500
        assert (await client.post(url, content=message())).status_code == 200


@pytest.mark.may_block(reason="certificates are files")
async def test_over_tls(echo, tmp_path):
    authority = certificates.CertificateStore.create(tmp_path / "ca", "test", lifetime_s=3600)
    authority.ensure("door", ["127.0.0.1"])
    pem = str(authority.pair("door").path)
    believed = ssl.create_default_context(cafile=str(authority.bundle))
    async with (
        soap_server.SoapServer(echo.application, certificate=pem, key=pem) as server,
        httpx.AsyncClient(headers=HEADERS, verify=believed) as client,
    ):
        assert server.url.startswith("https://")
        assert (await client.post(f"{server.url}/echo", content=message())).status_code == 200
        assert (await client.get(f"{server.url}/echo?wsdl")).text == f"<wsdl at='{server.url}/echo'/>"
    with pytest.raises(errors.Unavailable, match="cannot serve"):
        await soap_server.SoapServer(echo.application, certificate=str(tmp_path / "none.pem")).start()


async def test_mounted_in_a_web_application(echo):
    web = fastapi.FastAPI()
    web.router.routes += [routing.Route(path, echo.application) for path in echo.application.paths]
    transport = httpx.ASGITransport(web)
    async with httpx.AsyncClient(transport=transport, base_url="http://web", headers=HEADERS) as client:
        assert (await client.post("/echo", content=message())).status_code == 200
        assert (await client.get("/echo?wsdl")).text == "<wsdl at='http://web/echo'/>"
    web.mount("/below", echo.application)
    async with httpx.AsyncClient(transport=transport, base_url="http://web", headers=HEADERS) as client:
        assert (await client.post("/below/echo", content=message())).status_code == 200
