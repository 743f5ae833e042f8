"""``muster fleet``: change which machines belong to the fleet."""

from __future__ import annotations

import click

from muster.cli import command, connection, live_names


@click.group(cls=command.MusterGroup, examples=[("muster fleet forget web-7", "")])
def fleet() -> None:
    """Remove machines from the fleet."""


@fleet.command(
    examples=[
        ("muster fleet forget web-7 web-8", "they were replaced"),
        ("muster fleet forget --where \"group = 'lab' AND age_s > 3600\"", ""),
    ]
)
@click.argument("machines", metavar="[MACHINE]...", nargs=-1, shell_complete=live_names.MACHINES)
@click.option(
    "--where", default="", metavar="PREDICATE", help="Predicate over machine, group, zone, period_s, age_s."
)
@connection.options
@command.pass_invocation
def forget(
    invocation: command.Invocation, machines: tuple[str, ...], where: str, to: connection.ConnectionOptions
) -> None:
    """Remove retired machines from the fleet and end their alerts.

    The next batch of the pipeline applies it. A machine that reports again later belongs to the fleet again.
    The history keeps its rows; `muster history forget` deletes them.
    """
    from muster.core import errors
    from muster.pipeline import client

    if bool(machines) == bool(where):
        raise errors.InvalidInput("name machines or use --where, not both")
    connection.call(invocation, to, lambda bus: client.PipelineClient(bus).forget(machines, where=where))
    selected = where or ", ".join(machines)
    invocation.printer.done(
        {"machines": list(machines), "where": where}, f"the next batch of the pipeline removes: {selected}"
    )
