"""The guide for Spark users: its examples run as they are shown, and its tables are those of the source."""

import asyncio
import csv
import inspect
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from muster.pipeline.source import reader, rows, spark_internals
from muster.testing.eventually import eventually
from tests.pipeline import test_history, traffic
from tests.pipeline.test_source_and_sink import guarded, store, trust  # noqa: F401 (fixtures)

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.may_leak("threads", "files", "processes", reason="Spark keeps its workers for later tests"),
]
ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "guides" / "pipeline-spark.md").read_text()
EXAMPLES = {name: ROOT / "examples" / f"spark_{name}.py" for name in ("stream", "batch")}
SHOWN = [*EXAMPLES.values(), ROOT / "examples" / "pipeline_step.py"]
MINUTE = 60_000


def run(example: str, *arguments: str) -> None:
    sys.argv = ["spark-submit", *arguments]
    runpy.run_path(str(EXAMPLES[example]), run_name="__main__")


@pytest.fixture
def arguments(monkeypatch):
    monkeypatch.setattr(sys, "argv", sys.argv)


@pytest.mark.parametrize("example", SHOWN, ids=lambda path: path.stem)
def test_the_guide_shows_the_examples(example):
    assert f"```text\n{example.read_text()}```" in GUIDE


def test_the_test_of_a_step_in_the_guide_runs(tmp_path, monkeypatch):
    assert test_history.store(tmp_path, 0, [traffic.report("a", 1, traffic.now_ms())])
    monkeypatch.chdir(ROOT)
    (block,) = re.findall(r"^```text\n(from deltalake.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    exec(compile(block, "pipeline-spark.md", "exec"), {"history": str(tmp_path)})


def test_the_guide_lists_every_option_and_column():
    table = GUIDE.partition("| option | means |")[2].partition("\n\n")[0]
    used = set(re.findall(r'(?:\boptions, |options\.get\()"(\w+)"', inspect.getsource(reader)))
    assert used - {"parts", "shards", "removals", "folder"} == {
        match[1] for match in re.finditer(r"^\| `(\w+)` ", table, re.MULTILINE)
    }
    for payload, columns in rows.SCHEMAS.items():
        listed = ", ".join(f"`{f.name} {f.dataType.simpleString()}`" for f in rows.spark_schema(columns))
        assert f"| `{payload}` | {listed} |" in GUIDE


async def test_the_streaming_job_writes_the_load_of_zones(guarded, spark, tmp_path, arguments):  # noqa: F811
    broker, creds = guarded
    at_ms = traffic.now_ms() // MINUTE * MINUTE - 10 * MINUTE
    loads = [("a", "z1", 10.0), ("b", "z1", 30.0), ("c", "z2", 50.0)]

    def body(minutes: int) -> bytes:
        return traffic.body(
            [
                traffic.report(
                    name, minutes, at_ms + minutes * MINUTE, zone=zone, metrics={"cpu_percent": cpu}
                )
                for name, zone, cpu in loads
            ]
        )

    # The last one ends the first minute.
    await store(broker.url, creds["c1"], *((traffic.SUBJECT, body(minutes)) for minutes in (0, 5)))
    spark_internals.activate(spark)
    folder = tmp_path / "load"
    job = asyncio.create_task(asyncio.to_thread(run, "stream", broker.url, creds["lab"], str(folder)))

    def written() -> list[Any]:
        if not (folder / "load" / "_spark_metadata").is_dir():
            return []
        load = spark.read.schema("zone string, cpu_percent double, highest double").parquet(f"{folder}/load")
        return sorted(tuple(row) for row in load.collect())

    async def stored() -> Any:
        if job.done():
            await job  # raises its error
        return await asyncio.to_thread(written)

    found = await eventually(stored, timeout_s=120)
    (query,) = spark.streams.active
    await asyncio.to_thread(query.stop)
    await job
    assert found == [("z1", 20.0, 30.0), ("z2", 50.0, 50.0)]


def test_the_batch_job_writes_the_growth_of_disks(spark, tmp_path, arguments):
    at_ms = traffic.now_ms()
    for batch, ago_h in enumerate((30, 1)):
        full = [("a", 20.0 + 40 * batch), ("b", 20.0 + 10 * batch)]
        sent = [
            traffic.report(name, batch, at_ms - ago_h * test_history.HOUR, metrics={"disk_percent": percent})
            for name, percent in full
        ]
        assert test_history.store(tmp_path / "history", batch, sent)
    run("batch", str(tmp_path / "history"), str(tmp_path / "growth"))
    (written,) = (tmp_path / "growth").glob("*.csv")
    with written.open() as file:
        assert list(csv.reader(file)) == [["machine", "points"], ["a", "40.0"], ["b", "10.0"]]
