"""``muster capacity``: the analytic model, asked and checked."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import command, connection


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster capacity --machines 20000 --period 10s", "channels, load of the root, age of what one sees"),
        ("muster capacity --paper", "the four hierarchies of the paper: XML, and ours"),
        ("muster capacity --check", "the model against the running system"),
    ],
)
@click.option("--machines", type=click.IntRange(1), default=1000, show_default=True)
@command.duration("--period", "10s", "Between two reports of a machine.")
@command.duration("--hold", "1s", "Of a channel.")
@command.duration("--trigger", "10s", "Of Spark.")
@click.option(
    "--cores", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Of the root."
)
@click.option("--paper", is_flag=True, help="Show the capacity of the paper's hierarchies instead.")
@click.option("--check", is_flag=True, help="Compare the model with what the running system does.")
@command.duration("--window", "60s", "For --check.")
@connection.options
@command.pass_invocation
def capacity(
    invocation: command.Invocation,
    machines: int,
    period_s: float,
    hold_s: float,
    trigger_s: float,
    cores: float,
    paper: bool,
    check: bool,
    window_s: float,
    to: connection.ConnectionOptions,
) -> None:
    """Say what a fleet of this size needs, how old its reports are, and what limits it."""
    from muster.monitor import capacity_model

    if paper:
        costs = capacity_model.MeasuredCosts()
        measured = capacity_model.table_2(costs.inner, first=costs.channel)
        rows = [
            {
                "hierarchy": xml.name,
                "xml_machines": capacity_model.capacity(xml),
                "our_machines": capacity_model.capacity(ours),
            }
            for xml, ours in zip(capacity_model.table_2(), measured, strict=True)
        ]
        invocation.printer.rows(rows, ("hierarchy", "xml_machines", "our_machines"))
        return
    if check:
        facts = command.run(_check(invocation, to, window_s))
        invocation.printer.facts(facts)
        return
    found = capacity_model.plan(machines, period_s, hold_s=hold_s, trigger_s=trigger_s, root_cores=cores)
    invocation.printer.facts(
        {
            "machines": machines,
            "reports_s": round(machines / period_s, 1),
            "depth": found.hierarchy.depth,
            "channels": list(found.channels),
            "fan_out": [level.senders for level in found.hierarchy.levels],
            "load_of_a_channel": round(found.figures.levels[0].load, 3),
            "load_of_the_root": round(found.figures.root_load, 3),
            "root_cores_used": round(found.root_cores, 2),
            "propagation_max_s": _rounded(found.figures.propagation_s),
            "staleness_max_s": _rounded(found.figures.staleness_s),
            "limited_by": found.limits,
        }
    )


def _rounded(value: float) -> float | None:
    return round(value, 2) if value < float("inf") else None


async def _check(
    invocation: command.Invocation, to: connection.ConnectionOptions, window_s: float
) -> dict[str, Any]:
    from muster.app.operations import capacity_check as capacity_

    async with await connection.connect(invocation, to) as bus:
        found = await capacity_.check(bus, window_s=window_s)
    return {
        "reports": found.rows,
        "batches": found.batches,
        "stages_s": {name: round(took, 3) for name, took in found.stages.items()},
        "predicted_max_s": round(found.predicted_s, 3),
        "measured_max_s": round(found.measured_s, 3),
        "measured_p50_s": round(found.p50_s, 3),
        "measured_p99_s": round(found.p99_s, 3),
        "ratio": round(found.ratio, 3),
        "within_20_percent": found.holds,
    }
