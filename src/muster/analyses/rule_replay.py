"""Batch jobs over the history with Spark: replay of alerts under a policy, and demand for metadata by zone.

Both evaluate predicates as SQL (`muster.predicates.backends.sql`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from muster.pipeline import spark as spark_
from muster.pipeline.history import storage, tables
from muster.pipeline.source import spark_internals
from muster.predicates import types
from muster.predicates.analysis import type_check
from muster.predicates.backends import sql
from muster.predicates.syntax import parser

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

EVENTS_LISTED = 10_000  # in a result: the newest
COVERED = 0.8  # of the accesses to a key, by the zones that get its replicas
DEMANDS_LISTED = 100_000  # pairs of a key and a zone

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
    reached: list[ReplayedEvent]  # the newest `EVENTS_LISTED`, oldest first


def replay(
    spark: SparkSession,
    root: storage.Root,
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
    spark_internals.activate(spark)
    events, deliveries = replay_frames(
        spark, root, policy, address=address, from_ms=from_ms, to_ms=to_ms, horizon_s=horizon_s
    )
    deliveries = deliveries.cache()
    try:
        counts = deliveries.groupBy("event_id").count()
        machines = deliveries.select("machine").distinct().count()
        total = deliveries.count()
        listed = (
            events.join(counts, "event_id", "left")
            .selectExpr(
                "date_format(changed_at, \"yyyy-MM-dd'T'HH:mm:ss'Z'\") AS at",
                *("rule", "about", "state", "coalesce(`count`, 0) AS receivers", "changed_at", "event_id"),
            )
            .orderBy("changed_at", "rule", "about", "event_id", ascending=False)
            .limit(EVENTS_LISTED)
        )
        reached = spark_.collect(listed, ReplayedEvent)[::-1]
        number = len(reached) if len(reached) < EVENTS_LISTED else events.count()
    finally:
        deliveries.unpersist()
    return RuleReplay(number, total, machines, reached)


def replay_frames(
    spark: SparkSession,
    root: storage.Root,
    policy: str,
    *,
    address: str = "TRUE",
    from_ms: int | None = None,
    to_ms: int | None = None,
    horizon_s: float = 60.0,
) -> tuple[DataFrame, DataFrame]:
    """The events, and a row for each delivery: the event and the machine.

    An event and a report meet by the period of ``horizon_s`` in which they are, so Spark joins by equality;
    only the reports of those periods are read.
    """
    horizon_ms = int(horizon_s * 1000)
    events = spark_.read(spark, root, tables.ALERTS, from_ms=from_ms, to_ms=to_ms)
    events = events.selectExpr("*", "xxhash64(rule, about, state, changed_at, since) AS event_id")
    bounds = events.selectExpr(
        "min(unix_millis(changed_at)) AS first", "max(unix_millis(changed_at)) AS last"
    ).first()
    first, last = (0, 0) if bounds is None or bounds["first"] is None else (bounds["first"], bounds["last"])
    nodes = spark_.read(spark, root, tables.NODES, from_ms=first - horizon_ms, to_ms=last + 1)
    receiver = _receiver_model(nodes)
    accepts = _condition(
        policy, EVENT, {f"receiver.{name}": kind for name, kind in receiver.items()}, "event"
    )
    means = _condition(
        address, {}, {f"receiver.{name}": kind for name, kind in receiver.items()}, None, bare=True
    )
    state = ", ".join(f"`{name}`" for name in receiver)
    event = ", ".join(f"`{name}` AS `event {name}`" for name in EVENT)
    events.createOrReplaceTempView("past_events")
    nodes.createOrReplaceTempView("past_reports")
    deliveries = spark.sql(
        f"""
        WITH e AS (
            SELECT event_id, changed_at, {event}, explode(array(last_part, last_part - 1)) AS part
            FROM (SELECT *, unix_millis(changed_at) div {horizon_ms} AS last_part FROM past_events)
        ), n AS (
            SELECT reported_at, {state}, unix_millis(reported_at) div {horizon_ms} AS part FROM past_reports
        )
        SELECT event_id, machine FROM (
            SELECT e.event_id, {", ".join(f"e.`event {name}`" for name in EVENT)},
                   max_by(struct(n.*), n.reported_at) AS receiver, n.machine
            FROM e JOIN n ON e.part = n.part AND n.reported_at <= e.changed_at
              AND n.reported_at > e.changed_at - make_dt_interval(0, 0, 0, {horizon_s:f})
            GROUP BY ALL
        ) WHERE ({accepts}) AND ({means})
        """
    )
    return events, deliveries


class ContextDemand(msgspec.Struct, frozen=True):
    """The accesses to a key by zone, and the suggested zones for replicas."""

    key: str
    total: float
    by_zone: dict[str, float]
    place_in: list[str]


def demand(
    spark: SparkSession,
    root: storage.Root,
    *,
    prefix: str = "reads.",
    most: int = 3,
    from_ms: int | None = None,
    to_ms: int | None = None,
) -> list[ContextDemand]:
    """Accesses to each key by zone, and the fewest zones that cover most of them.

    From metrics of machines and services named ``reads.<key>`` (count in a period) or ``reads.<key>_s`` (rate
    per second, as for statsd counters).
    """
    spark_internals.activate(spark)
    frame = demand_frame(spark, root, prefix=prefix, from_ms=from_ms, to_ms=to_ms)
    rows = frame.orderBy("n", ascending=False).limit(DEMANDS_LISTED).collect()
    demands: dict[str, dict[str, float]] = {}
    for row in rows:
        demands.setdefault(row["name"].removeprefix(prefix), {})[row["zone"]] = float(row["n"])
    return sorted(
        (
            ContextDemand(key, sum(zones.values()), zones, replica_zones(zones, COVERED, most))
            for key, zones in demands.items()
        ),
        key=lambda item: (-item.total, item.key),
    )


def demand_frame(
    spark: SparkSession,
    root: storage.Root,
    *,
    prefix: str = "reads.",
    from_ms: int | None = None,
    to_ms: int | None = None,
) -> DataFrame:
    """A row for each metric and zone, with the number of accesses."""
    nodes = spark_.read(spark, root, tables.NODES, from_ms=from_ms, to_ms=to_ms)
    of_services = nodes.selectExpr("zone", "period_s", "explode(services) AS service")
    return (
        nodes.selectExpr("zone", "period_s", "explode(metrics) AS (name, value)")
        .unionAll(of_services.selectExpr("zone", "period_s", "explode(service.metrics) AS (name, value)"))
        .where(sql.write(parser.parse(f"name LIKE '{_quoted(prefix)}%' ESCAPE '!'"), {"name": _STRING}))
        .selectExpr(
            "zone",
            "regexp_replace(name, '_s$', '') AS name",
            "IF(endswith(name, '_s'), value * period_s, value) AS value",
        )
        .groupBy("name", "zone")
        .agg({"value": "sum"})
        .withColumnRenamed("sum(value)", "n")
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
        quote = sql.identifier
        name = key.removeprefix("receiver.")
        is_receiver = key.startswith("receiver.") or bare
        return f"receiver.{quote(name)}" if is_receiver else quote(f"event {name}")

    return sql.write(condition, model, column=column)
