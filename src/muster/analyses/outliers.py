"""Machines unlike their group: the distance of their metrics from the median of the group, with Spark.

Each metric of a machine is its mean over the period, from the hourly rows.  The score is its distance from
the median of the group, divided by the spread of the group: the median of these distances, scaled so that it
is the standard deviation of a normal distribution.  A few extreme machines change neither the median nor the
spread: both are over the machines of the group, not over their reports.

The spread has a minimum, so that machines of a uniform group are not reported for tiny differences.  The
spread of a percentage has a maximum: its scale ends at 100, so in a diverse group no machine could be far
enough away.  With the default score, 70 percentage points from the median are always enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muster.core.reports import columns
from muster.pipeline import spark as spark_
from muster.pipeline.history import storage, tables
from muster.pipeline.source import spark_internals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The time since the start differs between machines of a group for no reason.
METRICS = tuple(name for name in columns.STANDARD_METRICS if name != "uptime_s")
GROUP_MIN = 5  # machines: in smaller groups no machine is unusual
SCORE_MIN = 3.5  # the usual limit for this score (Iglewicz and Hoaglin, 1993)
LISTED_MAX = 10_000
SPREAD_MIN_SHARE = 0.02  # of the median
SPREAD_MIN_PERCENT = 1.0  # percentage points
SPREAD_MAX_PERCENT = 20.0
_NORMAL_SPREAD = 1.4826  # of the standard deviation to the median of distances


class Outlier(msgspec.Struct, frozen=True):
    machine: str
    group: str
    metric: str
    value: float
    group_median: float
    score: float  # distance from the median in spreads of the group; below zero: less than the group
    machines: int  # of the group


def outliers(
    spark: SparkSession,
    root: storage.Root,
    *,
    from_ms: int,
    to_ms: int,
    score_min: float = SCORE_MIN,
    limit: int = LISTED_MAX,
) -> list[Outlier]:
    """The machines and metrics with the highest scores, highest first."""
    from pyspark.sql import functions

    spark_internals.activate(spark)
    scored = outlier_frame(spark, root, from_ms=from_ms, to_ms=to_ms)
    high = scored.where(f"size >= {float(score_min)!r}").orderBy(functions.desc("size"), "machine", "metric")
    return spark_.collect(high.limit(min(limit, LISTED_MAX)), Outlier)


def outlier_frame(spark: SparkSession, root: storage.Root, *, from_ms: int, to_ms: int) -> DataFrame:
    """A row for each machine and metric of groups that are large enough."""
    hourly = spark_.read(spark, root, tables.HOURLY, from_ms=from_ms, to_ms=to_ms)
    hourly.createOrReplaceTempView("outlier_hourly")
    means = ", ".join(
        f"'{metric}', try_divide(sum({metric}_mean * reports), sum(IF({metric}_mean IS NULL, 0, reports)))"
        for metric in METRICS
    )
    return spark.sql(
        f"""
        WITH machines AS (
            SELECT machine, max_by(`group`, hour) AS `group`, map({means}) AS means
            FROM outlier_hourly GROUP BY machine
        ), readings AS (
            SELECT machine, `group`, explode(means) AS (metric, value) FROM machines
        ), known AS (
            SELECT * FROM readings WHERE value IS NOT NULL AND NOT isnan(value)
        ), centres AS (
            SELECT `group`, metric, median(value) AS group_median, count(*) AS machines
            FROM known GROUP BY `group`, metric HAVING machines >= {GROUP_MIN}
        ), distances AS (
            SELECT *, value - group_median AS distance FROM known JOIN centres USING (`group`, metric)
        ), spreads AS (
            SELECT `group`, metric, greatest(
                least(
                    {_NORMAL_SPREAD} * median(abs(distance)),
                    IF(endswith(metric, '_percent'), {SPREAD_MAX_PERCENT}, double('inf'))
                ),
                {SPREAD_MIN_SHARE} * abs(any_value(group_median)),
                IF(endswith(metric, '_percent'), {SPREAD_MIN_PERCENT}, 1e-9)
            ) AS spread
            FROM distances GROUP BY `group`, metric
        )
        SELECT machine, `group`, metric, value, group_median, distance / spread AS score,
               abs(distance / spread) AS size, machines
        FROM distances JOIN spreads USING (`group`, metric)
        """
    )
