"""Stored messages as rows of Spark, for every payload and every form of a report."""

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import DoubleType, LongType, StringType, StructField, StructType

from muster.bus import api
from muster.core import errors, health, messages
from muster.core.reports import columns
from muster.pipeline.source import rows, writer
from tests.pipeline import traffic

TICK = "muster.monitor.from.pipeline.batch.root.tick"
SHOP = messages.ServiceReport(
    name="shop", state=health.HealthState.LATE, reason="slow", metrics={"queue": 3.0}
)
REPORTS = [
    traffic.report("a", 7, 1000, boot=2, metrics={"queue": 2.0, "load_1m": 0.5}, services=(SHOP,)),
    traffic.report("b", 8, 2000, group="g", zone="z"),
    traffic.report("c", 9, 3000, metrics={"z.x": 1.0}, services=(messages.ServiceReport(name="db"), SHOP)),
]


def stored(data: bytes, sequence: int = 1, subject: str = traffic.SUBJECT) -> api.StoredMessage:
    return api.StoredMessage(subject, data, {"h": "1"}, sequence, sequence * 1_000_000_000)


def decoded(
    payload: str, *stored_: api.StoredMessage, schema: StructType | None = None
) -> list[dict[str, Any]]:
    decoder = rows.RowDecoder(payload, schema or rows.spark_schema(rows.SCHEMAS[payload]))
    return [row for batch in decoder.decode(stored_) for row in batch.to_pylist()]


def plain(reports: list[messages.NodeReport]) -> bytes:
    """Names of metrics as they are, instead of codes; compressed; with a column of a later version."""
    batch = columns.to_batch(reports)
    names = pa.map_(pa.string(), pa.float64())
    place = batch.schema.get_field_index("extra")
    batch = batch.set_column(place, "extra", batch.column(place).cast(names))
    batch = batch.append_column("colour", pa.array(["red"] * len(reports)))
    return columns.encode(batch, columns.BatchInfo(channel="c1"), compression="zstd")


@pytest.mark.parametrize("encode", [traffic.body, plain])
def test_a_row_is_a_report_with_all_of_its_metrics_and_services(encode):
    first, second, third = decoded("reports", stored(encode(REPORTS), 5))
    assert {name: first[name] for name in ("machine", "group", "boot", "sequence", "period_s", "state")} == {
        "machine": "a",
        "group": "default",
        "boot": 2,
        "sequence": 7,
        "period_s": 10.0,
        "state": "late",
    }
    assert first["reported_at"].timestamp() == 1
    assert first["stored_at"].timestamp() == 5
    assert first["stream_sequence"] == 5
    standard = {"cpu_percent": 10.0, "memory_percent": 20.0}
    assert dict(first["metrics"]) == {**standard, "queue": 2.0, "load_1m": 0.5}
    assert first["services"] == [
        {"name": "shop", "state": "late", "reason": "slow", "metrics": [("queue", 3.0)]}
    ]
    assert (second["group"], second["zone"], second["services"]) == ("g", "z", None)
    assert dict(second["metrics"]) == standard
    assert dict(third["metrics"]) == {**standard, "z.x": 1.0}
    assert [service["name"] for service in third["services"]] == ["db", "shop"]


@pytest.mark.parametrize("encode", [traffic.body, plain])
def test_a_row_is_a_metric_of_a_machine_or_a_service(encode):
    found = decoded("metrics", stored(encode(REPORTS), 5))
    expected = {
        (report.machine, service, name): value
        for report in REPORTS
        for service, metrics in [(None, report.metrics), *((s.name, s.metrics) for s in report.services)]
        for name, value in metrics.items()
    }
    assert {(row["machine"], row["service"], row["metric"]): row["value"] for row in found} == expected
    assert len(found) == len(expected)
    assert {row["reported_at"].timestamp() for row in found if row["machine"] == "b"} == {2}


def test_the_pipelines_own_messages_and_copies_are_no_rows():
    own = [
        stored(b"", 1, TICK),
        stored(b"{}", 2, TICK.replace("tick", "removal")),
        api.StoredMessage(traffic.SUBJECT, traffic.body(REPORTS), {}, 3, 1, is_copy=True),
    ]
    for payload in rows.SCHEMAS:
        assert decoded(payload, *own) == []
    assert [row["sequence"] for row in decoded("messages", *own, stored(b"x", 4))] == [4]


def test_an_unreadable_message_is_skipped_and_can_be_counted():
    received = [stored(b"rubbish", 1), stored(traffic.body(REPORTS), 2), stored(b"", 3)]
    for payload in ("reports", "metrics"):
        assert {row["stream_sequence"] for row in decoded(payload, *received)} == {2}
    unreadable = decoded("unreadable", *received)
    assert [(row["stream_sequence"], row["reason"]) for row in unreadable] == [
        (1, "malformed"),
        (3, "malformed"),
    ]
    assert unreadable[0]["subject"] == traffic.SUBJECT
    assert "not an Arrow stream" in unreadable[0]["detail"]


def test_a_schema_selects_columns():
    chosen = StructType([StructField("cpu_percent", DoubleType()), StructField("machine", StringType())])
    assert decoded("reports", stored(traffic.body(REPORTS[:1])), schema=chosen) == [
        {"cpu_percent": 10.0, "machine": "a"}
    ]
    for field, message in (
        (StructField("colour", StringType()), "colour.*expected one of machine"),
        (StructField("machine", LongType()), "machine int64: expected string"),
    ):
        with pytest.raises(errors.InvalidInput, match=message):
            rows.RowDecoder("reports", StructType([field]))


def test_a_row_without_a_topic_is_not_published():
    with pytest.raises(errors.InvalidInput, match="no topic"):
        writer._outgoing({"topic": None, "data": "x"})
