"""``muster sensor``: what the sensor of this machine would report."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import command
from muster.cli.domain import config


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster sensor -o json", ""),
        ("muster sensor --set 'sensor.processes=nginx=nginx: master'", "with a process"),
        ("muster sensor --set sensor.scrape=app=http://127.0.0.1:8000/metrics", "with a scraped service"),
    ],
)
@config.set_option
@command.pass_invocation
def sensor(invocation: command.Invocation, overrides: tuple[str, ...]) -> None:
    """Print what the sensor of this machine would report.

    Nothing is sent: `muster run sensor` reports to a domain.
    """
    import time

    from muster.monitor import settings
    from muster.monitor.sensor import host_metrics
    from muster.monitor.sensor import sensor as sensor_

    options = config.resolve(invocation, overrides, home_required=False).settings.sensor
    scraped = [
        service
        for name, url in map(settings.named, options.scrape)
        for service in command.run(sensor_.scrape(name, url))
    ]
    seen = host_metrics.HostMetrics(dict(map(settings.named, options.processes)))
    seen.sample()
    time.sleep(0.2)  # rates need two samples
    facts: dict[str, Any] = {"group": options.group, "zone": options.zone, **seen.sample()}
    for service in (*seen.services(), *scraped):
        facts[f"service {service.name}"] = {"state": service.state.value, **service.metrics}
    invocation.printer.facts(facts)
