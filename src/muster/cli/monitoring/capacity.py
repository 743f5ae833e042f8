"""``muster capacity``: query and check the analytic capacity model."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import command, connection


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster capacity --machines 20000 --period 10s", "channels, load of the root, age of reports"),
        ("muster capacity --paper", "the four hierarchies of the paper, with XML and with Muster"),
        ("muster capacity --check", "compare the model with the running system"),
    ],
)
@click.option("--machines", type=click.IntRange(1), default=1000, show_default=True)
@command.duration("--period", "10s", "Interval between the reports of a machine.")
@command.duration("--hold", "1s", "Time for which a channel holds reports.")
@command.duration("--trigger", "10s", "Trigger interval of Spark.")
@click.option(
    "--cores",
    type=click.FloatRange(0, min_open=True),
    default=2.0,
    show_default=True,
    help="CPU cores of the root.",
)
@click.option("--paper", is_flag=True, help="Show the capacity of the paper's hierarchies instead.")
@click.option("--check", is_flag=True, help="Compare the model with measurements of the running system.")
@command.duration("--window", "60s", "Measurement time of --check.")
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
    """Compute the channels a fleet needs, the age of its reports and the bottleneck."""
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
    sizing = capacity_model.plan(machines, period_s, hold_s=hold_s, trigger_s=trigger_s, root_cores=cores)
    invocation.printer.facts(
        {
            "machines": machines,
            "reports_s": round(machines / period_s, 1),
            "depth": sizing.hierarchy.depth,
            "channels": list(sizing.channels),
            "fan_out": [level.senders for level in sizing.hierarchy.levels],
            "load_of_a_channel": round(sizing.figures.levels[0].load, 3),
            "load_of_the_root": round(sizing.figures.root_load, 3),
            "root_cores_used": round(sizing.root_cores, 2),
            "propagation_max_s": _rounded(sizing.figures.propagation_s),
            "staleness_max_s": _rounded(sizing.figures.staleness_s),
            "limited_by": sizing.limits,
        }
    )


def _rounded(value: float) -> float | None:
    return round(value, 2) if value < float("inf") else None


async def _check(
    invocation: command.Invocation, to: connection.ConnectionOptions, window_s: float
) -> dict[str, Any]:
    from muster.app.operations import capacity_check as capacity_

    async with await connection.connect(invocation, to) as bus:
        comparison = await capacity_.check(bus, window_s=window_s)
    return {
        "reports": comparison.rows,
        "batches": comparison.batches,
        "stages_s": {name: round(took, 3) for name, took in comparison.stages.items()},
        "predicted_max_s": round(comparison.predicted_s, 3),
        "measured_max_s": round(comparison.measured_s, 3),
        "measured_p50_s": round(comparison.p50_s, 3),
        "measured_p99_s": round(comparison.p99_s, 3),
        "ratio": round(comparison.ratio, 3),
        "within_20_percent": comparison.holds,
    }
