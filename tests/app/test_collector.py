"""The OpenTelemetry Collector at the other end: what we send it, what it sends us, and a whole domain."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from muster.bus.http import client, telemetry_export
from muster.core import errors
from muster.core.settings import domain
from muster.core.telemetry import log, otlp, trace
from muster.monitor.sensor import intake, service_reports
from muster.testing import child_process
from muster.testing.eventually import eventually
from muster.testing.plugin import require_part
from tests.app import otlp_sink, test_otlp_export
from tests.cli import driver

PROJECT = Path(__file__).parent / "collector"
CACHE = Path.home() / ".cache" / "muster" / "go"
BUILD_S_MAX = 1200
CONFIG = """
receivers: {{otlp: {{protocols: {{http: {{endpoint: "127.0.0.1:{port}"}}}}}}}}
exporters:
  otlphttp/json: {{endpoint: "{sink}", encoding: json, compression: none}}
  otlphttp/sensor: {{endpoint: "http://127.0.0.1:{sensor_port}"}}
service:
  telemetry: {{metrics: {{level: none}}}}
  pipelines:
    metrics: {{receivers: [otlp], exporters: [otlphttp/json, otlphttp/sensor]}}
    logs: {{receivers: [otlp], exporters: [otlphttp/json]}}
    traces: {{receivers: [otlp], exporters: [otlphttp/json]}}
"""
ROWS = {
    "metrics": ("resourceMetrics", "scopeMetrics", "metrics"),
    "logs": ("resourceLogs", "scopeLogs", "logRecords"),
    "traces": ("resourceSpans", "scopeSpans", "spans"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def _build() -> Path | None:
    """Compiled once: half a minute to some minutes."""
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in sorted(PROJECT.iterdir()))).hexdigest()
    program = CACHE / f"collector-{digest[:12]}"
    if not program.exists() and shutil.which("go"):
        CACHE.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["go", "build", "-o", str(program), "."],
            cwd=PROJECT,
            env={**os.environ, "GOTOOLCHAIN": "local"},
            capture_output=True,
            timeout=BUILD_S_MAX,
            check=False,
        )
    return program if program.exists() else None


class RealCollector:
    """``sink`` is where it sends all that it received, encoded again."""

    def __init__(self, url: str, sink: otlp_sink.Collector) -> None:
        self.url = url
        self._sink = sink

    def received(self, signal: str) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The records, each with the attributes of its resource."""
        resources, scopes, rows = ROWS[signal]
        return [
            (attributes(resource["resource"]), row)
            for path, body in list(self._sink.got)
            if path == f"/v1/{signal}"
            for resource in json.loads(body)[resources]
            for scope in resource[scopes]
            for row in scope.get(rows, ())
        ]


def attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {row["key"]: next(iter(row["value"].values()), None) for row in owner.get("attributes", ())}


@contextlib.asynccontextmanager
async def started(
    folder: Path, sink: otlp_sink.Collector, sensor_port: int = 9
) -> AsyncIterator[RealCollector]:
    program = await asyncio.to_thread(_build)
    require_part("the OpenTelemetry Collector", program, hint="needs go and, the first time, a network")
    assert program is not None
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "config.yaml").write_text(CONFIG.format(port=port, sink=sink.url, sensor_port=sensor_port))
    async with await child_process.start(program, "--config", folder / "config.yaml", name="collector"):
        url = f"http://127.0.0.1:{port}"

        async def is_ready() -> bool:
            with contextlib.suppress(errors.Unavailable):
                answer = await client.post(f"{url}/v1/logs", b"{}", headers=telemetry_export.JSON)
                return answer.status == 200
            return False

        await eventually(is_ready, timeout_s=60)
        yield RealCollector(url, sink)


async def test_it_understands_our_metrics_log_events_and_spans(
    tmp_path: Path, collector: otlp_sink.Collector
):
    measure = test_otlp_export.measured()
    measure.gauge("odd", "Not a number.", ("kind",)).set(math.nan, kind="nan")
    measure.gauge("far", "Infinite.").set(math.inf)
    async with started(tmp_path, collector) as at:
        settings = domain.HealthSettings(otlp_url=at.url, otlp_period_s=1.0)
        async with telemetry_export.export_telemetry(settings, "p1", measure):
            before = trace.current.set(trace.TraceContext("ab" * 16, "cd" * 8))
            log.EventLog("bus").warning("lease-lost", lease="m-1", epoch=7, huge=1 << 70, far=math.inf)
            trace.current.reset(before)
        exporter = telemetry_export.SignalExporter("traces", at.url, otlp.encode_spans, "p1", measure)
        exporter.add(test_otlp_export.span())
        exporter.add(test_otlp_export.span("Conflict: no"))
        assert await exporter.export()
        for signal in ("logs", "traces"):
            assert measure.value(f"muster_otlp_{signal}_total", outcome="refused") == 0, signal
        assert measure.value("muster_otlp_exports_total", outcome="failed") == 0

        await eventually(lambda: all(at.received(signal) for signal in ROWS), timeout_s=30)
        by_name = {row["name"]: row for _, row in at.received("metrics")}
        (point,) = by_name["muster_bus_refused"]["sum"]["dataPoints"]
        assert (point["asDouble"], attributes(point)) == (3, {"reason": "forbidden"})
        assert by_name["muster_bus_refused"]["sum"]["isMonotonic"] is True
        assert by_name["muster_machines"]["gauge"]["dataPoints"][0]["asDouble"] == 7
        (point,) = by_name["muster_took_seconds"]["histogram"]["dataPoints"]
        assert (point["count"], point["sum"], point["bucketCounts"]) == ("4", 6.05, ["1", "2", "1"])

        ((resource, record),) = at.received("logs")
        assert (resource["service.name"], resource["service.instance.id"]) == ("muster", "p1")
        assert (record["body"]["stringValue"], record["severityText"]) == ("lease-lost", "WARNING")
        assert (record["traceId"], record["spanId"]) == ("ab" * 16, "cd" * 8)
        assert attributes(record)["epoch"] == "7"
        assert attributes(record)["huge"] == str(1 << 70)

        plain, failed = (row for _, row in at.received("traces"))
        assert (plain["traceId"], plain["spanId"], plain["parentSpanId"]) == ("ab" * 16, "cd" * 8, "ef" * 8)
        assert (plain["name"], plain["kind"]) == ("manage request.apply", otlp.SpanKind.SERVER)
        assert (failed["status"]["code"], failed["status"]["message"]) == (2, "Conflict: no")


async def test_a_sensor_accepts_what_it_sends(tmp_path: Path, collector: otlp_sink.Collector):
    """Protobuf and gzip, as its exporter does by default."""
    into = service_reports.ServiceReports()
    sensor = intake.SensorIntake(into, time.monotonic)
    await sensor.open(statsd_port=None)
    try:
        async with started(tmp_path, collector, sensor.http_port) as at:
            exporter = telemetry_export.otlp_exporter(at.url, "p1", test_otlp_export.measured())
            assert await exporter.export()
            (report,) = await eventually(lambda: into.collect(time.monotonic()), timeout_s=30)
    finally:
        await sensor.close()
    assert report.name == "muster"
    assert report.metrics["muster_machines"] == 7
    assert report.metrics["muster_bus_refused{reason=forbidden}"] == 3
    assert report.metrics["muster_took_seconds_count"] == 4
    assert not into.dropped


async def test_a_whole_domain_reports_to_it(tmp_path: Path, collector: otlp_sink.Collector):
    """Metrics of all processes; an operation is one trace over caller, service, log and activity log."""
    home = tmp_path / "home"
    async with started(tmp_path, collector) as at:

        async def muster(*words: str) -> driver.Answer:
            answer = await asyncio.to_thread(driver.run, *words, home=home, timeout_s=150)
            assert answer.code == 0, answer.err
            return answer

        await muster("init", "--port", "0", "--set", f"health.otlp_url={at.url}", "--set", "web.port=0")
        await muster("up", "--detach", "--timeout", "120", "--set", "health.otlp_period_s=1")
        try:
            manifest = tmp_path / "fleet.yaml"
            manifest.write_text("resources: [{name: web, type: memory, agent: local}]\n")
            await muster("apply", "-f", str(manifest), "--wait", "60s")

            def activity() -> list[dict[str, Any]]:
                return [row for _, row in at.received("logs") if attributes(row).get("what") == "apply"]

            (entry, *_) = await eventually(activity, timeout_s=60)
            assert attributes(entry)["outcome"] == "done"

            def spans() -> list[dict[str, Any]]:
                return [row for _, row in at.received("traces") if row["traceId"] == entry["traceId"]]

            await eventually(spans, timeout_s=60)

            def processes() -> set[str]:
                return {resource["service.instance.id"] for resource, _ in at.received("metrics")}

            await eventually(lambda: len(processes()) >= 3, timeout_s=60)
        finally:
            await muster("down")
    names = {row["name"] for _, row in at.received("metrics")}
    assert {"muster_up", "muster_otlp_logs"} & names
