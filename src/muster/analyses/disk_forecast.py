"""When disks become full: a line through the hourly values of each machine, with Spark.

The line is fitted by least squares to the hourly maximum of ``disk_percent``.  A drop of more than
`DROP_PERCENT` between two hours (files were deleted, a disk was replaced) starts the line anew.  The interval
contains the time at which the line reaches 100 % with a probability of 95 % (Fieller's theorem): it is wide
if the values scatter or cover few hours.  Values of neighbouring hours resemble each other, so the variance
is increased by the autocorrelation of the residuals.  A machine whose slope is not significantly above
zero has no forecast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muster.pipeline import spark as spark_
from muster.pipeline.history import storage, tables
from muster.pipeline.source import spark_internals

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FULL_PERCENT = 100.0
DROP_PERCENT = 10.0
HOURS_MIN = 12
LISTED_MAX = 10_000
FAR_MS = 10 * 365 * 86_400_000  # later times are shown as this one
_NORMAL = 1.959964  # quantile of the normal distribution for 95 %
_CORRELATION_MAX = 0.98


class DiskForecast(msgspec.Struct, frozen=True):
    machine: str
    group: str
    zone: str
    disk_percent: float  # the last value
    percent_per_day: float
    full_ms: int  # the expected time
    earliest_ms: int
    latest_ms: int
    hours: int  # hours of data since the last drop
    r2: float


def forecast(
    spark: SparkSession,
    root: storage.Root,
    *,
    now_ms: int,
    last_s: float = 14 * 86400.0,
    within_s: float = 30 * 86400.0,
    limit: int = LISTED_MAX,
) -> list[DiskForecast]:
    """The machines whose disks are expected to be full before ``now_ms + within_s``, soonest first.

    A disk that is full already has the time ``now_ms``.
    """
    spark_internals.activate(spark)
    frame = forecast_frame(spark, root, from_ms=now_ms - int(last_s * 1000), to_ms=now_ms)
    times = (
        f"cast(greatest({now_ms}, least({now_ms + FAR_MS}, {name})) AS BIGINT) AS {name}_ms"
        for name in ("full", "earliest", "latest")
    )
    soon = frame.selectExpr("*", *times).where(f"full_ms <= {now_ms + int(within_s * 1000)}")
    return spark_.collect(soon.orderBy("full_ms", "machine").limit(min(limit, LISTED_MAX)), DiskForecast)


def forecast_frame(spark: SparkSession, root: storage.Root, *, from_ms: int, to_ms: int) -> DataFrame:
    """A row for each machine with a significant trend; ``full``, ``earliest``, ``latest``: times in ms."""
    hourly = spark_.read(spark, root, tables.HOURLY, from_ms=from_ms, to_ms=to_ms)
    hourly.createOrReplaceTempView("forecast_hourly")
    hour_ms = 3_600_000
    # Times are hours since the start, so that squares keep their precision.
    return spark.sql(
        f"""
        WITH points AS (
            SELECT machine, `group`, zone, disk_percent_max AS y,
                   (unix_millis(hour) - {from_ms}) / {hour_ms}D AS x,
                   disk_percent_max < lag(disk_percent_max) OVER times - {DROP_PERCENT} AS dropped
            FROM forecast_hourly WHERE disk_percent_max IS NOT NULL
            WINDOW times AS (PARTITION BY machine ORDER BY hour)
        ), parts AS (
            SELECT *, sum(CASE WHEN dropped THEN 1 ELSE 0 END) OVER
                       (PARTITION BY machine ORDER BY x DESC ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)
                       - CASE WHEN dropped THEN 1 ELSE 0 END AS drops_after
            FROM points
        ), latest AS (
            SELECT * FROM parts WHERE drops_after = 0
        ), lines AS (
            SELECT machine, max_by(`group`, x) AS `group`, max_by(zone, x) AS zone,
                   max_by(y, x) AS last_y, count(*) AS n, avg(x) AS mean_x, avg(y) AS mean_y,
                   regr_sxx(y, x) AS sxx, regr_syy(y, x) AS syy, regr_slope(y, x) AS slope
            FROM latest GROUP BY machine HAVING n >= {HOURS_MIN} AND sxx > 0
        ), residuals AS (
            SELECT machine, y - mean_y - slope * (x - mean_x) AS e, x
            FROM latest JOIN lines USING (machine)
        ), neighbours AS (
            SELECT machine, e, lag(e) OVER (PARTITION BY machine ORDER BY x) AS before FROM residuals
        ), scatter AS (
            SELECT machine, sum(e * e) AS sse,
                   least({_CORRELATION_MAX}, greatest(0, coalesce(
                       try_divide(sum(e * before), sum(e * e)), 0))) AS correlation
            FROM neighbours GROUP BY machine
        ), spread AS (
            SELECT *, {FULL_PERCENT} - mean_y AS d, {_student("n - 2")} AS t,
                   sse / (n - 2) * (1 + correlation) / (1 - correlation) AS variance
            FROM lines JOIN scatter USING (machine)
        ), roots AS (
            SELECT *, slope * slope - t * t * variance / sxx AS a, slope * d AS b,
                   d * d - t * t * variance / n AS c
            FROM spread
        )
        SELECT machine, `group`, zone, last_y AS disk_percent, slope * 24 AS percent_per_day, n AS hours,
               coalesce(try_divide(slope * slope * sxx, syy), 1D) AS r2,
               {from_ms} + {hour_ms} * (mean_x + d / slope) AS full,
               {from_ms} + {hour_ms} * (mean_x + (b - sqrt(greatest(0, b * b - a * c))) / a) AS earliest,
               {from_ms} + {hour_ms} * (mean_x + (b + sqrt(greatest(0, b * b - a * c))) / a) AS latest
        FROM roots WHERE slope > 0 AND a > 0
        """
    )


def _student(freedom: str) -> str:
    """The quantile of Student's distribution, by the expansion of Cornish and Fisher."""
    z = _NORMAL
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return f"({z} + {first} / ({freedom}) + {second} / (({freedom}) * ({freedom})))"
