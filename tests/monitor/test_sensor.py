from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import pathlib
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import psutil
import pytest

from muster.bus import api
from muster.bus.http import server as http_server
from muster.core import errors, health, messages
from muster.core.reports import packed
from muster.core.telemetry import metrics
from muster.monitor import client, report_xml, settings
from muster.monitor.sensor import host_metrics, sensor, service_reports
from muster.testing.eventually import eventually
from tests.monitor import test_services


def made(bus: api.Bus, folder: pathlib.Path, **more: Any) -> sensor.Sensor:
    chosen = settings.SensorSettings(**{"period_s": 0.1, "group": "web", "intake": False, **more})
    return sensor.Sensor(bus, chosen, folder / "buffer")


async def test_a_sensor_reports_its_machine_and_named_processes(connect, channel, rows, tmp_path):
    await channel("c1")
    bus = await connect("m1")
    processes = ("tests=pytest", "nobody=no process is called this")
    async with made(bus, tmp_path, processes=processes, zone="z1"):

        async def third():
            actual = await rows(bus)
            return actual[2] if len(actual) > 2 else None

        report = await eventually(third)
    assert (report.machine, report.group, report.zone, report.period_s) == ("m1", "web", "z1", 0.1)
    assert {"cpu_percent", "memory_percent", "disk_percent", "network_in_bytes_s"} <= set(report.metrics)
    by_name = {service.name: service for service in report.services}
    assert by_name["tests"].metrics["memory_bytes"] > 1e6
    assert by_name["nobody"].state is health.HealthState.DOWN


@pytest.mark.parametrize("quote", ["", '"'])
def test_a_sensor_does_not_count_itself_as_the_process_that_it_watches(tmp_path, quote):
    """The command lines of a sensor, and of a shell that starts it, contain the text of the option."""
    pattern = f"{quote}shop{quote} {tmp_path}"
    watching = [sys.executable, "-c", "input()", "--set", f"sensor.processes=shop={pattern}"]
    shell = ["sh", "-c", f"read line; exec muster run sensor --set 'sensor.processes=shop={pattern}'"]
    with contextlib.ExitStack() as stack:
        for command in (watching, shell):
            child = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE))
            stack.callback(child.kill)
        host = host_metrics.HostMetrics({"shop": pattern})
        assert [report.state for report in host.services()] == [health.HealthState.DOWN]
        service = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", "input()", pattern], stdin=subprocess.PIPE)
        )
        stack.callback(service.kill)
        (report,) = host.services()
        assert (report.state, report.metrics["processes"]) == (health.HealthState.UP, 1.0)
        more = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", "input()", pattern], stdin=subprocess.PIPE)
        )
        stack.callback(more.kill)
        assert host.services()[0].metrics["processes"] == 2.0
        for process in (service, more):
            process.kill()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # its parent does not remove it yet
        assert [report.state for report in host.services()] == [health.HealthState.DOWN]


async def test_the_load_is_that_since_the_last_sample_in_whichever_thread_it_was_taken(monkeypatch):
    """psutil.cpu_percent() remembers the last call of each thread: in a new thread it returned 0."""
    times = psutil.cpu_times()
    zero = times._replace(**dict.fromkeys(times._fields, 0.0))
    samples = [
        zero,
        zero._replace(user=60.0, guest=10.0, idle=40.0),
        zero._replace(user=60.0, guest=10.0, idle=40.0),  # the counters have not advanced
        zero._replace(user=70.0, guest=10.0, idle=120.0, iowait=10.0),
    ]
    monkeypatch.setattr(psutil, "cpu_times", lambda: samples.pop(0))
    host = host_metrics.HostMetrics()
    loads = []
    for _ in range(3):  # each in a thread of its own
        thread = threading.Thread(target=lambda: loads.append(host.sample().get("cpu_percent")))
        thread.start()
        await asyncio.to_thread(thread.join)
    assert loads == [60.0, None, 10.0]


async def test_buffered_reports_are_sent_once_and_in_order(connect, channel, rows, tmp_path):
    bus = await connect("m1")
    async with made(bus, tmp_path) as running:
        await eventually(lambda: running.buffered >= 5)
        await channel("c1")
        await eventually(lambda: running.buffered == 0 and running.sent > 8)
        await running.stop()
        sent = running.sent

    async def all_there():
        matches = await rows(bus)
        return matches if len(matches) == sent else None

    actual = await eventually(all_there)
    assert [row.sequence for row in actual] == list(range(1, sent + 1))


async def test_a_restarted_sensor_sends_what_the_one_before_left(connect, channel, rows, tmp_path):
    bus = await connect("m1")
    async with made(bus, tmp_path) as first:
        await eventually(lambda: first.buffered >= 3)
    async with made(bus, tmp_path) as second:
        assert second.buffered >= 3
        started = await channel("c1")
        await eventually(lambda: second.buffered == 0 and second.sent > 5)
    await started.stop()
    actual = await rows(bus)
    names = [(row.boot, row.sequence) for row in actual]
    assert len({boot for boot, _ in names}) == 2
    assert len(names) == len(set(names)), "each one once; rows are ordered by their set of metrics"
    assert not started.aggregator.gaps


async def test_the_children_of_a_dead_channel_move_and_nothing_is_lost_or_doubled(
    connect, channel, rows, tmp_path
):
    await channel("top", sensors=False)
    first = await channel("c1", parents=("top",), hold_s=600.0)
    bus = await connect("m1")
    async with made(bus, tmp_path, channels=("c1", "c2")) as running:
        await eventually(lambda: first.aggregator.held >= 3)
        await channel("c2", parents=("top",))
        first._tasks.cancel()  # as if killed, with all it held
        first._receiving.clear()
        await eventually(lambda: running.moves == 2)
        await eventually(lambda: running.sent > 15)
        sent = running.sent
    first.aggregator.flush(int(time.time() * 1000))  # what it held is gone with it

    async def all_there():
        return {row.sequence for row in await rows(bus)} >= set(range(1, sent + 1))

    await eventually(all_there)
    names = [(row.boot, row.sequence) for row in await rows(bus)]
    assert len(names) == len(set(names))


@pytest.fixture
async def quiet(connect, tmp_path):
    """A sensor that listens and never reports by itself."""
    bus = await connect("m1")
    async with made(bus, tmp_path, period_s=3600.0, intake=True, http_port=0, statsd_port=0) as running:
        yield running


async def post(port: int, path: str, body: bytes, *headers: str) -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *headers]
    writer.write("\r\n".join([*lines, "", ""]).encode() + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])


async def test_applications_push_by_python_http_xml_otlp_and_statsd(quiet):
    port = quiet.intake.http_port
    url = f"http://127.0.0.1:{port}"
    await asyncio.to_thread(
        client.push, "shop", {"orders_s": 12.5}, url=url, state="draining", reason="night"
    )
    assert await post(port, "/report", b'{"name":"db","metrics":{"queries_s":3}}') == 200
    as_xml = report_xml.encode(test_services.service_report("queue", depth=4.0))
    assert await post(port, "/report?period=1m", as_xml, "Content-Type: application/xml") == 200
    as_json = json.dumps(test_services.OTLP).replace('"shop"', '"web"').encode()
    zipped = ("Content-Type: application/json", "Content-Encoding: gzip")
    assert await post(port, "/v1/metrics", gzip.compress(as_json), *zipped) == 200
    protobuf = test_services.otlp_as_protobuf().replace(b"shop", b"cart")
    assert await post(port, "/v1/metrics", protobuf, "Content-Type: application/x-protobuf") == 200
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(b"mail.waiting:9|g", ("127.0.0.1", quiet.intake.statsd_port))
    await eventually(lambda: quiet.services._statsd)
    report = await quiet.sample()
    actual = {service.name: service for service in report.services}
    assert (actual["shop"].state, actual["shop"].reason) == (health.HealthState.DRAINING, "night")
    assert {name: dict(service.metrics) for name, service in actual.items()} == {
        "shop": {"orders_s": 12.5},
        "db": {"queries_s": 3.0},
        "queue": {"depth": 4.0},
        "web": test_services.WANTED["shop"],
        "cart": test_services.WANTED["shop"],
        "mail": {"waiting": 9.0},
    }


async def test_hostile_requests_are_refused_and_counted(quiet):
    port = quiet.intake.http_port
    bomb = gzip.compress(bytes(20 << 20))
    assert await post(port, "/report", b"{") == 400
    assert await post(port, "/report", b'{"name":""}') == 400
    assert await post(port, "/report", b'{"name":"a","metrics":{"x":NaN}}') == 400
    assert await post(port, "/report?period=-1", b'{"name":"a"}') == 400
    assert await post(port, "/elsewhere", b"") == 404
    assert await post(port, "/v1/metrics", bomb, "Content-Encoding: gzip") == 413
    assert await post(port, "/v1/metrics", b"\xff" * 50) == 400
    of_a_page = ("Origin: https://evil.example", "Content-Type: text/plain")
    assert await post(port, "/report", b'{"name":"forged","state":"down"}', *of_a_page) == 400
    laughs = b'<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>'
    assert await post(port, "/report", laughs, "Content-Type: text/xml") == 400
    with pytest.raises(errors.InvalidInput, match="rejected"):
        await asyncio.to_thread(client.push, "x" * 300, {}, url=f"http://127.0.0.1:{port}")
    assert [service.name for service in (await quiet.sample()).services] == ["sensor"]
    assert quiet.services.dropped["http-malformed"] >= 5


async def test_services_with_large_reports_do_not_delay_the_heartbeat(connect, channel, rows, tmp_path):
    started = await channel("c1")
    bus = await connect("m1")
    async with made(bus, tmp_path) as running:
        for number in range(100):
            figures = {f"a metric with a long name, number {i}": 1.0 for i in range(200)}
            running.services.push(test_services.service_report(f"s{number}", **figures), time.monotonic())

        async def there():
            return [row for row in await rows(bus) if row.services]

        actual = await eventually(there, timeout_s=30)
    assert len(actual[0].services) == 100
    assert running.services.dropped["service-metrics"] > 0
    assert "too-large" not in started.dropped


async def test_one_service_with_many_metrics_leaves_the_others_in_the_report(connect, tmp_path):
    quiet = made(await connect("m1"), tmp_path)
    for name in ("db", "shop"):
        quiet.services.push(test_services.service_report(name, queue=1.0), 0.0)
    quiet.services.push(
        test_services.service_report("app", **{"p" * 200 + str(n): 1.0 for n in range(900)}), 0.0
    )
    quiet.services.push(messages.ServiceReport(name="", reason="no channel accepts this name"), 0.0)
    quiet.services.statsd("\n".join(f"app.timer{n}:5|ms" for n in range(400)).encode(), 0.0)
    services = quiet.services.collect(1.0)
    assert all(len(service.metrics) <= service_reports.METRICS_MAX for service in services)
    node = messages.NodeReport(machine="m1", sequence=1, at_ms=1, period_s=1.0, services=services)
    sent = {service.name: service for service in packed.decode(quiet._encoded(node)).services}
    assert sent.keys() == {"db", "shop", "app"}
    assert sent["db"].metrics == sent["shop"].metrics == {"queue": 1.0}
    assert len(sent["app"].metrics) > 100
    assert quiet.services.dropped["service-invalid"] == 1
    assert quiet.services.dropped["service-too-much"] == 0


async def test_a_service_is_scraped(connect, tmp_path):
    figures = metrics.Metrics()
    figures.counter("jobs_done", "Jobs.").add(3)

    def page(request: http_server.HttpRequest) -> http_server.HttpResponse:
        content_type, body = figures.exposition("application/openmetrics-text")
        return http_server.HttpResponse(200, body, content_type)

    bus = await connect("m1")
    async with await http_server.serve({"/metrics": page}) as server:
        scrape = (f"jobs={server.url}/metrics", "gone=http://127.0.0.1:1/metrics")
        async with made(bus, tmp_path, period_s=3600.0, scrape=scrape) as running:
            report = await running.sample()
    by_name = {service.name: service.metrics for service in report.services}
    assert set(by_name) == {"jobs", "sensor"}
    assert by_name["jobs"]["muster_jobs_done_total"] == 3.0
    assert by_name["sensor"]["dropped_scrape-unavailable"] >= 1


async def test_a_push_without_a_sensor_fails_with_a_hint():
    with pytest.raises(errors.Unavailable, match="no sensor"):
        await asyncio.to_thread(client.push, "shop", {}, url="http://127.0.0.1:1")
