"""``muster simulate``: simulated fleets."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import command, connection, foreground
from muster.core import units


@click.group(cls=command.MusterGroup, examples=[("muster simulate sensors --machines 1000", "")])
def simulate() -> None:
    """Publish the reports of simulated fleets."""


@simulate.command(
    examples=[
        ("muster simulate sensors --machines 1000000 --period 10s", "100,000 reports a second"),
        ("muster simulate sensors --machines 20000 --groups 1000 --realistic", ""),
        ("muster simulate sensors --machines 500 --fault 'silent zone=z3 at 30s for 1m'", ""),
        (
            "muster simulate sensors --machines 200 --as reports --channel c1",
            "single reports, sent to a channel",
        ),
        ("echo 'hot group=g2 for 1m' | muster simulate sensors --commands", "read faults from stdin"),
    ],
)
@click.option(
    "--machines",
    type=command.CountParam(1, 10_000_000),
    default=1000,
    show_default=True,
    help="Machines of the fleet.",
)
@command.duration("--period", "10s", "Interval between the reports of a machine.")
@click.option(
    "--groups",
    type=command.CountParam(1, 1_000_000),
    default=100,
    show_default=True,
    help="Groups of the fleet.",
)
@click.option(
    "--zones", type=command.CountParam(1, 100_000), default=8, show_default=True, help="Zones of the fleet."
)
@click.option(
    "--realistic",
    is_flag=True,
    help="Groups of different sizes, 20 to 50 metrics, reboots, silent machines, moves, wrong clocks.",
)
@click.option(
    "--seed",
    type=command.CountParam(0),
    default=1,
    show_default=True,
    help="Random seed; the same seed produces the same fleet.",
)
@click.option(
    "--fault",
    "faults",
    multiple=True,
    metavar="WORDS",
    help="A fault: KIND [group|zone|share=X] [at T] [for T].",
)
@click.option("--commands", is_flag=True, help="Read further faults from stdin, one per line.")
@click.option(
    "--as",
    "form",
    type=click.Choice(["batches", "reports"]),
    default="batches",
    show_default=True,
    help="Publish batches to the stream, or single reports to a channel.",
)
@click.option("--channel", metavar="NAME", default="", help="Channel that receives single reports.")
@command.duration("--for", None, "Stop after this time (default: at Ctrl-C).", dest="lasts_s")
@click.option(
    "--share",
    metavar="I/N",
    default="1/1",
    show_default=True,
    help="Simulate the i-th of n parts of the fleet.",
)
@click.option(
    "--name",
    metavar="NAME",
    default="sim",
    show_default=True,
    help="Identity, and prefix of the machines' names.",
)
@connection.options
@command.pass_invocation
def sensors(
    invocation: command.Invocation,
    /,
    faults: tuple[str, ...],
    commands: bool,
    form: str,
    channel: str,
    lasts_s: float | None,
    share: str,
    name: str,
    realistic: bool,
    to: connection.ConnectionOptions,
    **plan: Any,
) -> None:
    """Publish the reports of a simulated fleet.

    By default it publishes what first-level channels would forward to the stream: columnar batches of 1,000
    machines per message.
    """
    from muster.simulate import fleet

    number, slash, of = share.partition("/")
    if not (slash and number.isdecimal() and of.isdecimal()):
        raise click.BadParameter(f"{share!r} is not i/n", param_hint="--share")
    profile: Any = "realistic" if realistic else "plain"
    fleet_plan = fleet.FleetPlan(prefix=name, profile=profile, **plan).share(int(number), int(of))
    made = fleet.VirtualFleet(fleet_plan, faults=tuple(fleet.FleetFault.parse(words) for words in faults))
    command.run(_play(invocation, to, made, name, form, channel, lasts_s, commands))


async def _play(
    invocation: command.Invocation,
    to: connection.ConnectionOptions,
    made: Any,
    name: str,
    form: Any,
    channel: str,
    lasts_s: float | None,
    commands: bool,
) -> None:
    import asyncio
    import dataclasses
    import functools
    import math

    from muster.core.telemetry import metrics
    from muster.simulate import playback
    from muster.supervision import tasks
    from muster.trust.permissions import roles

    measure = metrics.Metrics(process=True)
    async with (
        await foreground.connect_as(invocation, to, name, roles.Role.CHANNEL, measure) as bus,
        foreground.serve_until_signal(invocation, bus, measure) as stop,
    ):
        player = playback.FleetPlayer(bus, made, form=form, channel=channel)
        ticks = None if lasts_s is None else max(1, math.ceil(lasts_s / made.plan.period_s))
        supervisor = tasks.TaskSupervisor("simulation")
        if commands:
            supervisor.loop("commands", functools.partial(_listen, invocation, made, player))
        running = [asyncio.ensure_future(player.run(ticks=ticks)), asyncio.ensure_future(stop.wait())]
        with invocation.printer.progress(f"simulating {made.machines:,} machines") as say:
            while not any(task.done() for task in running):
                share = None if ticks is None else player.at_s / (ticks * made.plan.period_s)
                say(f"{player.statistics.rows:,} reports", share)
                await asyncio.wait(running, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        done = [task for task in running if task.done()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await supervisor.close()
        for task in done:
            task.result()
    facts = {"machines": made.machines, **dataclasses.asdict(player.statistics)}
    reports, machines, messages = (
        units.format_count(number, noun)
        for number, noun in (
            (facts["rows"], "report"),
            (made.machines, "machine"),
            (facts["messages"], "message"),
        )
    )
    invocation.printer.done(facts, f"{reports} of {machines} in {messages}")


async def _listen(invocation: command.Invocation, made: Any, player: Any) -> None:
    """Read faults from stdin, in a daemon thread, which does not delay the end of the process."""
    import asyncio
    import contextlib
    import sys
    import threading

    from muster.core import errors
    from muster.simulate import fleet

    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[str] = asyncio.Queue()

    def read() -> None:
        with contextlib.suppress(ValueError):  # it was closed
            for line in sys.stdin:
                loop.call_soon_threadsafe(lines.put_nowait, line)

    threading.Thread(target=read, daemon=True).start()
    while True:
        line = (await lines.get()).strip()
        if line:
            try:
                made.add_fault(fleet.FleetFault.parse(line, now_s=player.at_s))
                invocation.printer.note(f"fault added: {line}")
            except errors.InvalidInput as error:
                invocation.printer.note(error.message)
