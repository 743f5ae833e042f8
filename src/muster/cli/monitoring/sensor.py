"""``muster sensor``: report this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from muster.cli import command, connection, foreground


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster sensor --group web", "until Ctrl-C"),
        ("muster sensor --process nginx='nginx: master' --scrape app=http://127.0.0.1:8000/metrics", ""),
        ("muster sensor --http-port 9125 --statsd-port 8125", "applications on this machine push reports"),
        ("muster sensor --once -o json", "print one report and send nothing"),
    ],
)
@click.option("--name", help="Identity, and the machine's name (default: the host's).")
@click.option("--group", default="default", show_default=True, help="Group of the machine.")
@click.option(
    "--zone", default="default", show_default=True, help="Machines of a zone tend to fail together."
)
@command.duration("--period", "10s", "Between two reports of a machine.")
@click.option(
    "--channel", "channels", multiple=True, help="Report to this one; further ones are next in line."
)
@click.option(
    "--process", "processes", multiple=True, metavar="NAME=TEXT", help="Watch processes by command line."
)
@click.option("--scrape", "scrapes", multiple=True, metavar="NAME=URL", help="Scrape OpenMetrics.")
@click.option(
    "--http-port", type=click.IntRange(0, 65535), help="Take service reports and OTLP here (loopback)."
)
@click.option("--statsd-port", type=click.IntRange(0, 65535), help="Take statsd here (loopback).")
@click.option(
    "--buffer", "buffer_dir", type=click.Path(file_okay=False, path_type=Path), help="Where to buffer."
)
@click.option("--once", is_flag=True, help="Print one report, send nothing, and end.")
@connection.options
@command.pass_invocation
def sensor(
    invocation: command.Invocation,
    /,
    name: str | None,
    processes: tuple[str, ...],
    scrapes: tuple[str, ...],
    buffer_dir: Path | None,
    once: bool,
    to: connection.ConnectionOptions,
    **more: Any,
) -> None:
    """Report this machine and the services on it.

    Each report is also the machine's heartbeat. While no channel can be heard, reports wait on disk.
    """
    import re
    import socket

    machine = name or re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname()) or "machine"
    more["processes"] = foreground.parse_pairs(processes, "--process")
    more["scrape"] = foreground.parse_pairs(scrapes, "--scrape")
    if once:
        _once(invocation, machine, more)
        return
    if buffer_dir is None:
        from muster.app import home

        buffer_dir = home.Home.find(invocation.home).root / "sensor" / machine
    command.run(_run(invocation, to, machine, {**more, "buffer_dir": buffer_dir}))


async def _run(
    invocation: command.Invocation, to: connection.ConnectionOptions, machine: str, wanted: dict[str, Any]
) -> None:
    from muster.core.telemetry import metrics
    from muster.monitor.sensor import sensor
    from muster.trust.permissions import roles

    measure = metrics.Metrics(process=True)
    async with (
        await foreground.connect_as(invocation, to, machine, roles.Role.AGENT, measure) as bus,
        foreground.serve_until_signal(invocation, bus, measure) as asked,
        sensor.Sensor(bus, sensor.SensorOptions(**wanted)) as running,
    ):
        ports = {"http_port": running.doors.http_port, "statsd_port": running.doors.statsd_port}
        invocation.printer.item(
            {"machine": running.machine, **ports}, f"reporting {running.machine}; Ctrl-C ends it"
        )
        await asked.wait()


def _once(invocation: command.Invocation, machine: str, wanted: dict[str, Any]) -> None:
    import time

    from muster.monitor.sensor import host_metrics

    seen = host_metrics.HostMetrics(wanted["processes"])
    seen.sample()
    time.sleep(0.2)  # rates are between two samples
    facts: dict[str, Any] = {"machine": machine, **seen.sample()}
    for service in seen.services():
        facts[f"service {service.name}"] = {"state": service.state.value, **service.metrics}
    invocation.printer.facts(facts)
