"""The capacity report of a week or a month: use, growth, bottlenecks and forecasts of the fleet, with Spark.

`capacity_page` renders it as an HTML page.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec
import numpy as np

from muster.analyses import disk_forecast, outliers, rule_replay
from muster.core import errors
from muster.pipeline import spark as spark_
from muster.pipeline.history import storage, tables
from muster.pipeline.source import spark_internals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The metrics of the report: each has its mean over the fleet and the highest 95th percentile of a window.
METRICS = ("cpu_percent", "memory_percent", "disk_percent", "load_1m")
LISTED_MAX = 20
DAY_MS = 86_400_000
Period = Literal["week", "month"]
T = TypeVar("T")


class HourFigures(msgspec.Struct, frozen=True):
    at_ms: int
    machines: int  # the maximum of the hour
    stale: int
    reports_per_s: float
    means: dict[str, float]
    p95: dict[str, float]


class GroupCapacity(msgspec.Struct, frozen=True):
    group: str
    machines: int
    stale: int
    cpu_percent: float | None  # mean
    cpu_p95_percent: float | None  # highest of a window
    memory_percent: float | None
    disk_percent: float | None


class AlertCount(msgspec.Struct, frozen=True):
    rule: str
    severity: str
    times: int


class CapacityReport(msgspec.Struct, frozen=True, kw_only=True):
    period: str  # 2030-W05, 2030-01
    from_ms: int
    to_ms: int
    machines_max: int
    stale_max: int
    reports_per_s_max: float
    machines_per_day: float | None  # growth; None: fewer than three days
    reports_per_s_limit: float | None = None  # of the pipeline, by its measured batches
    hours: list[HourFigures]
    groups: list[GroupCapacity]
    disks: list[disk_forecast.DiskForecast]
    outliers: list[outliers.Outlier]
    alerts: list[AlertCount]
    demand: list[rule_replay.ContextDemand] | None  # None: not requested


def bounds(period: Period, day: datetime.date) -> tuple[str, int, int]:
    """The name of the calendar week or month of a day, its start, and the start of the next one."""
    if period == "week":
        first = day - datetime.timedelta(days=day.weekday())
        following = first + datetime.timedelta(days=7)
        name = f"{first.isocalendar().year}-W{first.isocalendar().week:02}"
    else:
        first = day.replace(day=1)
        following = (first + datetime.timedelta(days=32)).replace(day=1)
        name = f"{first:%Y-%m}"
    return name, _start_ms(first), _start_ms(following)


def _start_ms(day: datetime.date) -> int:
    return int(datetime.datetime.combine(day, datetime.time(), datetime.UTC).timestamp()) * 1000


def make(
    spark: SparkSession,
    root: storage.Root,
    period: Period,
    day: datetime.date,
    *,
    reports_per_s_limit: float | None = None,
    with_demand: bool = False,
) -> CapacityReport:
    """`errors.NotFound` if the history has no data of the period.

    ``with_demand``: include the demand for contexts, which reads all reports of the period.
    """
    spark_internals.activate(spark)
    name, from_ms, to_ms = bounds(period, day)
    hours = [
        HourFigures(
            row["at_ms"],
            row["machines"],
            row["stale"],
            row["reports"] / 3600,
            _known(row, "mean"),
            _known(row, "p95"),
        )
        for row in hours_frame(spark, root, from_ms=from_ms, to_ms=to_ms).orderBy("at_ms").collect()
    ]
    if not hours:
        raise errors.NotFound(f"the history has no data of {name}")
    demand = None
    if with_demand:
        demand = rule_replay.demand(spark, root, from_ms=from_ms, to_ms=to_ms)[:LISTED_MAX]
    end_ms = min(to_ms, hours[-1].at_ms + 3_600_000)
    return CapacityReport(
        period=name,
        from_ms=from_ms,
        to_ms=to_ms,
        machines_max=max(hour.machines for hour in hours),
        stale_max=max(hour.stale for hour in hours),
        reports_per_s_max=max(hour.reports_per_s for hour in hours),
        machines_per_day=growth([(hour.at_ms, hour.machines) for hour in hours]),
        reports_per_s_limit=reports_per_s_limit,
        hours=hours,
        groups=_groups(spark, root, from_ms, to_ms),
        disks=_if_hourly(lambda: disk_forecast.forecast(spark, root, now_ms=end_ms, limit=LISTED_MAX)),
        outliers=_if_hourly(
            lambda: outliers.outliers(spark, root, from_ms=from_ms, to_ms=to_ms, limit=LISTED_MAX)
        ),
        alerts=_alerts(spark, root, from_ms, to_ms),
        demand=demand,
    )


def hours_frame(spark: SparkSession, root: storage.Root, *, from_ms: int, to_ms: int) -> DataFrame:
    """A row for each hour, from the windows of the system."""
    windows = spark_.read(spark, root, tables.GROUPS, from_ms=from_ms, to_ms=to_ms)
    means = [f"{_mean(metric)}_mean" for metric in METRICS]
    highest = [f"max({metric}_p95) AS {metric}_p95" for metric in METRICS]
    windows.createOrReplaceTempView("capacity_windows")
    return spark.sql(
        f"""
        SELECT unix_millis(date_trunc('HOUR', window_start)) AS at_ms, max(machines) AS machines,
               max(stale) AS stale, sum(reports) AS reports, {", ".join(means + highest)}
        FROM capacity_windows WHERE scope = 'system' GROUP BY at_ms
        """
    )


def _known(row: Any, statistic: str) -> dict[str, float]:
    values = {metric: row[f"{metric}_{statistic}"] for metric in METRICS}
    return {metric: value for metric, value in values.items() if value is not None}


def growth(machines: list[tuple[int, int]]) -> float | None:
    """Machines that are added in a day: the slope of a line through the maximum of each day."""
    days: dict[int, int] = {}
    for at_ms, count in machines:
        days[at_ms // DAY_MS] = max(days.get(at_ms // DAY_MS, 0), count)
    if len(days) < 3:
        return None
    slope, _ = np.polyfit(np.array(list(days), float), np.array(list(days.values()), float), 1)
    return round(float(slope), 6)


def _groups(spark: SparkSession, root: storage.Root, from_ms: int, to_ms: int) -> list[GroupCapacity]:
    """The busiest groups, by their mean CPU load."""
    windows = spark_.read(spark, root, tables.GROUPS, from_ms=from_ms, to_ms=to_ms)
    windows.createOrReplaceTempView("capacity_windows")
    busiest = spark.sql(
        f"""
        SELECT name AS `group`, max(machines) AS machines, max(stale) AS stale,
               max(cpu_percent_p95) AS cpu_p95_percent, {", ".join(map(_mean, METRICS))}
        FROM capacity_windows WHERE scope = 'group' GROUP BY name
        ORDER BY cpu_percent DESC NULLS LAST, name LIMIT {LISTED_MAX}
        """
    )
    return spark_.collect(busiest, GroupCapacity)


def _mean(metric: str) -> str:
    return f"try_divide(sum({metric}_mean * {metric}_count), sum({metric}_count)) AS {metric}"


def _alerts(spark: SparkSession, root: storage.Root, from_ms: int, to_ms: int) -> list[AlertCount]:
    try:
        changes = spark_.read(spark, root, tables.ALERTS, from_ms=from_ms, to_ms=to_ms)
    except errors.NotFound:
        return []
    counted = changes.where("state = 'firing'").groupBy("rule", "severity").count()
    most = counted.withColumnRenamed("count", "times").orderBy("times", ascending=False)
    return spark_.collect(most.limit(LISTED_MAX), AlertCount)


def _if_hourly(job: Callable[[], list[T]]) -> list[T]:
    """The result of a job over hourly rows, which exist after the first hour."""
    try:
        return job()
    except errors.NotFound:
        return []
