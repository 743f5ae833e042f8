"""Replay of stored notifications under another policy, with Spark.

Notifiers store every change of a receiver's state and every event they decided about, in one stream whose
schema is in docs/reference/notify.md.  The changes become rows: a state of a receiver and the period in which
it was valid.  An event is joined with the states that were valid when it was decided.  Its address and the
new policy are SQL that Spark runs (`muster.predicates.backends.sql`), so they have the same meaning as in a
notifier.

Limits: a receiver whose join is no longer in the stream is included only from its next join on.  Grants to
receivers are not stored, so they are not replayed; the attributes granted to senders are stored with the
event.

Values are stored as text with a prefix letter for their type, so that one column can hold all types.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from muster.core import errors
from muster.pipeline import spark as spark_
from muster.pipeline.source import spark_internals
from muster.predicates import ast, types
from muster.predicates.backends import sql
from muster.predicates.syntax import parser

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGE, DECISION = "notify-applied/1", "notify-decided/1"
LISTENS = "(policy)"  # pseudo-attribute: whether the receiver has a policy
REGION = "region"  # the attribute that a grant's regional scope refers to
ADDRESSES_AT_ONCE = 100
ADDRESSES_MAX = 2_000
LISTED_MAX = 10_000

_VALUES = pa.map_(pa.string(), pa.string())
_CHANGES = pa.schema(
    [
        ("at_ms", pa.int64()),
        ("sequence", pa.int64()),
        ("place", pa.int32()),  # in the message
        ("receiver", pa.string()),
        ("what", pa.string()),  # join, update or leave
        ("model", pa.string()),
        ("reported", _VALUES),
    ]
)
_EVENTS = pa.schema(
    [
        ("at_ms", pa.int64()),
        ("sequence", pa.int64()),
        ("id", pa.string()),
        ("sender", pa.string()),
        ("type", pa.string()),
        ("address", pa.string()),
        ("content", _VALUES),
        ("attributes", _VALUES),
        (
            "within",
            pa.list_(
                pa.struct(
                    [("attributes", _VALUES), ("region", pa.string()), ("audience", pa.list_(pa.string()))]
                )
            ),
        ),
        ("reached", pa.int64()),
    ]
)


@dataclass(frozen=True, slots=True)
class ReplayModels:
    """The models of receivers and events, by name."""

    receivers: Mapping[str, types.Model]
    events: Mapping[str, types.Model]


class ReplayedNotification(msgspec.Struct, frozen=True):
    """A stored event: how many receivers it reached, and how many it would have reached."""

    at_ms: int
    type: str
    sender: str
    id: str
    reached: int
    would_reach: int


class PolicyReplay(msgspec.Struct, frozen=True):
    events: int
    reached: int  # actual deliveries
    deliveries: int  # deliveries under the replayed policy
    receivers: int  # distinct receivers
    notifications: list[ReplayedNotification]  # the newest, limited


def replay(
    spark: SparkSession,
    access: Mapping[str, str],
    stream: str,
    models: ReplayModels,
    policy: str,
    *,
    address: str | None = None,
    from_ms: int | None = None,
    to_ms: int | None = None,
) -> PolicyReplay:
    """Replay with this policy for every receiver that had one. ``address`` replaces the senders' addresses.

    ``access``: the connection options of `source.reader`.  The caller has checked the policy against the
    models.
    """
    spark_internals.activate(spark)
    raw = (
        spark.read.format("muster")
        .options(**access, payload="messages", streams=stream, onLoss="skip")
        .load()
        .cache()
    )
    try:
        events = _events(spark, raw, from_ms, to_ms)
        return _meet(spark, raw, events, models, policy, address)
    finally:
        raw.unpersist()


def _events(spark: SparkSession, raw: DataFrame, from_ms: int | None, to_ms: int | None) -> DataFrame:
    """Each event once, although several notifiers decided about their own receivers."""
    _decoded(raw, _decisions, _EVENTS).createOrReplaceTempView("past_decisions")
    bounds = [f"at_ms >= {from_ms}"] if from_ms is not None else []
    bounds += [f"at_ms < {to_ms}"] if to_ms is not None else []
    kept = ("type", "address", "content", "attributes", "within")
    return spark.sql(
        f"""
        SELECT sender, id, min(struct(at_ms, sequence, 0 AS place)) AS at, sum(reached) AS reached,
               {", ".join(f"first({name}) AS {name}" for name in kept)}
        FROM past_decisions WHERE {" AND ".join(bounds) or "TRUE"} GROUP BY sender, id
        """
    )


def _meet(
    spark: SparkSession,
    raw: DataFrame,
    events: DataFrame,
    models: ReplayModels,
    policy: str,
    address: str | None,
) -> PolicyReplay:
    from pyspark.sql import functions

    if address is not None:
        events = events.withColumn("address", functions.lit(address))
    events = events.cache()
    try:
        events.createOrReplaceTempView("past_events")
        addressed = {text: parser.parse(text, home="receiver") for text in _addresses(spark)}
        attributes = {name.key for condition in addressed.values() for name in ast.names(condition)}
        attributes |= {LISTENS, REGION}
        _decoded(raw, _changes, _CHANGES).createOrReplaceTempView("past_changes")
        spark.sql(_versions(sorted(attributes))).createOrReplaceTempView("past_states")
        accepts = _accepts(policy, models)
        parts = [
            spark.sql(
                f"""
                SELECT e.sender, e.id, v.receiver FROM (
                    SELECT struct(e.*) AS e, struct(v.*) AS v, {_EFFECTIVE} AS effective
                    FROM past_events e JOIN past_states v
                      ON v.began <= e.at AND (v.ended IS NULL OR e.at < v.ended)
                ) WHERE ({_means(conditions, models)}) AND ({accepts})
                """
            )
            for conditions in _in_parts(addressed)
        ]
        deliveries = _union(spark, parts).cache()
        try:
            deliveries.createOrReplaceTempView("past_deliveries")
            (total,) = spark.sql(
                """
                SELECT (SELECT count(*) FROM past_events) AS events,
                       (SELECT sum(reached) FROM past_events) AS reached,
                       count(*) AS deliveries, count(DISTINCT receiver) AS receivers
                FROM past_deliveries
                """
            ).collect()
            newest = spark.sql(
                f"""
                WITH newest AS (
                    SELECT at, type, sender, id, reached FROM past_events ORDER BY at DESC LIMIT {LISTED_MAX}
                ), counts AS (
                    SELECT sender, id, count(*) AS n FROM past_deliveries GROUP BY sender, id
                )
                SELECT at.at_ms AS at_ms, type, sender, id, reached, coalesce(n, 0) AS would_reach
                FROM newest LEFT JOIN counts USING (sender, id) ORDER BY at
                """
            )
            listed = spark_.collect(newest, ReplayedNotification)
        finally:
            deliveries.unpersist()
    finally:
        events.unpersist()
    return PolicyReplay(
        total["events"],
        total["reached"] or 0,
        total["deliveries"],
        total["receivers"],
        listed,
    )


def _addresses(spark: SparkSession) -> list[str]:
    """The different addresses of the events. Each becomes a condition, so their number is limited."""
    rows = spark.sql(f"SELECT DISTINCT address FROM past_events LIMIT {ADDRESSES_MAX + 1}").collect()
    if len(rows) > ADDRESSES_MAX:
        raise errors.LimitExceeded(
            f"the events have over {ADDRESSES_MAX:,} different addresses",
            hint="replay a shorter period, or give one address for all",
        )
    return [row["address"] for row in rows]


def _union(spark: SparkSession, parts: Sequence[DataFrame]) -> DataFrame:
    if not parts:
        return spark.createDataFrame([], "sender string, id string, receiver string")
    return functools.reduce(lambda first, second: first.unionAll(second), parts)


def _in_parts(addressed: dict[str, ast.Condition]) -> Iterator[dict[str, ast.Condition]]:
    """One statement with all conditions could be too long."""
    left = iter(addressed.items())
    while chunk := dict(itertools.islice(left, ADDRESSES_AT_ONCE)):
        yield chunk


# Conditions


def _versions(attributes: Sequence[str]) -> str:
    """The states of each receiver: the last value of each attribute, between two changes."""
    quote, word = sql.identifier, sql.string
    last = ", ".join(
        f"last(IF(what = 'join' OR map_contains_key(reported, {word(name)}), "
        f"named_struct('v', try_element_at(reported, {word(name)})), NULL), true) OVER held AS {quote(name)}"
        for name in attributes
    )
    current = ", ".join(f"{quote(name)}.v AS {quote(name)}" for name in attributes)
    return f"""
        SELECT receiver, model, began, ended, {current}
        FROM (
            SELECT receiver, began, last(model, true) OVER held AS model, {last},
                   lead(began) OVER (PARTITION BY receiver ORDER BY began) AS ended
            FROM (
                SELECT *, sum(IF(what = 'update', 0, 1)) OVER (PARTITION BY receiver ORDER BY began) AS life
                FROM (SELECT *, struct(at_ms, sequence, place) AS began FROM past_changes)
            )
            WINDOW held AS (PARTITION BY receiver, life ORDER BY began)
        )
        WHERE model IS NOT NULL AND {quote(LISTENS)}.v = 'b:true'
    """


def _means(addressed: Mapping[str, ast.Condition], models: ReplayModels) -> str:
    word = sql.string
    whens = []
    for text, condition in addressed.items():
        by_model = " ".join(
            f"WHEN {word(name)} THEN {_address(condition, model)}" for name, model in models.receivers.items()
        )
        whens.append(f"WHEN {word(text)} THEN CASE v.model {by_model} ELSE FALSE END")
    return f"CASE e.address {' '.join(whens)} ELSE FALSE END"


def _address(condition: ast.Condition, model: types.Model) -> str:
    quote = sql.identifier
    return sql.write(condition, model, column=lambda key: _typed(f"v.{quote(key)}", model[key]))


def _accepts(policy: str, models: ReplayModels) -> str:
    """The policy as SQL, by the model of each event type; types without a model use all attributes."""
    condition = parser.parse(policy, home="event")
    word = sql.string
    senders = dict(_IDENTITY)
    for receiver in models.receivers.values():
        for name, declared in receiver.items():
            senders.setdefault(f"sender.{name}", declared)
    anything: dict[str, types.AttributeType] = {}
    for event in models.events.values():
        for name, declared in event.items():
            anything.setdefault(name, declared)

    def written(kind: str | None, content: types.Model) -> str:
        model = {**content, **senders} | ({kind: types.BOOL} if kind else {})

        def column(key: str) -> str:
            if key == kind:
                return "TRUE"
            name = key.removeprefix("sender.")
            proved = "e.attributes" if key in _IDENTITY else "effective"  # a grant does not replace it
            place = "e.content" if name == key else proved
            return _typed(f"try_element_at({place}, {word(name)})", model[key])

        return sql.write(condition, model, column=column)

    whens = " ".join(
        f"WHEN {word(kind)} THEN {written(kind, content)}" for kind, content in models.events.items()
    )
    others = written(None, anything)
    return f"CASE e.type {whens} ELSE {others} END" if whens else others


#: The sender's effective attributes for a receiver: a grant may be limited to a region or an audience.
_IDENTITY: Mapping[str, types.AttributeType] = {
    "sender._process": types.STRING,
    "sender._id": types.STRING,
}
_EFFECTIVE = f"""aggregate(e.within, e.attributes, (known, w) -> IF(
    (w.region = '' OR substr(v.`{REGION}`, 3) = w.region
        OR startswith(v.`{REGION}`, concat('s:', w.region, '/'))
        OR startswith(v.`{REGION}`, concat('s:', w.region, '.')))
    AND (size(w.audience) = 0 OR array_contains(w.audience, v.receiver)
        OR array_contains(w.audience, split_part(v.receiver, '/', 1))),
    map_concat(map_filter(known, (k, x) -> NOT map_contains_key(w.attributes, k)), w.attributes),
    known))"""


def _typed(text: str, declared: types.AttributeType) -> str:
    """The value of a prefixed text, if it has the type."""
    match declared.kind:
        case types.ValueKind.STRING:
            return f"IF(left({text}, 1) = 's', substr({text}, 3), NULL)"
        case types.ValueKind.INT:
            return f"try_cast(IF(left({text}, 1) = 'i', substr({text}, 3), NULL) AS BIGINT)"
        case types.ValueKind.FLOAT:
            return f"try_cast(IF(left({text}, 1) IN ('i', 'f'), substr({text}, 3), NULL) AS DOUBLE)"
        case types.ValueKind.BOOL:
            return f"try_cast(IF(left({text}, 1) = 'b', substr({text}, 3), NULL) AS BOOLEAN)"
        case types.ValueKind.SET:
            return f"from_json(IF(left({text}, 1) = 'w', substr({text}, 3), NULL), 'array<string>')"


# From messages to rows: in Spark's Python workers


def _decoded(raw: DataFrame, decode: Callable[..., Iterator[pa.RecordBatch]], schema: pa.Schema) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    return raw.mapInArrow(decode, from_arrow_schema(schema))


def _changes(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        changes = _messages(batch, CHANGE)
        yield _rows((row for sequence, change in changes for row in _change_rows(sequence, change)), _CHANGES)


def _decisions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield _rows(
            (_event_row(sequence, decision) for sequence, decision in _messages(batch, DECISION)), _EVENTS
        )


def _rows(rows: Iterable[Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _messages(batch: pa.RecordBatch, kind: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Unreadable messages are skipped: only notifiers write this stream, without guarantees."""
    for sequence, data in zip(
        batch.column("sequence").to_pylist(), batch.column("data").to_pylist(), strict=True
    ):
        try:
            content = msgspec.json.decode(data) if data[:1] == b"{" else msgspec.msgpack.decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
        if isinstance(content, dict) and content.get("kind") == kind:
            yield sequence, content


def _change_rows(sequence: int, log: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    places = itertools.count()
    for entry in log.get("entries", ()):
        process = entry["process"]
        for change in entry["changes"]:
            for receiver, what, model, values in _changed(change):
                yield log["at_ms"], sequence, next(places), f"{process}/{receiver}", what, model, values


def _changed(change: dict[str, Any]) -> Iterator[tuple[str, str, str | None, list[tuple[str, str | None]]]]:
    match change["change"]:
        case "join":
            values = {**change.get("state", {}), LISTENS: bool(change.get("policy"))}
            yield change["receiver"], "join", change["model"], _texts(values)
        case "joins":
            policies, which = change.get("policies", [""]), change.get("which")
            for place, (receiver, values) in enumerate(_by_receiver(change)):
                values[LISTENS] = bool(policies[which[place] if which else 0])
                yield receiver, "join", change["model"], _texts(values)
        case "update":
            for receiver, values in _by_receiver(change):
                yield receiver, "update", None, _texts(values)
        case "policy":
            yield change["receiver"], "update", None, _texts({LISTENS: bool(change["policy"])})
        case "leave":
            yield change["receiver"], "leave", None, []


def _by_receiver(change: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Values are stored in columns."""
    values = change.get("values", {})
    for place, receiver in enumerate(change["receivers"]):
        yield receiver, {name: column[place] for name, column in values.items()}


def _event_row(sequence: int, decision: dict[str, Any]) -> tuple[Any, ...]:
    event = decision["event"]
    within = [
        {
            "attributes": _texts(grant["attributes"]),
            "region": grant.get("region", ""),
            "audience": list(grant.get("audience", ())),
        }
        for grant in event.get("within", ())
    ]
    return (
        decision["at_ms"],
        sequence,
        event["id"],
        event["sender"],
        event["type"],
        event.get("address", "TRUE"),
        _texts(event.get("content", {})),
        _texts(event.get("attributes", {})),
        within,
        decision.get("count", 0),
    )


def _texts(values: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    return [(name, _text(value)) for name, value in values.items()]


def _text(value: Any) -> str | None:
    match value:
        case None:
            return None
        case bool():
            return f"b:{'true' if value else 'false'}"
        case str():
            return f"s:{value}"
        case int():
            return f"i:{value}"
        case float():
            return f"f:{value!r}"
        case list() | tuple():
            return f"w:{json.dumps(value)}"
    raise errors.InvalidInput(f"unsupported type of value: {value!r:.80}")
