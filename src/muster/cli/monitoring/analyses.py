"""Commands of ``muster report`` that analyse the history with Spark: capacity, disks, outliers."""

from __future__ import annotations

import datetime
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from muster.cli import command
from muster.cli.monitoring import history, pipeline
from muster.core import units

if TYPE_CHECKING:
    from muster.analyses import capacity_report

limit_option = command.limit(100, "Maximum number of rows.", at_most=10_000)


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster report capacity --period week --to week.html", "the calendar week of yesterday"),
        ("muster report capacity --period month --date 2030-01-31 --to january.html", ""),
        ("muster report capacity -o json", "all figures"),
    ],
)
@click.option(
    "--period",
    type=click.Choice(["week", "month"]),
    default="week",
    show_default=True,
    help="Calendar week or month.",
)
@click.option(
    "--date",
    "day",
    type=click.DateTime(["%Y-%m-%d"]),
    metavar="DATE",
    help="A day of the period (default: yesterday, UTC).",
)
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), help="Write an HTML page.")
@click.option("--demand", "with_demand", is_flag=True, help="Include the demand for contexts.")
@history.root_option
@command.pass_invocation
def capacity(
    invocation: command.Invocation,
    period: capacity_report.Period,
    day: datetime.datetime | None,
    to: Path | None,
    with_demand: bool,
    root: str | None,
) -> None:
    """Report the use and growth of the fleet in a week or a month.

    Contains machines, reports per second, metrics by the hour, the busiest groups, disks that become full,
    machines unlike their group, and alerts. --to writes an HTML page with plots. Spark computes the report on
    the configured master.
    """
    from muster.analyses import capacity_page, capacity_report

    chosen = (day or datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)).date()
    location = history.resolve_root(invocation, root)
    limit = _reports_per_s_limit(invocation)
    with history.spark_session(invocation) as spark:
        report = capacity_report.make(
            spark, location, period, chosen, reports_per_s_limit=limit, with_demand=with_demand
        )
    if to is not None:
        to.write_text(capacity_page.render(report))
        invocation.printer.done({"period": report.period, "page": str(to)}, f"wrote {to}")
        return
    printer = invocation.printer
    if not printer.for_people:
        printer.facts(report)
        return
    printer.facts(
        {
            name: getattr(report, name)
            for name in ("period", "machines_max", "stale_max", "reports_per_s_max", "machines_per_day")
        }
        | ({"reports_per_s_limit": limit} if limit else {})
    )
    printer.rows(
        report.groups,
        ("group", "machines", "stale", "cpu_percent", "cpu_p95_percent?", "memory_percent", "disk_percent"),
        empty="no group reported",
    )
    printer.note("--to FILE writes a page with plots, forecasts and outliers; -o json prints all figures")


def _reports_per_s_limit(invocation: command.Invocation) -> float | None:
    """By the measured batches of this home; None if there are too few or they fit no line."""
    from muster.core import errors

    try:
        fitted = pipeline.load_fit(invocation)
        fitted.require_usable()
    except errors.MusterError:
        return None
    return fitted.reports_per_s_max()


@click.command(
    cls=command.MusterCommand,
    examples=[
        ("muster report disks", "disks that become full within 30 days"),
        ("muster report disks --within 7d --last 3d", "by the growth of the last three days"),
    ],
)
@command.duration("--within", "30d", "Only disks that are expected to be full within this time.")
@command.duration("--last", "14d", "Length of the history to use.")
@limit_option
@history.root_option
@command.pass_invocation
def disks(
    invocation: command.Invocation, within_s: float, last_s: float, limit: int, root: str | None
) -> None:
    """Forecast when disks become full.

    Fits a line to the hourly use of each machine's disk since its last drop, and prints when the line reaches
    100 %, with an interval of 95 %. Machines without a significant growth are omitted. Uses Spark.
    """
    from muster.analyses import disk_forecast

    location = history.resolve_root(invocation, root)
    with history.spark_session(invocation) as spark:
        rows = disk_forecast.forecast(
            spark, location, now_ms=int(time.time() * 1000), last_s=last_s, within_s=within_s, limit=limit
        )
    rows = [
        msgspec.structs.replace(row, percent_per_day=round(row.percent_per_day, 2), r2=round(row.r2, 3))
        for row in rows
    ]
    invocation.printer.rows(
        rows,
        (
            "machine",
            "group?",
            "disk_percent",
            "percent_per_day",
            "full_ms",
            "earliest_ms",
            "latest_ms",
            "hours?",
            "r2?",
        ),
        empty=f"no disk is expected to be full within {units.rounded_duration(within_s)}",
    )


@click.command(
    cls=command.MusterCommand,
    examples=[("muster report outliers", ""), ("muster report outliers --last 7d --score 8", "")],
)
@command.duration("--last", "1d", "Length of the history to use.")
@click.option(
    "--score",
    "score_min",
    type=command.AmountParam(),
    default=3.5,
    show_default=True,
    help="Minimum distance from the median of the group, in spreads of the group.",
)
@limit_option
@history.root_option
@command.pass_invocation
def outliers(
    invocation: command.Invocation, last_s: float, score_min: float, limit: int, root: str | None
) -> None:
    """List machines that are unlike their group.

    Compares the mean of each metric over the period with the median of the group's machines, in units of the
    group's spread (median absolute deviation; of a percentage at most 20 points, so with the default score a
    machine 70 points from the median is always listed). Groups of fewer than five machines are omitted. Uses
    Spark.
    """
    from muster.analyses import outliers as outliers_

    location = history.resolve_root(invocation, root)
    to_ms = int(time.time() * 1000)
    with history.spark_session(invocation) as spark:
        rows = outliers_.outliers(
            spark, location, from_ms=to_ms - int(last_s * 1000), to_ms=to_ms, score_min=score_min, limit=limit
        )
    invocation.printer.rows(
        rows,
        ("machine", "group", "metric", "value", "group_median", "score", "machines?"),
        empty="no machine is unlike its group",
    )
