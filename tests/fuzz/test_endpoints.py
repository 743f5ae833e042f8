"""A short run against the sensor's intake, in this process; and one against every endpoint of a domain."""

from __future__ import annotations

import asyncio
import random
import time

import httpx
import pytest

from muster.monitor.sensor import intake, service_reports
from tests.fuzz import endpoints, network, network_seeds

INPUTS = 150


async def test_the_sensors_intake_serves_on_after_wrong_input(caplog: pytest.LogCaptureFixture):
    reports = service_reports.ServiceReports()
    opened = intake.SensorIntake(reports, time.monotonic)
    await opened.open()
    chance = random.Random(1)
    over_http = endpoints.to_stream("127.0.0.1", opened.http_port)
    over_udp = endpoints.to_datagrams("127.0.0.1", opened.statsd_port)
    try:
        for _ in range(INPUTS):
            await over_http(endpoints.http_input(chance, network_seeds.INTAKE))
            await over_udp(endpoints.bytes_input(chance, network_seeds.STATSD))
        async with httpx.AsyncClient() as client:
            report = network_seeds.INTAKE[0]
            url = f"http://127.0.0.1:{opened.http_port}/report"
            answer = await asyncio.wait_for(client.post(url, content=report.body), 10)
            assert answer.status_code == 200
    finally:
        await opened.close()
    assert [record for record in caplog.records if record.exc_info] == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.may_block(reason="the drill reads settings, keys and logs between its steps")
async def test_every_endpoint_of_a_domain_serves_on_after_wrong_input():
    results = await network.main([], 100)
    assert [each.line() for each in results if each.problems] == []
    names = {each.name for each in results}
    assert {"AMQP", "UDDI", "REST", "statsd", "locator", "requests: manage", "requests: notify"} <= names
