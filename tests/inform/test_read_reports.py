"""Information nodes report the reads of contexts to the sensor of their machine, for `pipeline demand`."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from muster.app import settings
from muster.app.components import factories
from muster.inform import client
from muster.monitor.sensor import intake, service_reports
from muster.testing.eventually import eventually


@pytest.mark.parametrize("holder", ["n1", "n2"])
async def test_reads_of_contexts_reach_the_sensor_of_the_node_that_was_asked(start_node, connect, holder):
    """Also those that another node answers: its zone is not that of the reader."""
    reports, now_s = service_reports.ServiceReports(), asyncio.get_running_loop().time
    sensor = intake.SensorIntake(reports, now_s)
    await sensor.open(statsd_port=None)
    try:
        nodes = {
            name: await start_node(name, replicas=1, interval_s=0.5, migration_ratio=1.0, **options)
            for name, options in (("n1", {"sensor": f"http://127.0.0.1:{sensor.http_port}"}), ("n2", {}))
        }
        await eventually(lambda: all(len(node.directory.nodes) == 1 for node in nodes.values()))
        bus = await connect("ann")
        await client.InformClient(bus, node=holder).put("app/color", b"red")
        reader = client.InformClient(bus, node="n1")

        async def reported() -> dict[str, float]:
            await reader.get("app/color")
            services = {report.name: report.metrics for report in reports.collect(now_s())}
            return services.get("n1", {})

        assert (await eventually(reported)).keys() == {"reads.app/color_s"}
        assert "n2" not in {report.name for report in reports.collect(now_s())}
    finally:
        await sensor.close()


def test_the_nodes_of_a_domain_report_to_its_sensor():
    def url(**changes: object) -> str:
        (made,) = (
            component
            for component in factories.components(msgspec.convert(changes, settings.Settings))
            if component.name == "inform"
        )
        return str(made._settings.sensor)  # type: ignore[attr-defined]

    assert url() == ""
    assert url(sensor={"enabled": True}) == "http://127.0.0.1:9125"
    assert url(sensor={"enabled": True, "intake": False}) == ""
    assert url(sensor={"enabled": True}, inform={"sensor": "http://127.0.0.1:1"}) == "http://127.0.0.1:1"
