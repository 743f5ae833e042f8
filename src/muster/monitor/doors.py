"""The sensor's doors for applications on its machine: HTTP and statsd, on loopback only.

    POST /report       a service report, JSON or XML; ``?period=10s`` says when to expect the next
    POST /v1/metrics   OTLP over HTTP, JSON or protobuf, gzip or not
    UDP                statsd lines, ``service.metric:1|c``

Who can reach the machine's loopback is trusted with its metrics, and with nothing else; therefore the doors
open nowhere but there.  All is bounded in bytes and time; what is refused is counted by reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import zlib
from collections.abc import Callable
from http import HTTPStatus

import msgspec

from muster.bus import http
from muster.core import errors, ground, messages, units
from muster.monitor import foreign, services

HEAD_BYTES_MAX = 16 << 10
BODY_BYTES_MAX = foreign.MAX_BYTES
REQUEST_TIMEOUT_S = 5.0
CONNECTIONS_MAX = 64


class Doors:
    """Open between `open` and `close`."""

    def __init__(
        self, into: services.Services, clock: Callable[[], float], *, period_s: float = 10.0
    ) -> None:
        self._into = into
        self._clock = clock
        self._period_s = period_s
        self._server: asyncio.Server | None = None
        self._udp: asyncio.DatagramTransport | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.http_port = 0
        self.statsd_port = 0

    async def open(
        self, host: str = "127.0.0.1", *, http_port: int | None = 0, statsd_port: int | None = 0
    ) -> None:
        """A port of 0 is a free one; None keeps that door shut."""
        if not ground.is_loopback(host):
            raise errors.InvalidInput(f"the sensor's doors open on loopback only, not on {host!r}")
        loop = asyncio.get_running_loop()
        try:
            if http_port is not None:
                self._server = await asyncio.start_server(
                    self._connected, host, http_port, limit=HEAD_BYTES_MAX
                )
                self.http_port = self._server.sockets[0].getsockname()[1]
            if statsd_port is not None:
                self._udp, _ = await loop.create_datagram_endpoint(
                    lambda: _Statsd(self._into, self._clock), local_addr=(host, statsd_port)
                )
                self.statsd_port = self._udp.get_extra_info("sockname")[1]
        except OSError as error:
            await self.close()
            raise errors.Unavailable(
                f"the sensor's doors cannot open: {error.strerror or error}",
                hint="another sensor may run here: choose other ports, or 0 for free ones",
            ) from error

    async def close(self) -> None:
        if self._udp is not None:
            self._udp.close()
            self._udp = None
        if self._server is not None:
            self._server.close()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._server.wait_closed()
            self._server = None

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            if len(self._tasks) > CONNECTIONS_MAX:
                self._into.dropped["http-connections"] += 1
                return
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    writer.write(await self._answer(reader, writer))
                    await writer.drain()
        except asyncio.CancelledError:  # by `close`: the stream protocol would report it as a fault
            pass
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).replace(b"POST ", b"GET ", 1)
            parsed = http.parse_request(head, "loopback")
            if isinstance(parsed, http.Response):
                return _response(HTTPStatus(parsed.status), "only POST")
            _, request = parsed
            if request.headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await self._body(reader, request)
            if request.path == "/report":
                self._report(request, body)
            elif request.path == "/v1/metrics":
                self._otlp(request, body)
            else:
                return _response(HTTPStatus.NOT_FOUND, "there is: /report /v1/metrics")
        except asyncio.LimitOverrunError:
            self._into.dropped["http-too-large"] += 1
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the head is too large")
        except errors.MusterError as error:
            self._into.dropped[f"http-{error.code}"] += 1
            too_large = isinstance(error, messages.TooLarge)
            status = HTTPStatus.REQUEST_ENTITY_TOO_LARGE if too_large else HTTPStatus.BAD_REQUEST
            return _response(status, error.message)
        as_json = "json" in request.headers.get("content-type", "json")
        return _response(HTTPStatus.OK, "{}" if as_json else "")

    async def _body(self, reader: asyncio.StreamReader, request: http.Request) -> bytes:
        try:
            size = int(request.headers.get("content-length", ""))
        except ValueError:
            raise errors.InvalidInput("the request has no Content-Length") from None
        if not 0 <= size <= BODY_BYTES_MAX:
            raise messages.TooLarge(f"a body of {size} bytes is over {BODY_BYTES_MAX}")
        body = await reader.readexactly(size)
        match request.headers.get("content-encoding", "identity").lower():
            case "identity":
                return body
            case "gzip":
                return _unzipped(body)
            case other:
                raise errors.InvalidInput(f"the encoding {other[:40]!r} is not understood: gzip or none")

    def _report(self, request: http.Request, body: bytes) -> None:
        period_s = self._period_s
        if "period" in request.query:
            period_s = units.parse_duration_s(request.query["period"])
        if not 0 < period_s <= 86400:
            raise errors.InvalidInput("a period is between 0 and a day")
        if "xml" in request.headers.get("content-type", ""):
            from muster.monitor import xml

            report = xml.decode(body)
            if not isinstance(report, messages.ServiceReport):
                raise messages.UnknownKind("an application pushes a service-report, and no other")
        else:
            try:
                report = msgspec.json.decode(body, type=messages.ServiceReport)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise messages.Malformed(f"not a service report: {str(error)[:200]}") from error
        self._into.push(report, self._clock(), period_s=period_s)

    def _otlp(self, request: http.Request, body: bytes) -> None:
        as_json = "json" in request.headers.get("content-type", "")
        figures = foreign.otlp_json(body) if as_json else foreign.otlp_protobuf(body)
        for report in foreign.service_reports(figures):
            self._into.push(report, self._clock(), period_s=max(self._period_s, 60.0))


class _Statsd(asyncio.DatagramProtocol):
    def __init__(self, into: services.Services, clock: Callable[[], float]) -> None:
        self._into = into
        self._clock = clock

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._into.statsd(data, self._clock())

    def error_received(self, exc: Exception) -> None:
        self._into.dropped["statsd-error"] += 1


def _unzipped(body: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    try:
        data = unpack.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error as error:
        raise messages.Malformed(f"not gzip: {error}") from error
    if len(data) > BODY_BYTES_MAX:
        raise messages.TooLarge(f"a body that unpacks to more than {BODY_BYTES_MAX} bytes")
    return data


def _response(status: HTTPStatus, text: str) -> bytes:
    body = text.encode()
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body
