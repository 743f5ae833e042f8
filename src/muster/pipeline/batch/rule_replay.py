"""Batch jobs over the history with Spark: replay of alerts under a policy, and demand for metadata by zone.

Both evaluate predicates as SQL (`muster.predicates.backends.sql`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from muster.core import errors
from muster.pipeline.history import tables
from muster.pipeline.source import session
from muster.predicates import types
from muster.predicates.analysis import type_check
from muster.predicates.backends import dialects, sql
from muster.predicates.syntax import parser

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_STRING, _FLOAT, _INT = (types.parse_type(name) for name in ("string", "float", "int"))

EVENT = {
    **dict.fromkeys(("rule", "about", "severity", "state", "reason", "group"), _STRING),
    "value": _FLOAT,
}


class ReplayedEvent(msgspec.Struct, frozen=True):
    """A stored event, and how many receivers it would have reached."""

    at: str
    rule: str
    about: str
    state: str
    receivers: int


class RuleReplay(msgspec.Struct, frozen=True):
    events: int
    deliveries: int
    receivers: int  # distinct machines
    reached: list[ReplayedEvent]


def replay(
    spark: SparkSession,
    root: Path,
    policy: str,
    *,
    address: str = "TRUE",
    from_ms: int | None = None,
    to_ms: int | None = None,
    horizon_s: float = 60.0,
) -> RuleReplay:
    """The receivers that stored alerts would have reached under a policy.

    ``policy`` is about the event (``severity = 'critical'``) and, as ``receiver.zone``, about the receiver;
    ``address`` is about the receiver.  A receiver's state is what its machine last reported before the event,
    not longer than ``horizon_s`` before.
    """
    session.activate(spark)
    nodes, events = (_read(spark, root, kind) for kind in (tables.NODES, tables.ALERTS))
    events = _during(events, "at", from_ms, to_ms)
    receiver = _receiver_model(nodes)
    accepts = _condition(
        policy, EVENT, {f"receiver.{name}": kind for name, kind in receiver.items()}, "event"
    )
    means = _condition(
        address, {}, {f"receiver.{name}": kind for name, kind in receiver.items()}, None, bare=True
    )
    state = ", ".join(f"`{name}`" for name in receiver)
    events.selectExpr("*", "monotonically_increasing_id() AS event_id").createOrReplaceTempView("past_events")
    nodes.createOrReplaceTempView("past_reports")
    deliveries = spark.sql(
        f"""
        SELECT event_id, machine FROM (
            SELECT e.event_id, {", ".join(f"e.`{name}` AS `event {name}`" for name in EVENT)},
                   max_by(struct(n.*), n.reported_at) AS receiver, n.machine
            FROM past_events e JOIN (SELECT reported_at, {state} FROM past_reports) n
              ON n.reported_at <= e.at AND n.reported_at > e.at - make_dt_interval(0, 0, 0, {horizon_s:f})
            GROUP BY ALL
        ) WHERE ({accepts}) AND ({means})
        """
    ).cache()
    try:
        counts = {row["event_id"]: row["n"] for row in deliveries.groupBy("event_id").agg(_count()).collect()}
        machines = deliveries.select("machine").distinct().count()
        listed = spark.sql(
            "SELECT event_id, date_format(at, \"yyyy-MM-dd'T'HH:mm:ss'Z'\") AS at, rule, about, state "
            "FROM past_events ORDER BY at"
        ).collect()
    finally:
        deliveries.unpersist()
    reached = [
        ReplayedEvent(row["at"], row["rule"], row["about"], row["state"], counts.get(row["event_id"], 0))
        for row in listed
    ]
    return RuleReplay(len(reached), sum(counts.values()), machines, reached)


class ContextDemand(msgspec.Struct, frozen=True):
    """The accesses to a key by zone, and the suggested zones for replicas."""

    key: str
    total: float
    by_zone: dict[str, float]
    place_in: list[str]


def demand(
    spark: SparkSession,
    root: Path,
    *,
    prefix: str = "reads.",
    covered: float = 0.8,
    most: int = 3,
    from_ms: int | None = None,
    to_ms: int | None = None,
) -> list[ContextDemand]:
    """Accesses to each key by zone, and the fewest zones that cover most of them.

    From metrics of machines and services named ``reads.<key>`` (count in a period) or ``reads.<key>_s`` (rate
    per second, as for statsd counters).
    """
    session.activate(spark)
    nodes = _during(_read(spark, root, tables.NODES), "reported_at", from_ms, to_ms)
    of_services = nodes.selectExpr("zone", "period_s", "explode(services) AS service")
    rows = (
        nodes.selectExpr("zone", "period_s", "explode(extra) AS (name, value)")
        .unionAll(of_services.selectExpr("zone", "period_s", "explode(service.metrics) AS (name, value)"))
        .where(sql.write(parser.parse(f"name LIKE '{_quoted(prefix)}%' ESCAPE '!'"), {"name": _STRING}))
        .selectExpr(
            "zone",
            "regexp_replace(name, '_s$', '') AS name",
            "IF(endswith(name, '_s'), value * period_s, value) AS value",
        )
        .groupBy("name", "zone")
        .agg(_sum())
        .collect()
    )
    demands: dict[str, dict[str, float]] = {}
    for row in rows:
        demands.setdefault(row["name"].removeprefix(prefix), {})[row["zone"]] = float(row["n"])
    return sorted(
        (
            ContextDemand(key, sum(zones.values()), zones, replica_zones(zones, covered, most))
            for key, zones in demands.items()
        ),
        key=lambda item: (-item.total, item.key),
    )


def replica_zones(zones: dict[str, float], covered: float, most: int) -> list[str]:
    """The busiest zones, until they cover this share of the accesses or the maximum number is reached."""
    chosen: list[str] = []
    total = sum(zones.values())
    for zone in sorted(zones, key=lambda name: (-zones[name], name)):
        if len(chosen) >= most or sum(zones[zone_] for zone_ in chosen) >= covered * total:
            break
        chosen.append(zone)
    return chosen


def _quoted(prefix: str) -> str:
    return "".join(f"!{mark}" if mark in "%_!" else mark for mark in prefix.replace("'", "''"))


def _read(spark: SparkSession, root: Path, kind: str) -> DataFrame:
    paths = [str(path) for path in tables.files(root, kind)]
    if not paths:
        raise errors.NotFound(
            f"the history in {root} has no table {kind}", hint="`muster pipeline run` writes it"
        )
    return spark.read.option("mergeSchema", "true").parquet(*paths)


def _during(frame: DataFrame, column: str, from_ms: int | None, to_ms: int | None) -> DataFrame:
    if from_ms is not None:
        frame = frame.where(f"{column} >= timestamp_millis({from_ms})")
    if to_ms is not None:
        frame = frame.where(f"{column} < timestamp_millis({to_ms})")
    return frame


def _receiver_model(nodes: DataFrame) -> dict[str, types.AttributeType]:
    kinds = {"string": _STRING, "double": _FLOAT, "bigint": _INT}
    return {name: kinds[kind] for name, kind in nodes.dtypes if kind in kinds and name != tables.SEQUENCE}


def _condition(
    text: str,
    own: dict[str, types.AttributeType],
    receivers: dict[str, types.AttributeType],
    home: str | None,
    *,
    bare: bool = False,
) -> str:
    model = {**own, **receivers}
    if bare:
        model |= {name.removeprefix("receiver."): kind for name, kind in receivers.items()}
        home = "receiver"
    condition = parser.parse(text, home=home)
    type_check.require(condition, model, text)

    def column(key: str) -> str:
        quote = dialects.SPARK.identifier
        name = key.removeprefix("receiver.")
        is_receiver = key.startswith("receiver.") or bare
        return f"receiver.{quote(name)}" if is_receiver else quote(f"event {name}")

    return sql.write(condition, model, dialects.SPARK, column=column)


def _count() -> Any:
    from pyspark.sql import functions

    return functions.count("*").alias("n")


def _sum() -> Any:
    from pyspark.sql import functions

    return functions.sum("value").alias("n")
