"""``muster capacity``: query and check the analytic capacity model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from muster.cli import command, connection
from muster.cli.monitoring import pipeline

if TYPE_CHECKING:
    from muster.monitor import capacity_plan


@click.command(
    cls=command.MusterCommand,
    examples=[
        (
            "muster capacity --machines 20000 --period 10s",
            "channels, brokers, load, age of reports",
        ),
        ("muster capacity --trade-off --to trade-off.svg", "largest fleet by age and size of reports"),
        ("muster capacity --paper", "the four hierarchies of the paper, with XML and with Muster"),
        ("muster capacity --check", "compare the model with the running system"),
    ],
)
@click.option(
    "--machines", type=command.CountParam(1), default=1000, show_default=True, help="Machines of the fleet."
)
@command.duration("--period", "10s", "Interval between the reports of a machine.")
@command.duration("--hold", "1s", "Time for which a channel holds reports.")
@command.duration("--trigger", "10s", "Trigger interval of Spark.")
@click.option(
    "--cores",
    type=command.AmountParam(),
    default=2.0,
    show_default=True,
    help="CPU cores of the root.",
)
@click.option(
    "--metrics", type=command.CountParam(1), default=12, show_default=True, help="Metrics in a report."
)
@click.option(
    "--costs",
    type=click.Choice(["auto", "fitted", "benchmark"]),
    default="auto",
    show_default=True,
    help="Costs of the root: fitted to the batches of this home's pipeline, or those of the benchmarks. "
    "auto: fitted ones if `muster pipeline fit` finds them usable.",
)
@click.option(
    "--trade-off",
    "trade_off",
    is_flag=True,
    help="Search the largest fleet for each age and size of reports and depth of the hierarchy.",
)
@click.option(
    "--to",
    "plot",
    type=click.Path(dir_okay=False, path_type=Path),
    help="With --trade-off: write a plot (SVG) to this file.",
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
    metrics: int,
    costs: str,
    trade_off: bool,
    plot: Path | None,
    paper: bool,
    check: bool,
    window_s: float,
    to: connection.ConnectionOptions,
) -> None:
    """Compute the channels and brokers a fleet needs, the age of its reports and the bottleneck."""
    if sum((paper, check, trade_off)) > 1:
        raise click.UsageError("--paper, --check and --trade-off exclude each other")
    if plot is not None and not trade_off:
        raise click.UsageError("--to needs --trade-off")
    if paper:
        _print_paper(invocation)
        return
    if check:
        invocation.printer.facts(command.run(_check(invocation, to, window_s)))
        return
    from muster.monitor import capacity_plan

    batch, source = _batch_costs(invocation, costs)
    planner = capacity_plan.FleetPlanner(
        hold_s=hold_s, trigger_s=trigger_s, root_cores=cores, metrics=metrics, batch=batch
    )
    if trade_off:
        _print_trade_off(invocation, planner, plot)
        return
    sizing = planner.plan(machines, period_s)
    invocation.printer.facts(
        {
            "machines": machines,
            "reports_s": round(machines / period_s, 1),
            "depth": sizing.hierarchy.depth,
            "channels": list(sizing.channels),
            "fan_out": [level.senders for level in sizing.hierarchy.levels],
            "brokers": sizing.brokers,
            "brokers_limited_by": sizing.broker_limit,
            "load_of_a_broker": round(sizing.broker_load, 3),
            "load_of_a_channel": round(sizing.figures.levels[0].load, 3),
            "load_of_the_root": round(sizing.figures.root_load, 3),
            "root_cores_used": round(sizing.root_cores, 2),
            "propagation_max_s": _rounded(sizing.figures.propagation_s),
            "staleness_max_s": _rounded(sizing.figures.staleness_s),
            "limited_by": sizing.limits,
            "costs": source,
        }
    )


def _batch_costs(invocation: command.Invocation, costs: str) -> tuple[capacity_plan.BatchCosts | None, str]:
    """The fitted costs of the pipeline, or None for those of the benchmarks, and their origin."""
    from muster.core import errors
    from muster.monitor import capacity_plan

    if costs != "benchmark":
        try:
            fitted = pipeline.load_fit(invocation)
            fitted.require_usable()
            return (
                capacity_plan.BatchCosts(max(0.0, fitted.fixed_s), fitted.report_s),
                f"fitted to {fitted.batches} batches of this pipeline, r² {fitted.r2:.2f}",
            )
        except errors.MusterError:
            if costs == "fitted":
                raise
    return None, "of the benchmarks"


def _print_paper(invocation: command.Invocation) -> None:
    """The hierarchies of the paper, whose roots are channels, with the costs of XML and with ours."""
    from muster.monitor import capacity_model, capacity_plan

    costs = capacity_plan.MeasuredCosts()
    measured = capacity_model.table_2(costs.inner, first=costs.channel)
    limit = capacity_plan.CHANNEL_MACHINES_MAX
    rows = [
        {
            "hierarchy": xml.name,
            "xml_machines": capacity_model.capacity(xml),
            "our_machines_by_cpu": (by_cpu := capacity_model.capacity(ours)),
            "our_machines": min(by_cpu, limit),
            "limited_by": "machines that a channel tracks" if by_cpu > limit else "CPU of the root",
        }
        for xml, ours in zip(capacity_model.table_2(), measured, strict=True)
    ]
    invocation.printer.rows(
        rows, ("hierarchy", "xml_machines", "our_machines_by_cpu", "our_machines", "limited_by?")
    )
    invocation.printer.note(
        "The costs of XML are inferred: the paper states only that two levels carry about five times one."
    )


def _print_trade_off(
    invocation: command.Invocation, planner: capacity_plan.FleetPlanner, path: Path | None
) -> None:
    from muster.monitor import capacity_plan

    sizes = tuple(sorted({planner.metrics, *capacity_plan.SIZES}))
    rows = capacity_plan.trade_off(planner, sizes=sizes)
    if path is not None:
        path.write_text(plot_trade_off(rows))
    if invocation.printer.for_people:
        best: dict[tuple[int, float], capacity_plan.TradeOff] = {}
        for row in rows:
            key = (row.metrics, row.staleness_s)
            if key not in best or row.machines > best[key].machines:
                best[key] = row
        rows = [row for row in best.values() if row.machines]
    invocation.printer.rows(
        rows, ("staleness_s", "metrics", "machines", "depth", "period_s", "trigger_s", "channels", "brokers")
    )
    invocation.printer.note(
        "These are fleets of even load, at the mean cost of a report. Batches vary: in benchmarks the "
        "largest fleet that held is about a fifth smaller (`make bench-pipeline_plain`)."
    )
    if path is not None:
        invocation.printer.note(f"wrote {path}")


def plot_trade_off(rows: Sequence[capacity_plan.TradeOff]) -> str:
    """Machines by the age of reports, both logarithmic; a line for each size and depth."""
    from muster.core.formats import line_plot

    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row.machines:
            levels = "1 level" if row.depth == 1 else f"{row.depth} levels"
            lines.setdefault(f"{levels}, {row.metrics} metrics", []).append((row.staleness_s, row.machines))
    ages = sorted({row.staleness_s for row in rows})
    most = max(row.machines for row in rows)
    low, high = 1000.0, 10.0 ** math.ceil(math.log10(max(most, 10_000)))
    powers = [10.0**power for power in range(3, round(math.log10(high)) + 1)]
    return line_plot.svg(
        lines,
        line_plot.PlotAxis(ages[0], ages[-1], [(age, f"{age:g} s") for age in ages], logarithmic=True),
        line_plot.PlotAxis(low, high, [(power, f"{power:,.0f}") for power in powers], logarithmic=True),
        label="The largest number of machines by the maximum age of their reports",
        height=420,
    )


def _rounded(value: float) -> float | None:
    return round(value, 2) if value < float("inf") else None


async def _check(
    invocation: command.Invocation, to: connection.ConnectionOptions, window_s: float
) -> dict[str, Any]:
    from muster.app.operations import capacity_check

    async with await connection.connect(invocation, to) as bus:
        comparison = await capacity_check.check(bus, window_s=window_s)
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
