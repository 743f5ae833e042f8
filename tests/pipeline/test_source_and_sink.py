"""Streams of the bus as Spark's source, and topics as its sink, with a real broker and a real Spark."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pyspark import errors

from muster import connection
from muster.bus import api
from muster.pipeline.source import spark_internals
from muster.testing.eventually import eventually
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.pipeline import traffic
from tests.trust import servers

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]
TICK = "muster.monitor.from.c1.batch.root.tick"


IDENTITIES = {"c1": roles.Role.CHANNEL, "lab": roles.Role.READER, "shop": roles.Role.USER}


@pytest.fixture
def trust(tmp_path: Path) -> keyring.Keyring:
    made = keyring.Keyring.create(tmp_path / "keys", "north")
    for identity, role in IDENTITIES.items():
        made.issue(identity, role)
        (tmp_path / f"{identity}.creds").write_text(made.credentials(identity).render())
    return made


@pytest.fixture
async def guarded(
    trust: keyring.Keyring, tmp_path: Path
) -> AsyncIterator[tuple[servers.SignedServer, dict[str, str]]]:
    """A broker with permissions; credentials files by identity."""
    async with servers.server(tmp_path, trust) as running:
        reading = asyncio.create_task(running.line("no such line"))
        yield running, {identity: str(tmp_path / f"{identity}.creds") for identity in IDENTITIES}
        reading.cancel()
        await asyncio.wait([reading])


async def store(url: str, creds: str, *bodies: tuple[str, bytes]) -> None:
    async with await connection.connect([url], creds=creds) as bus:
        stream = await bus.stream(traffic.STREAM)
        for subject, body in bodies:
            await stream.publish(subject, body)


def body_of(*machines: str, sequence: int = 1) -> tuple[str, bytes]:
    return traffic.SUBJECT, traffic.body(
        [traffic.report(name, sequence, 1000, metrics={"queue": 2.0}) for name in machines]
    )


def run(spark: Any, source: Any, checkpoint: Path) -> list[Any]:
    spark_internals.activate(spark)
    found: list[Any] = []
    query = (
        source.load()
        .writeStream.foreachBatch(lambda batch, _: found.extend(batch.collect()))
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return found


async def test_a_reader_reads_reports_once_and_continues_at_its_checkpoint(guarded, spark, tmp_path):
    broker, creds = guarded
    source = (
        spark.readStream.format("muster")
        .option("servers", broker.url)
        .option("credentials", creds["lab"])
        .option("maxMessages", 2)
    )
    await store(broker.url, creds["c1"], body_of("a", "b"), (TICK, b""), (traffic.SUBJECT, b"rubbish"))
    first = await asyncio.to_thread(run, spark, source, tmp_path / "c")
    assert sorted((row["machine"], row["metrics"]["queue"]) for row in first) == [("a", 2.0), ("b", 2.0)]
    await store(broker.url, creds["c1"], body_of("c", sequence=2))
    second = await asyncio.to_thread(run, spark, source, tmp_path / "c")
    assert [row["machine"] for row in second] == ["c"]


async def test_a_batch_job_reads_metrics_and_counts_what_is_unreadable(guarded, spark):
    broker, creds = guarded
    await store(broker.url, creds["c1"], body_of("a", "b"), (traffic.SUBJECT, b"rubbish"), (TICK, b""))

    def read(payload: str) -> Any:
        return (
            spark.read.format("muster")
            .options(servers=broker.url, credentials=creds["lab"], payload=payload)
            .load()
        )

    def both() -> tuple[list[Any], list[Any]]:
        spark_internals.activate(spark)
        means = read("metrics").where("metric = 'queue'").groupBy("metric").avg("value").collect()
        return means, read("unreadable").groupBy("reason").count().collect()

    means, unreadable = await asyncio.to_thread(both)
    assert [tuple(row) for row in means] == [("queue", 2.0)]
    assert [tuple(row) for row in unreadable] == [("malformed", 1)]


async def test_rows_are_published_to_topics(guarded, spark, tmp_path):
    broker, creds = guarded
    await store(broker.url, creds["c1"], body_of("a", "b"))
    source = spark.readStream.format("muster").options(servers=broker.url, credentials=creds["lab"])

    def publish(identity: str) -> str:
        spark_internals.activate(spark)
        rows = source.load().selectExpr(
            "concat('busy/', machine) AS topic",
            "to_json(struct(machine, period_s)) AS data",
            "concat(machine, ':', sequence) AS message_id",
        )
        query = (
            rows.writeStream.format("muster")
            .options(servers=broker.url, credentials=creds[identity])
            .option("checkpointLocation", str(tmp_path / identity))
            .trigger(availableNow=True)
            .start()
        )
        try:
            query.awaitTermination()
        except errors.StreamingQueryException as error:
            return str(error)
        return ""

    received: list[api.Message] = []
    async with await connection.connect([broker.url], creds=creds["shop"]) as bus:
        await bus.subscribe("topic.busy.*", handler=received.append)
        assert await asyncio.to_thread(publish, "shop") == ""
        await eventually(lambda: len(received) == 2)
        assert sorted((m.subject, m.data, m.header("Nats-Msg-Id")) for m in received) == [
            ("topic.busy.a", b'{"machine":"a","period_s":10.0}', "a:1"),
            ("topic.busy.b", b'{"machine":"b","period_s":10.0}', "b:1"),
        ]
        assert "lab may not publish" in await asyncio.to_thread(publish, "lab")
        assert len(received) == 2


async def test_an_unknown_payload_is_refused_by_name(broker, spark):
    with pytest.raises(Exception, match="takes reports or metrics or messages"):
        spark.read.format("muster").options(servers=broker.url, payload="arrow").load().collect()
