"""``muster capacity``: the analytic model, asked and checked."""

from __future__ import annotations

from typing import Any

import click

from muster.cli import base, connection, monitoring


@click.command(
    cls=base.Command,
    examples=[
        ("muster capacity --machines 20000 --period 10s", "channels, load of the root, age of what one sees"),
        ("muster capacity --paper", "the four hierarchies of the paper: XML, and ours"),
        ("muster capacity --check", "the model against the running system"),
    ],
)
@click.option("--machines", type=click.IntRange(1), default=1000, show_default=True)
@monitoring.duration("--period", "10s", "Between two reports of a machine.")
@monitoring.duration("--hold", "1s", "Of a channel.")
@monitoring.duration("--trigger", "10s", "Of Spark.")
@click.option(
    "--cores", type=click.FloatRange(0, min_open=True), default=2.0, show_default=True, help="Of the root."
)
@click.option("--paper", is_flag=True, help="Show the capacity of the paper's hierarchies instead.")
@click.option("--check", is_flag=True, help="Compare the model with what the running system does.")
@monitoring.duration("--window", "60s", "For --check.")
@connection.options
@base.pass_invocation
def capacity(
    invocation: base.Invocation,
    machines: int,
    period_s: float,
    hold_s: float,
    trigger_s: float,
    cores: float,
    paper: bool,
    check: bool,
    window_s: float,
    to: connection.Options,
) -> None:
    """Say what a fleet of this size needs, how old its reports are, and what limits it."""
    from muster.monitor import model

    if paper:
        costs = model.Measured()
        measured = model.table_2(costs.inner, first=costs.channel)
        rows = [
            {"hierarchy": xml.name, "xml_machines": model.capacity(xml), "our_machines": model.capacity(ours)}
            for xml, ours in zip(model.table_2(), measured, strict=True)
        ]
        invocation.printer.rows(rows, ("hierarchy", "xml_machines", "our_machines"))
        return
    if check:
        facts = base.run(_check(invocation, to, window_s))
        invocation.printer.facts(facts)
        return
    found = model.plan(machines, period_s, hold_s=hold_s, trigger_s=trigger_s, root_cores=cores)
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


async def _check(invocation: base.Invocation, to: connection.Options, window_s: float) -> dict[str, Any]:
    """From a report's making to its place in the stream: the holding times of the levels between."""
    from muster.core import errors
    from muster.monitor import client, model

    async with await connection.connect(invocation, to) as bus:
        producers = await client.find(bus)
        recent = await client.recent(bus, window_s=window_s)
    if not recent:
        raise errors.NotFound(
            f"no report reached the stream in the last {window_s:g} s", hint="widen --window"
        )
    ages_s = [
        one.stored_at_ms / 1000 - at_us / 1e6
        for one in recent
        for at_us in one.batch.column("reported_at").cast("int64").to_pylist()
    ]
    holds_s = dict.fromkeys(range(1, 1 + max(one.facts.level for one in recent)), 0.0)
    for producer in producers:
        holds_s[producer.level] = max(holds_s.get(producer.level, 0.0), producer.hold_s)
    predicted_s = sum(holds_s.values())
    result = model.check(predicted_s, ages_s)
    ages_s.sort()
    return {
        "rows": len(ages_s),
        "levels": len(holds_s),
        "predicted_max_s": round(predicted_s, 3),
        "measured_max_s": round(result.measured_s, 3),
        "measured_p50_s": round(ages_s[len(ages_s) // 2], 3),
        "measured_p99_s": round(ages_s[int(len(ages_s) * 0.99)], 3),
        "ratio": round(result.ratio, 3),
        "within_20_percent": result.holds,
    }
