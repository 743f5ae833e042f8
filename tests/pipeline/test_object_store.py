"""The whole pipeline with history and checkpoint in an S3-compatible store: killed, and nothing is lost."""

import asyncio
from pathlib import Path

import pytest

from muster.bus.client import client
from muster.pipeline import client as pipeline_client
from muster.pipeline.history import delta, sql, tables
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.pipeline import driver_process, jars, test_storage, traffic

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.may_leak("threads", "files", reason="delta-rs keeps connections"),
]

HISTORY = "s3a://fleet/history"
MACHINES = 20


def spark_conf(folder: Path, endpoint: str, connector: list[Path]) -> dict[str, str]:
    """What an operator writes to use S3: the connector's jars and its endpoint."""
    folder.mkdir()
    (folder / "spark-defaults.conf").write_text(
        f"spark.jars {','.join(map(str, connector))}\n"
        f"spark.hadoop.fs.s3a.endpoint {endpoint}\n"
        "spark.hadoop.fs.s3a.path.style.access true\n"
        "spark.hadoop.fs.s3a.connection.ssl.enabled false\n"
        # The uploads of its other, asynchronous client end in errors with the server of this test.
        "spark.hadoop.fs.s3a.optimized.copy.from.local.enabled false\n"
    )
    return {"SPARK_CONF_DIR": str(folder), "PYTHONPATH": str(driver.SOURCE)}


def stored() -> list[tuple[str, int]]:
    if not delta.exists(HISTORY, tables.NODES):
        return []
    rows = sql.rows(sql.query(HISTORY, "SELECT machine, sequence FROM nodes").table)
    return [(row["machine"], row["sequence"]) for row in rows]


async def report(url: str, sequence: int) -> None:
    at_ms = traffic.now_ms()
    rows = [traffic.report(f"m{n}", sequence, at_ms, group=f"g{n % 3}") for n in range(MACHINES)]
    await traffic.store(url, traffic.body(rows))


async def test_the_pipeline_runs_on_s3_and_loses_nothing_when_it_is_killed(broker, tmp_path, monkeypatch):
    connector = await jars.fetch("s3a", tmp_path)
    async with test_storage.object_store(monkeypatch) as endpoint:
        env = await asyncio.to_thread(spark_conf, tmp_path / "conf", endpoint, connector)
        command = driver_process.command(
            tmp_path,
            broker.url,
            trigger_s=1.0,
            window_s=2.0,
            delay_s=2.0,
            operators="*",
            history_dir=HISTORY,
            checkpoint_dir="s3a://fleet/checkpoint",
        )
        await report(broker.url, 1)
        async with await child_process.start(*command, env=env) as child:
            await eventually(lambda: _stored(MACHINES), timeout_s=300)
            await report(broker.url, 2)
            await child.kill()
        async with (
            await child_process.start(*command, env=env) as child,
            await client.connect([broker.url], identity="ann") as bus,
        ):
            await eventually(lambda: _stored(2 * MACHINES), timeout_s=300)
            await report(broker.url, 3)
            await eventually(lambda: _stored(3 * MACHINES), timeout_s=300)
            await pipeline_client.PipelineClient(bus).stop()
            assert await child.wait(timeout_s=120) == 0, child.tail()
        rows = await asyncio.to_thread(stored)
        assert len(rows) == len(set(rows)) == 3 * MACHINES
        assert not (tmp_path / "s3a:").exists()
        listed = await asyncio.to_thread(test_storage.keys, endpoint)
        assert any("checkpoint" in key and "/offsets/" in key for key in listed), listed[:20]
        # The same store, read by Spark's own connector.
        count = "SELECT count(*) AS n FROM nodes"
        home = tmp_path / "home"
        home.mkdir()
        (home / "muster.toml").write_text('[pipeline]\nmaster = "local[2]"\n')
        words = driver.command_line("sql", "--spark", count, "--dir", HISTORY, "-o", "json")
        async with await child_process.start(*words, env={**driver.environment(home), **env}) as child:
            assert await child.wait(timeout_s=200) == 0, child.tail()
            assert any('"n": 60' in line for line in child.lines), child.tail()


async def _stored(count: int) -> bool:
    return len(await asyncio.to_thread(stored)) >= count
