"""Prometheus remote write, out and in: the format, and a real Prometheus at the other end."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.bus.http import client, telemetry_export
from muster.core import errors, messages
from muster.core.formats import snappy
from muster.core.settings import domain
from muster.core.telemetry import remote_write
from muster.monitor.sensor import intake, metric_formats, service_reports
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.app import test_otlp_export

PROMETHEUS = shutil.which("prometheus") or Path.home() / ".cache/muster/prometheus/usr/bin/prometheus"
needs_prometheus = pytest.mark.skipif(
    not Path(PROMETHEUS).exists(), reason="Prometheus is not installed: Debian's package prometheus"
)
BYTES_MAX = 1 << 20

# Snappy


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(1, 5000))
def test_what_another_compressor_wrote_is_read(pieces: list[bytes], times: int):
    data = (b"".join(pieces) * times)[:200_000]
    packed = pa.compress(data, codec="snappy", asbytes=True)
    assert snappy.decompress(packed, BYTES_MAX) == data


@pytest.mark.parametrize("size", [0, 1, 59, 60, 61, 65_535, 65_536, 65_537, 300_000])
def test_what_we_wrote_is_read_by_another_reader(size: int):
    data = bytes(number % 251 for number in range(size))
    packed = snappy.store(data)
    assert snappy.decompress(packed, BYTES_MAX) == data
    if size:
        assert pa.decompress(packed, decompressed_size=size, codec="snappy", asbytes=True) == data


@given(st.binary(max_size=200))
def test_other_data_is_refused_and_nothing_else_happens(data: bytes):
    with contextlib.suppress(messages.MalformedMessage, messages.MessageTooLarge):
        assert len(snappy.decompress(data, 10_000)) <= 10_000


def test_a_body_that_unpacks_to_too_much_is_refused():
    with pytest.raises(messages.MessageTooLarge):
        snappy.decompress(snappy.store(bytes(11)), 10)
    with pytest.raises(messages.MalformedMessage):
        snappy.decompress(snappy.store(bytes(10))[:-1], 10)


# The format


def test_our_own_sensor_reads_what_we_write():
    data = remote_write.encode(
        test_otlp_export.measured().families(), {"job": "muster", "instance": "p"}, now_ms=1_700_000_000_000
    )
    (service,) = (figures := metric_formats.remote_write(data))
    assert service == "muster"
    assert figures["muster"]["muster_machines{instance=p}"] == 7.0
    assert figures["muster"]["muster_bus_refused_total{instance=p,reason=forbidden}"] == 3.0
    assert figures["muster"]["muster_took_seconds_count{instance=p}"] == 4.0


@given(st.binary(max_size=200))
def test_any_bytes_are_either_read_or_refused_as_malformed(data: bytes):
    try:
        figures = metric_formats.remote_write(data)
    except messages.MalformedMessage:
        return
    assert all(math.isfinite(value) for metrics in figures.values() for value in metrics.values())


async def test_the_intake_takes_a_request_and_refuses_others():
    into = service_reports.ServiceReports()
    sensor = intake.SensorIntake(into, time.time)
    await sensor.open(statsd_port=None)
    try:
        url = f"http://127.0.0.1:{sensor.http_port}/api/v1/write"
        exporter = telemetry_export.remote_write_exporter(url, "p1", test_otlp_export.measured())
        assert await exporter.export()
        refused = await client.post(url, b"nothing", headers=remote_write.HEADERS)
        assert refused.status == 400
    finally:
        await sensor.close()
    (report,) = into.collect(time.time())
    assert report.name == "muster"
    into.push(messages.ServiceReport(name="muster", metrics={"other": 1.0}), time.time(), merge=True)
    (merged,) = into.collect(time.time())
    assert merged.metrics == {**report.metrics, "other": 1.0}


@pytest.mark.parametrize("url", ["ftp://x", "http://user:secret@x"])
def test_a_wrong_address_is_refused_with_the_settings(url: str):
    with pytest.raises(errors.InvalidInput, match="remote_write_url"):
        domain.HealthSettings(remote_write_url=url)


# A real Prometheus


@contextlib.asynccontextmanager
async def prometheus(folder: Path, config: str) -> AsyncIterator[str]:
    """Its address, once it is ready."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "prometheus.yml").write_text(config.replace("PORT", str(port)))
    async with await child_process.start(
        PROMETHEUS,
        *(f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"),
        *(f"--web.listen-address=127.0.0.1:{port}", "--web.enable-remote-write-receiver"),
        name="prometheus",
    ):
        url = f"http://127.0.0.1:{port}"

        async def is_ready() -> bool:
            with contextlib.suppress(errors.Unavailable):
                return (await client.get(f"{url}/-/ready")).status == 200
            return False

        await eventually(is_ready, timeout_s=60)
        yield url


async def query(url: str, name: str) -> list[dict[str, Any]]:
    answer = json.loads((await client.get(f"{url}/api/v1/query?query={name}")).body)
    series: list[dict[str, Any]] = answer["data"]["result"]
    return series


@needs_prometheus
async def test_prometheus_stores_what_we_send(tmp_path: Path):
    async with prometheus(tmp_path, "global: {}\n") as url:
        settings = domain.HealthSettings(remote_write_url=f"{url}/api/v1/write", remote_write_period_s=1.0)
        measure = test_otlp_export.measured()
        async with telemetry_export.export_telemetry(settings, "p1", measure):

            async def stored() -> list[dict[str, Any]]:
                return await query(url, "muster_machines")

            (series,) = await eventually(stored, timeout_s=60)
        assert series["metric"]["job"] == "muster"
        assert series["metric"]["instance"].endswith("/p1")
        assert series["value"][1] == "7"
        (refused,) = await query(url, "muster_bus_refused_total")
        assert (refused["metric"]["reason"], refused["value"][1]) == ("forbidden", "3")
        assert measure.value("muster_remote_write_exports_total", outcome="failed") == 0


@needs_prometheus
async def test_a_sensor_takes_what_prometheus_sends(tmp_path: Path):
    into = service_reports.ServiceReports()
    sensor = intake.SensorIntake(into, time.time)
    await sensor.open(statsd_port=None)
    config = f"""
global: {{scrape_interval: 1s}}
scrape_configs: [{{job_name: itself, static_configs: [{{targets: ["127.0.0.1:PORT"]}}]}}]
remote_write:
  - url: "http://127.0.0.1:{sensor.http_port}/api/v1/write"
    queue_config: {{batch_send_deadline: 1s}}
"""
    try:
        async with prometheus(tmp_path, config):

            def values() -> list[float]:
                reports = {report.name: report.metrics for report in into.collect(time.time())}
                return [value for name, value in reports.get("itself", {}).items() if name.startswith("up{")]

            assert await eventually(values, timeout_s=60) == [1.0]
    finally:
        await sensor.close()
