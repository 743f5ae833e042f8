"""The monitor inside a domain, under the broker's permissions."""

from __future__ import annotations

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.core import errors
from muster.core.settings import loader
from muster.monitor import client, protocol
from muster.monitor import settings as monitor_settings
from muster.monitor.sensor import sensor
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.monitor import conftest


async def test_a_domain_reports_itself_and_an_agent_beside_it(tmp_path):
    flags = {
        "domain.data_dir": str(tmp_path),
        "manage.enabled": "false",
        "channel.enabled": "true",
        "channel.hold_s": "100ms",
        "channel.beat_s": "100ms",
        "sensor.enabled": "true",
        "sensor.period_s": "200ms",
        "sensor.http_port": "0",
        "sensor.statsd_port": "0",
        "sensor.processes": '["tests=pytest"]',
    }
    settings = loader.load(app_settings.Settings, flags=flags)
    async with domain.Domain(settings, components=factories.components(settings)) as running:
        agent = await running.connect("web-7", roles.Role.AGENT)
        other = monitor_settings.SensorSettings(intake=False, period_s=0.2, group="web")
        operator = await running.connect("op", roles.Role.OPERATOR)
        async with agent, operator, sensor.Sensor(agent, other, tmp_path / "buffer"):

            async def machines():
                try:
                    actual = await conftest.stored(operator)
                except errors.NotFound:
                    return None
                names = {name for batch, _ in actual for name in batch["machine"].to_pylist()}
                return names >= {"sensor", "web-7"}

            await eventually(machines, timeout_s=30)
            assert [match.name for match in await client.find(operator)] == ["channel"]
            # An agent reports as itself alone: the broker refuses the subject, the channel the name.
            await agent.publish(protocol.report("sensor", "channel"), b"{}")
            await eventually(lambda: agent.statistics().violations == 1)
        parts = {row["name"]: row["state"] for row in (await running.status())["components"]}
        assert parts["channel"] == "up"
        name = "muster_channel_forwarded_rows_total"
        await eventually(lambda: running.metrics.value(name, channel="channel"))
