"""The small HTTP server of health pages, locator and receivers, against clients that do not behave."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import struct
import time
from typing import cast

import pytest

from muster.bus.http import client as http_client
from muster.bus.http import server as http_server
from muster.core import errors
from muster.testing.eventually import eventually
from muster.trust import certificates


def ok(_: http_server.HttpRequest) -> http_server.HttpResponse:
    return http_server.text("ok")


@pytest.mark.parametrize(
    "request_",
    [
        b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"POST /report HTTP/1.1\r\nHost: x\r\nTransfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
        b"GET /livez HTTP/1.1\nHost: x\r\n\r\n",
    ],
)
async def test_an_ambiguous_request_is_refused(request_: bytes):
    async with await http_server.serve({"/livez": ok}, post_routes={"/report": ok}) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(request_)
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_is_too_long_is_answered_not_reset():
    async with await http_server.serve({}, post_routes={"/report": ok}, body_bytes_max=4 << 20) as server:
        for size in (5 << 20, 20 << 20):
            answer = await http_client.post(f"{server.url}/report", b"x" * size, headers={})
            assert answer.status == 413
        answer = await http_client.post(f"{server.url}/nothing", b"x" * (2 << 20), headers={})
        assert answer.status == 404


@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_body_that_ends_early_is_counted_and_is_no_error_of_the_handler(
    is_reset: bool, caplog: pytest.LogCaptureFixture
):
    refused: list[str] = []
    async with await http_server.serve({}, post_routes={"/report": ok}, on_refused=refused.append) as server:
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"POST /report HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nab")
        await eventually(lambda: server._tasks)
        if is_reset:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        else:
            writer.write_eof()
            assert (await reader.read()).endswith(b"the body ended after 2 of 4 bytes\n")
            writer.close()
        await eventually(
            lambda: refused == [errors.Unavailable.code if is_reset else errors.InvalidInput.code]
        )
    assert not caplog.records


@pytest.mark.parametrize("size", [100_000, 8_000_000])
async def test_answers_that_are_not_read_end_with_their_deadline(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "REQUEST_TIMEOUT_S", 0.2)
    body = http_server.HttpResponse(200, b"x" * size)
    async with await http_server.serve({"/metrics": lambda _: body}, connections_max=4) as server:
        before = len(os.listdir("/proc/self/fd"))
        clients = []
        for _ in range(4):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect((server.host, server.port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            clients.append(client)
        await eventually(lambda: server._tasks)
        await eventually(
            lambda: not server._tasks and len(os.listdir("/proc/self/fd")) == before + len(clients)
        )
        for client in clients:
            client.close()


@pytest.mark.may_block(reason="certificates are files")
async def test_tls_handshakes_count_as_connections(tmp_path):
    authority = certificates.CertificateStore.create(tmp_path / "ca", "test", lifetime_s=3600)
    authority.ensure("door", ["127.0.0.1"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority.pair("door").path)
    believed = ssl.create_default_context(cafile=str(authority.bundle))
    async with await http_server.serve({"/livez": ok}, tls=context, connections_max=4) as server:
        assert (await http_client.get(f"{server.url}/livez", tls=believed)).status == 200
        silent = [await asyncio.open_connection(server.host, server.port) for _ in range(12)]
        await eventually(
            lambda: sum(reader.at_eof() or reader.exception() is not None for reader, _ in silent) == 8
        )
        assert len(server._tasks) == 4
        for _, writer in silent:
            writer.transport.abort()
        await eventually(lambda: not server._tasks)
        assert (await http_client.get(f"{server.url}/livez", tls=believed)).status == 200


async def test_a_client_address_has_a_limited_part_of_the_connections():
    async with await http_server.serve({"/livez": ok}, of_address_max=2) as server:
        there, here = (server.host, server.port), ("127.0.0.2", 0)
        silent = [await asyncio.open_connection(*there, local_addr=here) for _ in range(5)]
        await eventually(lambda: sum(reader.at_eof() for reader, _ in silent) == 3)
        assert (await http_client.get(f"{server.url}/livez")).status == 200
        for _, writer in silent:
            writer.transport.abort()
        await eventually(lambda: not server._tasks)
        _, writer = await asyncio.open_connection(*there, local_addr=here)
        await eventually(lambda: server._tasks)
        writer.transport.abort()


async def test_a_response_without_a_length_is_joined_in_linear_time():
    class ChunkedReader:
        def __init__(self, count: int) -> None:
            self._chunks = [b"x" * 256] * count

        async def readuntil(self, _: bytes) -> bytes:
            return b"HTTP/1.0 200 OK\r\n\r\n"

        async def read(self, _: int) -> bytes:
            return self._chunks.pop() if self._chunks else b""

    async def read(count: int) -> int:
        reader = cast(asyncio.StreamReader, ChunkedReader(count))
        return len((await http_client._read_response(reader, http_client.BODY_BYTES_MAX)).body)

    begun_s = time.process_time()
    assert await read(20_000) == 20_000 * 256
    assert time.process_time() - begun_s < 1.0  # one copy for each chunk would take many times as long
