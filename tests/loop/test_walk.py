"""The walk: once around the loop, thin and real, in one domain.

A sensor reports this machine; a channel holds and forwards; Spark rolls up, writes history and raises an
alert.  Everything deeper is tested where it lives; this test says that the parts fit together.
"""

from pathlib import Path

import pytest

from muster.app import catalogue, domain
from muster.core import errors, messages, settings
from muster.pipeline import client as pipeline
from muster.testing.eventually import eventually
from muster.trust import roles

RULES = """
rules:
  - name: fleet-seen
    level: system
    when: machines >= 1
    severity: info
    summary: "the fleet has a machine"
"""


@pytest.mark.timeout(300)
@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_report_becomes_an_alert(tmp_path: Path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    wanted = settings.load(
        catalogue.Settings,
        flags={
            "domain.data_dir": str(tmp_path / "data"),
            "bus.port": 0,
            "channel.enabled": True,
            "channel.hold_s": "200ms",
            "sensor.enabled": True,
            "sensor.name": "web-1",
            "sensor.group": "web",
            "sensor.period_s": "500ms",
            "sensor.http_port": 0,
            "sensor.statsd_port": 0,
            "pipeline.enabled": True,
            "pipeline.master": "local[1]",
            "pipeline.trigger_s": "1s",
            "pipeline.window_s": "1s",
            "pipeline.delay_s": "1s",
            "pipeline.rules": str(rules),
        },
    )
    async with (
        domain.Domain(wanted, parts=catalogue.parts(wanted)) as running,
        await running.connect("admin", roles.Role.OPERATOR) as bus,
    ):
        fleet = pipeline.Client(bus)

        async def firing() -> messages.Alert | None:
            try:
                raised = await fleet.alerts()
            except errors.Unavailable:  # Spark takes its time to start
                return None
            return next((one for one in raised if one.state is messages.AlertState.FIRING), None)

        alert = await eventually(firing, timeout_s=240)
        assert alert is not None
        assert (alert.rule, alert.about) == ("fleet-seen", "system")
        system = await eventually(fleet.system, timeout_s=60)
        assert system is not None
        assert system.machines == 1
