"""The sensor's intake for applications on its machine: HTTP and statsd, on loopback only.

    POST /report       a service report, JSON or XML; ``?period=10s``: time until the next report
    POST /v1/metrics   OTLP over HTTP, JSON or protobuf, gzip or not; /v1/logs and /v1/traces are refused
    POST /api/v1/write Prometheus remote write, version 1
    UDP                statsd lines, ``service.metric:1|c``

Processes that can reach loopback are trusted with the machine's metrics only, so the intake listens nowhere
else. Pages in a browser of the machine can reach it too: their requests are rejected. Size and time are
bounded; rejected input is counted by reason.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import msgspec

from muster.bus.http import server
from muster.core import errors, messages, units
from muster.core.formats import snappy
from muster.core.net import hosts
from muster.monitor.sensor import metric_formats, service_reports

BODY_BYTES_MAX = metric_formats.MAX_BYTES
CONNECTIONS_MAX = 64


class SensorIntake:
    """Open between `open` and `close`."""

    def __init__(
        self, into: service_reports.ServiceReports, clock: Callable[[], float], *, period_s: float = 10.0
    ) -> None:
        self._into = into
        self._clock = clock
        self._period_s = period_s
        self._http: server.HttpServer | None = None
        self._udp: asyncio.DatagramTransport | None = None
        self.http_port = 0
        self.statsd_port = 0

    async def open(
        self, host: str = "127.0.0.1", *, http_port: int | None = 0, statsd_port: int | None = 0
    ) -> None:
        """Port 0: a free port; None: disabled."""
        if not hosts.is_loopback(host):
            raise errors.InvalidInput(f"the sensor's intake listens on loopback only, not on {host!r}")
        loop = asyncio.get_running_loop()
        routes = {
            "/report": self._report,
            "/v1/metrics": self._otlp,
            "/v1/logs": self._unsupported,
            "/v1/traces": self._unsupported,
            "/api/v1/write": self._remote_write,
        }
        try:
            if http_port is not None:
                self._http = await server.serve(
                    {},
                    host,
                    http_port,
                    post_routes={path: _of_programs(handler) for path, handler in routes.items()},
                    on_refused=self._refused,
                    body_bytes_max=BODY_BYTES_MAX,
                    connections_max=CONNECTIONS_MAX,
                )
                self.http_port = self._http.port
            if statsd_port is not None:
                self._udp, _ = await loop.create_datagram_endpoint(
                    lambda: _Statsd(self._into, self._clock), local_addr=(host, statsd_port)
                )
                self.statsd_port = self._udp.get_extra_info("sockname")[1]
        except (OSError, errors.Unavailable) as error:
            await self.close()
            raise errors.Unavailable(
                f"the sensor's intake cannot listen: {error}",
                hint="another sensor may be running: use other ports, or 0 for free ones",
            ) from error

    async def close(self) -> None:
        if self._udp is not None:
            self._udp.close()
            self._udp = None
        if self._http is not None:
            await self._http.close()
            self._http = None

    def _refused(self, reason: str) -> None:
        self._into.dropped[f"http-{reason}"] += 1

    def _report(self, request: server.HttpRequest) -> server.HttpResponse:
        body = _unpacked(request)
        period_s = self._period_s
        if "period" in request.query:
            period_s = units.parse_duration_s(request.query["period"])
        if not 0 < period_s <= 86400:
            raise errors.InvalidInput("a period is between 0 and a day")
        if "xml" in request.headers.get("content-type", ""):
            from muster.monitor import report_xml

            report = report_xml.decode(body)
            if not isinstance(report, messages.ServiceReport):
                raise messages.UnknownMessageKind("expected a service-report")
        else:
            try:
                report = msgspec.json.decode(body, type=messages.ServiceReport)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise messages.MalformedMessage(f"not a service report: {str(error)[:200]}") from error
        self._into.push(report, self._clock(), period_s=period_s)
        return server.json_response({})

    def _otlp(self, request: server.HttpRequest) -> server.HttpResponse:
        as_json = "json" in request.headers.get("content-type", "")
        body = _unpacked(request)
        figures = metric_formats.otlp_json(body) if as_json else metric_formats.otlp_protobuf(body)
        for report in metric_formats.service_reports(figures):
            self._into.push(report, self._clock(), period_s=max(self._period_s, 60.0))
        return (
            server.json_response({})
            if as_json
            else server.HttpResponse(content_type="application/x-protobuf")
        )

    def _unsupported(self, request: server.HttpRequest) -> server.HttpResponse:
        """Not retryable for OTLP clients, which log the text."""
        self._refused("unsupported")
        return server.json_response(
            {
                "code": 12,  # UNIMPLEMENTED
                "message": f"the sensor receives metrics only, not {request.path}: send logs and traces to a "
                "collector of OpenTelemetry",
            },
            404,
        )

    def _remote_write(self, request: server.HttpRequest) -> server.HttpResponse:
        body = snappy.decompress(request.body, BODY_BYTES_MAX)
        for report in metric_formats.service_reports(metric_formats.remote_write(body)):
            # Prometheus divides the series of a job into several requests.
            self._into.push(report, self._clock(), period_s=max(self._period_s, 60.0), merge=True)
        return server.HttpResponse(204)


def _of_programs(handler: Callable[[server.HttpRequest], server.HttpResponse]) -> server.Handler:
    """Reject requests of pages, of whatever site: browsers add these headers to them, and programs do not."""

    def handle(request: server.HttpRequest) -> server.HttpResponse:
        if not {"origin", "sec-fetch-site"}.isdisjoint(request.headers):
            raise errors.InvalidInput("the sensor receives reports of programs, not of pages in a browser")
        return handler(request)

    return handle


class _Statsd(asyncio.DatagramProtocol):
    def __init__(self, into: service_reports.ServiceReports, clock: Callable[[], float]) -> None:
        self._into = into
        self._clock = clock

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self._into.statsd(data, self._clock())

    def error_received(self, exc: Exception) -> None:
        self._into.dropped["statsd-error"] += 1


def _unpacked(request: server.HttpRequest) -> bytes:
    match request.headers.get("content-encoding", "identity").lower():
        case "identity":
            return request.body
        case "gzip":
            return _unzipped(request.body)
        case other:
            raise errors.InvalidInput(f"the encoding {other[:40]!r} is not supported: use gzip or none")


def _unzipped(body: bytes) -> bytes:
    unpack = zlib.decompressobj(wbits=31)
    try:
        data = unpack.decompress(body, BODY_BYTES_MAX + 1)
    except zlib.error as error:
        raise messages.MalformedMessage(f"not gzip: {error}") from error
    if len(data) > BODY_BYTES_MAX:
        raise messages.MessageTooLarge(f"a body that unpacks to more than {BODY_BYTES_MAX} bytes")
    return data
