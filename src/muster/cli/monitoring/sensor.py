"""``muster sensor``: report the state of this machine."""

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
        ("muster sensor --http-port 9125 --statsd-port 8125", "accept reports of local applications"),
        ("muster sensor --once -o json", "print a report without sending it"),
    ],
)
@click.option("--name", metavar="NAME", help="Identity and name of the machine (default: the host name).")
@click.option("--group", metavar="NAME", default="default", show_default=True, help="Group of the machine.")
@click.option(
    "--zone", metavar="NAME", default="default", show_default=True, help="Zone: machines that fail together."
)
@command.duration("--period", "10s", "Interval between reports.")
@click.option(
    "--channel",
    "channels",
    metavar="NAME",
    multiple=True,
    help="Channel to report to; may be repeated for failover.",
)
@click.option(
    "--process",
    "processes",
    multiple=True,
    metavar="NAME=TEXT",
    help="Monitor processes whose command line contains this text.",
)
@click.option(
    "--scrape", "scrapes", multiple=True, metavar="NAME=URL", help="Scrape OpenMetrics from this URL."
)
@click.option(
    "--http-port",
    type=command.CountParam(0, 65535),
    help="Accept service reports and OTLP on this port (loopback only).",
)
@click.option(
    "--statsd-port", type=command.CountParam(0, 65535), help="Accept statsd on this port (loopback only)."
)
@click.option(
    "--buffer",
    "buffer_dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder for buffered reports.",
)
@click.option("--once", is_flag=True, help="Print a report without sending it, and exit.")
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
    """Report the state of this machine and its services.

    Each report is also the machine's heartbeat. While no channel is available, reports are stored on disk.
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
    invocation: command.Invocation, to: connection.ConnectionOptions, machine: str, options: dict[str, Any]
) -> None:
    from muster.core.telemetry import metrics
    from muster.monitor.sensor import sensor
    from muster.trust.permissions import roles

    measure = metrics.Metrics(process=True)
    async with (
        await foreground.connect_as(invocation, to, machine, roles.Role.AGENT, measure) as bus,
        foreground.serve_until_signal(invocation, bus, measure) as stop,
        sensor.Sensor(bus, sensor.SensorOptions(**options)) as running,
    ):
        ports = {"http_port": running.intake.http_port, "statsd_port": running.intake.statsd_port}
        invocation.printer.item(
            {"machine": running.machine, **ports}, f"reporting {running.machine}; Ctrl-C ends it"
        )
        await stop.wait()


def _once(invocation: command.Invocation, machine: str, options: dict[str, Any]) -> None:
    import time

    from muster.monitor.sensor import host_metrics, sensor

    scraped = [
        service
        for name, url in options["scrape"].items()
        for service in command.run(sensor.scrape(name, url))
    ]
    seen = host_metrics.HostMetrics(options["processes"])
    seen.sample()
    time.sleep(0.2)  # rates need two samples
    facts: dict[str, Any] = {"machine": machine, **seen.sample()}
    for service in (*seen.services(), *scraped):
        facts[f"service {service.name}"] = {"state": service.state.value, **service.metrics}
    invocation.printer.facts(facts)
