"""The same job on a standalone cluster: a master and two workers, each a process of its own."""

import asyncio
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

import muster
from muster.bus.client import client
from muster.pipeline import client as pipeline_client
from muster.pipeline import settings
from muster.pipeline.job import main
from muster.pipeline.source import java_runtime
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.pipeline import test_history, traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SOURCE = str(Path(muster.__file__).parents[1])


async def part(name: str, *arguments: str, env: dict[str, str]) -> child_process.ChildProcess:
    """The wheel has no start scripts: its launcher runs the classes."""
    import pyspark

    launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
    return await child_process.start(
        launcher, f"org.apache.spark.deploy.{name}", *arguments, env=env, name=name
    )


async def test_the_job_runs_on_a_standalone_cluster_and_outlives_a_worker(broker, tmp_path):
    matches = await asyncio.to_thread(java_runtime.find, tmp_path)
    env = {
        "JAVA_HOME": str(matches.home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "scratch"),
        "PYTHONPATH": SOURCE,
    }
    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    async with await part("master.Master", *here, env=env) as master:
        url = (await master.line(r"Starting Spark master at (spark://\S+)", timeout_s=120))[1]
        workers = [
            await part(
                "worker.Worker",
                *here,
                "--cores",
                "1",
                "--memory",
                "1g",
                "--work-dir",
                str(tmp_path / f"w{n}"),
                url,
                env=env,
            )
            for n in range(2)
        ]
        try:
            for worker in workers:
                await worker.line("Successfully registered with master", timeout_s=120)
            await runs(broker.url, url, tmp_path, workers)
        finally:
            for worker in workers:
                await worker.close()


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


async def runs(broker_url: str, master: str, folder: Path, workers: list[child_process.ChildProcess]) -> None:
    options = main.PipelineOptions(
        folder=str(folder),
        servers=(broker_url,),
        settings=settings.PipelineSettings(
            master=master, memory="600m", trigger_s=1.0, window_s=1.0, delay_s=1.0, shards=4, operators=("*",)
        ),
    )
    path = folder / "options.json"
    path.write_bytes(msgspec.json.encode(options))
    root = folder / "history"

    async def report(sequence: int) -> None:
        at_ms = traffic.now_ms()
        rows = [traffic.report(f"m{n}", sequence, at_ms, group=f"g{n % 7}") for n in range(100)]
        await traffic.store(broker_url, *(traffic.body(rows[n : n + 10]) for n in range(0, 100, 10)))

    def stored() -> int:
        return len(test_history.read(root))

    await report(1)
    async with (
        await child_process.start(
            sys.executable,
            "-m",
            "muster.pipeline.job.main",
            path,
            env={"PYTHONPATH": SOURCE, "SPARK_LOCAL_IP": "127.0.0.1"},
        ) as driver,
        await client.connect([broker_url], identity="ann") as bus,
    ):
        ask = pipeline_client.PipelineClient(bus)
        await eventually(lambda: stored() == 100, timeout_s=300)
        executors = [
            child
            for worker in workers
            for child in psutil.Process(worker.pid).children(recursive=True)
            if "CoarseGrainedExecutorBackend" in command_line(child)
        ]
        assert len(executors) == 2
        await workers[0].close()
        await report(2)
        await eventually(lambda: stored() == 200, timeout_s=300)

        async def rolled_up() -> bool:
            actual = await ask.system()
            return actual is not None and actual.to_ms > 0

        await eventually(rolled_up, timeout_s=120)
        await ask.stop()
        assert await driver.wait(timeout_s=120) == 0
    rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
    assert len(rows) == len(set(rows)) == 200
