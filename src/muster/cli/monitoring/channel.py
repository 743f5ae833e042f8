"""``muster channel``: collect reports and forward them in batches."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import command, connection, foreground


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster channel --name c1", "collects reports of sensors and stores them in the stream `reports`"),
        (
            "muster channel --name edge --parent c1 --parent c2 --hold 5s",
            "forwards to c1, or to c2 if c1 fails",
        ),
        ("muster channel --name thin --parent c1 --interpreter merge", "only summaries leave this site"),
        ('muster channel --name hot --where "cpu_percent > 90"', "only these reports"),
    ],
)
@click.option("--name", metavar="NAME", default="channel", show_default=True, help="Identity of the channel.")
@click.option(
    "--parent",
    "parents",
    metavar="CHANNEL",
    multiple=True,
    help="Forward to this channel (default: the stream).",
)
@command.duration("--hold", "1s", "Time to collect reports before forwarding them.")
@command.duration("--beat", "1s", "Interval between heartbeats.")
@click.option(
    "--interpreter",
    metavar="NAME",
    default="concat",
    show_default=True,
    help="concat, merge or module:attribute.",
)
@click.option(
    "--where", default="", metavar="PREDICATE", help="Forward only reports that match this predicate."
)
@click.option("--sensors/--no-sensors", default=True, show_default=True, help="Accept sensors.")
@click.option("--shard", type=command.CountParam(0, 255), default=0, help="Shard of the stream's subjects.")
@connection.options
@command.pass_invocation
def channel(
    invocation: command.Invocation,
    /,
    name: str,
    parents: tuple[str, ...],
    interpreter: str,
    where: str,
    to: connection.ConnectionOptions,
    **more: Any,
) -> None:
    """Collect reports and forward them in columnar batches."""
    command.run(_run(invocation, to, name, parents, interpreter, where, more))


async def _run(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    name: str,
    parents: tuple[str, ...],
    interpreter: str,
    where: str,
    more: dict[str, Any],
) -> None:
    from muster.core.telemetry import metrics
    from muster.monitor import protocol
    from muster.monitor.channel import channel as channel_channel
    from muster.monitor.channel import interpreters
    from muster.trust.permissions import roles

    measure = metrics.Metrics(process=True)
    up = interpreters.ForwardTarget("up", parents or (protocol.ROOT,), interpreter=interpreter, where=where)
    async with (
        await foreground.connect_as(invocation, to, name, roles.Role.CHANNEL, measure) as bus,
        foreground.serve_until_signal(invocation, bus, measure) as stop,
        channel_channel.Channel(
            bus, channel_channel.ChannelOptions(subscriptions=(up,), **more), measure=measure
        ) as running,
    ):
        invocation.printer.item(
            {"channel": running.name, "parents": list(up.parents)},
            f"channel {running.name} is up, forwards to {', '.join(up.parents)}; Ctrl-C ends it",
        )
        await stop.wait()
    facts = {
        "received": running.aggregator.received,
        "forwarded": running.forwarded,
        "dropped": running.dropped,
    }
    invocation.printer.item(facts, f"channel {running.name} ended: {facts}")
