"""Streams of the bus as Spark's source and sink, with a real broker and a real Spark."""

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from muster.bus import api
from muster.bus.client import client
from muster.pipeline.source import session
from tests.pipeline import traffic

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]

SCHEMA = "machine string, load double, stream_sequence bigint, fault string, extra map<string, double>"


def arrow(machines: list[str], **columns: list[object]) -> bytes:
    batch = pa.RecordBatch.from_pydict({"machine": machines, **columns})
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(out.getvalue())


async def stream_of(url: str, name: str, bodies: list[bytes]) -> None:
    async with await client.connect([url], identity="test") as bus:
        stream = await bus.stream(api.StreamSettings(name, (f"{name}.>",)))
        if bodies:
            await stream.publish_batch([api.OutgoingMessage(f"{name}.x", body) for body in bodies])


def rows_of(spark, url: str, checkpoint: Path, **options: str) -> list[Any]:
    rows: list[Any] = []
    frame = (
        spark.readStream.format("muster")
        .schema(SCHEMA)
        .options(servers=url, payload="arrow", **options)
        .load()
    )
    query = (
        frame.writeStream.foreachBatch(lambda batch, _: rows.extend(tuple(row) for row in batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return rows


async def test_rows_have_exactly_the_requested_schema_and_invalid_messages_are_marked_rows(
    broker, spark, tmp_path
):
    bodies = [
        arrow(["a", "b"], load=[0.5, 1.5]),
        b"rubbish",
        arrow(["c"], load=[2], colour=["new column"]),
        arrow(["d"]),
        arrow(["e"], load=["not a number"]),
        arrow(["f"], load=[1.0])[:40],
        traffic.body([traffic.report("g", 1, 1, metrics={"queue": 2.0})]),
    ]
    await stream_of(broker.url, "reports", bodies)
    rows = await asyncio.to_thread(
        rows_of, spark, broker.url, tmp_path / "c", streams="reports", maxMessages="2"
    )
    good = [row for row in rows if row[3] is None]
    assert sorted(good) == [
        ("a", 0.5, 1, None, None),
        ("b", 1.5, 1, None, None),
        ("c", 2.0, 3, None, None),
        ("d", None, 4, None, None),
        ("g", None, 7, None, {"queue": 2.0}),
    ]
    assert len(rows) == len(good) + 3
    assert sorted(row[2] for row in rows if row[3]) == [2, 5, 6]


async def test_a_restarted_query_reads_on_where_its_checkpoint_stands(broker, spark, tmp_path):
    await stream_of(broker.url, "r", [arrow(["a"], load=[1.0])])
    first = await asyncio.to_thread(rows_of, spark, broker.url, tmp_path / "c", streams="r")
    await stream_of(broker.url, "r", [arrow(["b"], load=[1.0])])
    second = await asyncio.to_thread(rows_of, spark, broker.url, tmp_path / "c", streams="r")
    assert [row[0] for row in first] == ["a"]
    assert [row[0] for row in second] == ["b"]


async def test_the_sink_stores_a_repeated_row_once(broker, spark, tmp_path):
    await stream_of(broker.url, "in", [arrow(["a", "b"], load=[1.0, 2.0])])
    await stream_of(broker.url, "out", [])

    def run(checkpoint: Path) -> None:
        session.activate(spark)
        frame = (
            spark.readStream.format("muster")
            .schema(SCHEMA)
            .options(servers=broker.url, payload="arrow", streams="in")
            .load()
        )
        query = (
            frame.selectExpr(
                "concat('out.', machine) as subject", "cast(load as string) as data", "machine as message_id"
            )
            .selectExpr("subject", "cast(data as binary) as data", "message_id")
            .writeStream.format("muster")
            .options(servers=broker.url, stream="out", checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    await asyncio.to_thread(run, tmp_path / "first")
    await asyncio.to_thread(run, tmp_path / "a checkpoint that was lost")
    async with await client.connect([broker.url], identity="test") as bus:
        stream = await bus.open_stream("out")
        stored = [message async for message in stream.read(1)]
    assert sorted((message.subject, message.data) for message in stored) == [
        ("out.a", b"1.0"),
        ("out.b", b"2.0"),
    ]
