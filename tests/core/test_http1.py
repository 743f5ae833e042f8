"""Requests whose end is ambiguous are refused, however they are cut into pieces."""

from __future__ import annotations

import pytest

from muster.core.net import http1

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"5;name=value\r\nhello\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
)


def feed(data: bytes, size: int) -> http1.HttpFraming:
    made = http1.HttpFraming()
    for start in range(0, len(data), size):
        made.feed(data[start : start + size])
    return made


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_requests_are_followed(size: int):
    assert feed((GET + POST + CHUNKED) * 3 + GET, size).is_between
    assert not feed(GET + POST[:-1], size).is_between
    assert feed(b"GET / HTTP/1.0\r\n\r\n", size).is_between


def request(*headers: bytes, first: bytes = b"POST / HTTP/1.1", body: bytes = b"") -> bytes:
    return b"\r\n".join((first, b"Host: x", *headers)) + b"\r\n\r\n" + body


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize(
    "data",
    [
        request(b"Content-Length: 5", b"Transfer-Encoding: chunked", body=b"0\r\n\r\n"),
        request(b"Content-Length: 5", b"Content-Length: 5", body=b"hello"),
        request(b"Content-Length: 5, 5", body=b"hello"),
        request(b"Content-Length: +5", body=b"hello"),
        request(b"Content-Length: 0x5", body=b"hello"),
        request(b"Transfer-Encoding:", b" chunked", body=b"0\r\n\r\n"),
        request(b"Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
        request(b"Transfer-Encoding: identity", b"Transfer-Encoding: chunked"),
        request(b"Transfer-Encoding: xchunked"),
        request(b"Transfer-Encoding: chunked", first=b"POST / HTTP/1.0", body=b"0\r\n\r\n"),
        request(b"Content-Length : 5", body=b"hello"),
        request(b"A: b\rc"),
        request(b"A: b\nContent-Length: 5"),
        request(b"A: \x00"),
        request(b"Host: y"),
        GET.replace(b"\r\n", b"\n"),
        GET.replace(b"Host: x\r\n", b"Host: x\n"),
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/2.0\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        CHUNKED.replace(b"5;name=value\r\n", b"5\n"),
        CHUNKED.replace(b"hello\r\n", b"hello!\r\n"),
        CHUNKED.replace(b"5;name=value", b"0x5"),
        CHUNKED.replace(b"5;name=value", b"-5"),
        CHUNKED.replace(b"Trailer: x", b" folded"),
        b"A" * (http1.HEAD_BYTES_MAX + 10),
    ],
)
def test_what_is_ambiguous_is_malformed(data: bytes, size: int):
    with pytest.raises(http1.MalformedHttp):
        feed(data, size)
