"""The HTTP server: its responses, and hostile clients."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.http import client
from muster.bus.http import server as http_server
from muster.core import errors


def routes() -> dict[str, http_server.Handler]:
    async def echo(request: http_server.HttpRequest) -> http_server.HttpResponse:
        return http_server.json_response(
            {"path": request.path, "query": dict(request.query), "peer": request.peer}
        )

    def fail(_: http_server.HttpRequest) -> http_server.HttpResponse:
        raise errors.Unavailable("not now")

    def bug(_: http_server.HttpRequest) -> http_server.HttpResponse:
        raise ZeroDivisionError

    return {"/echo": echo, "/fail": fail, "/bug": bug, "/empty": lambda _: http_server.HttpResponse(204)}


async def raw(server: http_server.HttpServer, text: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(server.host, server.port)
    writer.write(text)
    try:
        async with asyncio.timeout(30):
            return await reader.read()
    finally:
        writer.close()


async def test_it_replies_and_reports_its_address():
    async with await http_server.serve(routes()) as server:
        response = await client.get(f"{server.url}/echo?a=1&b=x%20y&a=2")
        assert response.status == 200
        assert response.json() == {"path": "/echo", "query": {"a": "2", "b": "x y"}, "peer": "127.0.0.1"}
        assert (await client.get(f"{server.url}/empty")).status == 204


async def test_errors_of_ours_become_statuses():
    async with await http_server.serve(routes()) as server:
        response = await client.get(f"{server.url}/fail")
        assert (response.status, response.body) == (503, b"not now\n")
        assert (await client.get(f"{server.url}/nothing")).status == 404
        assert (await client.get(f"{server.url}/bug")).status == 500


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n", b"200"),
        (b"POST /echo HTTP/1.1\r\nHost: x\r\n\r\n", b"405"),
        (b"GET http://other/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /echo\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x00\r\n\r\n", b"400"),
        (b"GET /echo?" + b"a=1&" * 200 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n", b"431"),
    ],
)
async def test_requests_good_and_bad(text, status):
    async with await http_server.serve(routes()) as server:
        assert (await raw(server, text)).split(b" ")[1] == status


async def test_an_endpoint_accepts_posts_and_counts_refusals():
    taken: list[bytes] = []
    refused: list[str] = []

    def take(request: http_server.HttpRequest) -> http_server.HttpResponse:
        if request.body == b"bad":
            raise errors.InvalidInput("not that")
        taken.append(request.body)
        return http_server.text("")

    async with await http_server.serve(
        routes(), post_routes={"/in": take}, on_refused=refused.append, body_bytes_max=9
    ) as server:

        async def status(body: bytes) -> int:
            return (await client.post(f"{server.url}/in", body, headers={})).status

        statuses = [await status(body) for body in (b"12345", b"", b"bad", b"1234567890")]
        assert statuses == [200, 200, 400, 413]
        waiting = b"POST /in HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
        assert [
            line for line in (await raw(server, waiting)).split(b"\r\n") if line.startswith(b"HTTP/")
        ] == [
            b"HTTP/1.1 100 Continue",
            b"HTTP/1.0 200 OK",
        ]
        assert b"405" in await raw(server, b"GET /in HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"400" in await raw(server, b"POST /in HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"400" in await raw(server, b"nonsense\r\n\r\n")
        assert b"431" in await raw(server, b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n")
    assert taken == [b"12345", b"", b"hi"]
    invalid = errors.InvalidInput.code
    assert refused == [invalid, errors.LimitExceeded.code, invalid, "malformed", "too-large"]


async def test_a_head_has_no_body():
    async with await http_server.serve(routes()) as server:
        head, _, body = (await raw(server, b"HEAD /echo HTTP/1.1\r\nHost: x\r\n\r\n")).partition(b"\r\n\r\n")
        assert body == b""
        assert b"Content-Length: 0" not in head


async def test_a_silent_client_is_disconnected(monkeypatch):
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.05)
    async with await http_server.serve(routes()) as server:
        assert await raw(server, b"GET /ec") == b""


async def test_closing_does_not_wait_for_silent_clients():
    server = await http_server.serve(routes())
    _, writer = await asyncio.open_connection(server.host, server.port)
    async with asyncio.timeout(30):
        await server.close()
    writer.close()


async def test_a_taken_port_is_named():
    async with await http_server.serve({}) as server:
        with pytest.raises(errors.Unavailable, match=f"cannot listen on 127.0.0.1:{server.port}"):
            await http_server.serve({}, port=server.port)


async def test_a_server_without_a_valid_reply_is_named():
    with pytest.raises(errors.Unavailable, match="does not respond"):
        await client.get("http://127.0.0.1:9/")
    with pytest.raises(errors.InvalidInput, match="is not an http"):
        await client.get("ftp://127.0.0.1/")

    async def nonsense(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SMTP ready\r\n\r\n")
        writer.close()

    other = await asyncio.start_server(nonsense, "127.0.0.1", 0)
    async with other:
        port = other.sockets[0].getsockname()[1]
        with pytest.raises(errors.InvalidInput, match="sent no HTTP response"):
            await client.get(f"http://127.0.0.1:{port}/")


async def test_an_answer_that_is_too_long_is_refused():
    async with await http_server.serve({"/": lambda _: http_server.text("x" * 1000)}) as server:
        with pytest.raises(errors.LimitExceeded):
            await client.get(server.url, body_bytes_max=999)


@given(st.binary())
def test_any_bytes_are_a_request_or_a_refusal(head):
    parsed = http_server.parse_request(head, "peer")
    assert isinstance(parsed, http_server.HttpResponse) or parsed[1].path.startswith("/")
