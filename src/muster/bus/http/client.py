"""The HTTP client of every process: one request to a connection, HTTP/1.0, no redirect ever followed.

Health checks, broker monitors, the locator, webhooks, gateways and the OTLP exporter use it.  Every read is
bounded in bytes and every request in time.  There is no connection pool, no proxy, no cookie and no retry.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import ssl
import urllib.parse
from collections.abc import Mapping

from muster.bus.http import server
from muster.core import errors

TIMEOUT_S = 5.0
BODY_BYTES_MAX = 64 * 1024 * 1024
_WITHOUT_BODY = (204, 304)


async def get(
    url: str,
    *,
    timeout_s: float = TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
) -> server.HttpResponse:
    """Send a GET request. See `request`."""
    return await request("GET", url, timeout_s=timeout_s, body_bytes_max=body_bytes_max, tls=tls)


async def post(
    url: str,
    body: bytes,
    *,
    headers: Mapping[str, str],
    timeout_s: float = TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
) -> server.HttpResponse:
    """Send a POST request. See `request`."""
    return await request(
        "POST", url, body, headers=headers, timeout_s=timeout_s, body_bytes_max=body_bytes_max, tls=tls
    )


def post_blocking(
    url: str, body: bytes, *, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S
) -> server.HttpResponse:
    """`post` for programs without an event loop. It works in a thread that runs one too, and blocks it."""
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, post(url, body, headers=headers, timeout_s=timeout_s)).result()


async def request(
    method: str,
    url: str,
    body: bytes | None = None,
    *,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = TIMEOUT_S,
    body_bytes_max: int = BODY_BYTES_MAX,
    tls: ssl.SSLContext | None = None,
    socket: str = "",
) -> server.HttpResponse:
    """Send a request and return the response, whatever its status.

    `errors.Unavailable` if there is no response, `errors.LimitExceeded` if its body is longer than
    ``body_bytes_max``.  ``tls`` replaces the certificate authorities of the system. ``socket``:
    the path of a local one to connect to instead of the host.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
    except ValueError as error:
        raise errors.InvalidInput(f"{url[:200]!r} is not an http:// or https:// URL") from error
    secure = (tls or ssl.create_default_context()) if parts.scheme == "https" else None
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    fields = {"Host": parts.netloc, **(headers or {})}
    if body is not None:
        fields["Content-Length"] = str(len(body))
    writer = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await (
                asyncio.open_unix_connection(socket, limit=server.HEAD_BYTES_MAX)
                if socket
                else asyncio.open_connection(
                    parts.hostname,
                    parts.port or (443 if secure else 80),
                    ssl=secure,
                    limit=server.HEAD_BYTES_MAX,
                )
            )
            # With HTTP/1.0 the response is never chunked: it ends after its Content-Length or with the
            # connection.
            lines = [f"{method} {target} HTTP/1.0", *(f"{name}: {value}" for name, value in fields.items())]
            writer.write(("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + (body or b""))
            await writer.drain()
            return await _read_response(reader, body_bytes_max)
    except TimeoutError as error:
        raise errors.TimedOut(f"{url} did not respond within {timeout_s:g} s") from error
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise errors.Unavailable(f"{url} does not respond: {error}") from error
    except ValueError as error:
        raise errors.InvalidInput(f"{url!r} sent no HTTP response: {error}") from error
    finally:
        if writer is not None:
            writer.close()


async def _read_response(reader: asyncio.StreamReader, body_bytes_max: int) -> server.HttpResponse:
    first, *rest = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, code, *_ = first.split(" ")
    if not version.startswith("HTTP/"):
        raise ValueError(first)
    status, headers, body = int(code), server.parse_headers(rest), b""
    if status in _WITHOUT_BODY:
        pass
    elif "content-length" in headers:
        length = int(headers["content-length"])
        _check_size(length, body_bytes_max)
        body = await reader.readexactly(length)
    else:
        chunks, length = [], 0
        while chunk := await reader.read(65_536):
            chunks.append(chunk)
            length += len(chunk)
            _check_size(length, body_bytes_max)
        body = b"".join(chunks)
    return server.HttpResponse(status, body, headers.get("content-type", ""), headers)


def _check_size(length: int, body_bytes_max: int) -> None:
    if length > body_bytes_max:
        raise errors.LimitExceeded(f"the response is longer than {body_bytes_max} bytes")
