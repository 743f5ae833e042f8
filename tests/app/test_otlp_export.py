"""Metrics over OTLP: a collector gets the values of the page, and a sensor can be the collector."""

from __future__ import annotations

import asyncio
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from muster.bus.http import metric_export
from muster.core import errors
from muster.core.settings import domain
from muster.core.telemetry import metrics, otlp
from muster.monitor.sensor import metric_formats
from muster.testing.eventually import eventually


class Collector(http.server.ThreadingHTTPServer):
    """Keeps what it is sent."""

    daemon_threads = False
    block_on_close = True

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        self.server.got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def measured() -> metrics.Metrics:
    made = metrics.Metrics()
    made.counter("bus_refused", "Refused.", ("reason",)).add(3, reason="forbidden")
    made.gauge("machines", "Machines.").set(7)
    took = made.histogram("took_seconds", "Took.", buckets=(0.1, 1.0))
    for value in (0.05, 0.5, 0.5, 5.0):
        took.observe(value)
    return made


def test_the_form():
    body = json.loads(otlp.encode(measured().families(), {"service.name": "m"}, start_ns=1, now_ns=2))
    (resource,) = body["resourceMetrics"]
    assert resource["resource"]["attributes"] == [{"key": "service.name", "value": {"stringValue": "m"}}]
    actual = {row["name"]: row for row in resource["scopeMetrics"][0]["metrics"]}
    (point,) = actual["muster_bus_refused"]["sum"]["dataPoints"]
    assert (point["asDouble"], point["startTimeUnixNano"], point["timeUnixNano"]) == (3.0, "1", "2")
    assert point["attributes"] == [{"key": "reason", "value": {"stringValue": "forbidden"}}]
    assert actual["muster_bus_refused"]["sum"]["isMonotonic"] is True
    assert actual["muster_machines"]["gauge"]["dataPoints"][0]["asDouble"] == 7.0
    (point,) = actual["muster_took_seconds"]["histogram"]["dataPoints"]
    assert (point["count"], point["sum"]) == ("4", 6.05)
    assert (point["explicitBounds"], point["bucketCounts"]) == ([0.1, 1.0], ["1", "2", "1"])


def test_our_own_sensor_understands_it():
    figures = metric_formats.otlp_json(
        otlp.encode(measured().families(), {"service.name": "m"}, start_ns=1, now_ns=2)
    )
    assert 7.0 in figures["m"].values()
    assert 3.0 in figures["m"].values()


async def test_it_is_sent_now_and_then_and_at_the_end(collector: Collector):
    settings = domain.HealthSettings(otlp_url=collector.url, otlp_period_s=1.0)
    async with metric_export.export_metrics(settings, "p1", measured()):
        await eventually(lambda: collector.got)
    assert len(collector.got) >= 2
    path, body = collector.got[-1]
    assert path == "/v1/metrics"
    assert b"muster_machines" in body
    assert b"p1" in body


@pytest.mark.parametrize("status", [503, 400])
async def test_a_collector_that_refuses_costs_nothing_but_a_count(collector: Collector, status: int):
    collector.status = status
    made = measured()
    assert not await metric_export.otlp_exporter(collector.url, "p", made).export()
    assert not await metric_export.otlp_exporter("http://127.0.0.1:9", "p", made).export()
    assert made.value("muster_otlp_exports_total", outcome="failed") == 2


async def test_without_an_address_nothing_is_sent():
    before = len(asyncio.all_tasks())
    async with metric_export.export_metrics(domain.HealthSettings(), "p", measured()):
        assert len(asyncio.all_tasks()) == before


@pytest.mark.parametrize("url", ["ftp://x", "http://user:secret@x"])
def test_a_wrong_address_is_refused_with_the_settings(url: str):
    with pytest.raises(errors.InvalidInput, match="otlp_url"):
        domain.HealthSettings(otlp_url=url)
