"""The same job on a standalone cluster: a master and three workers, each a process of its own."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psutil
import pyspark
import pytest

import muster
from muster.bus import api
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.core import files
from muster.pipeline import client as pipeline_client
from muster.pipeline.source import java_runtime
from muster.testing import child_process
from muster.testing.eventually import eventually
from muster.trust import keyring
from muster.trust.permissions import roles
from tests.gateways.amqp import java_project
from tests.manage import test_drills
from tests.pipeline import driver_process, test_history, traffic
from tests.trust import servers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SOURCE = str(Path(muster.__file__).parents[1])

AddWorker = Callable[[], Awaitable[None]]


async def part(name: str, *arguments: str, env: dict[str, str]) -> child_process.ChildProcess:
    """The wheel has no start scripts: its launcher runs the classes."""
    launcher = Path(pyspark.__file__).parent / "bin" / "spark-class"
    return await child_process.start(
        launcher, f"org.apache.spark.deploy.{name}", *arguments, env=env, name=name
    )


@contextlib.asynccontextmanager
async def cluster(
    folder: Path, workers: int
) -> AsyncIterator[tuple[str, list[child_process.ChildProcess], AddWorker]]:
    """The master's address, the workers, and a way to add one. Their Python has Muster's dependencies, but
    not Muster."""
    java = await asyncio.to_thread(java_runtime.find, folder)
    env = {
        "JAVA_HOME": str(java.home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "scratch"),
        "PYTHONPATH": "",
    }
    here = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    async with contextlib.AsyncExitStack() as stack:
        master = await stack.enter_async_context(await part("master.Master", *here, env=env))
        url = (await master.line(r"Starting Spark master at (spark://\S+)", timeout_s=120))[1]
        started: list[child_process.ChildProcess] = []

        async def add() -> None:
            place = str(folder / f"w{len(started)}")
            arguments = ("--cores", "1", "--memory", "1g", "--work-dir", place, url)
            worker = await part("worker.Worker", *here, *arguments, env=env)
            started.append(await stack.enter_async_context(worker))

        for _ in range(workers):
            await add()
        for worker in started:
            await worker.line("Successfully registered with master", timeout_s=120)
        yield url, started, add


def bare_python(folder: Path) -> Path:
    """A Python that has Muster's dependencies, but not Muster: executors get that from the job."""
    packages = ":".join(path for path in sys.path if path.endswith("site-packages"))
    path = folder / "bare-python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec {sys.executable} -S "$@"\n')
    path.chmod(0o755)
    return path


async def secured(folder: Path, stack: contextlib.AsyncExitStack) -> tuple[str, keyring.Keyring]:
    """A broker that demands credentials."""
    trust = keyring.Keyring.create(folder / "keys", "north")
    for identity, role in (
        ("pipeline", roles.Role.PIPELINE),
        ("c1", roles.Role.CHANNEL),
        ("ann", roles.Role.OPERATOR),
        ("lab", roles.Role.READER),
    ):
        trust.issue(identity, role)
    (folder / "broker").mkdir()
    server = await stack.enter_async_context(servers.server(folder / "broker", trust))
    return server.url, trust


@pytest.mark.parametrize("how", ["python", "spark-submit"])
async def test_the_job_runs_on_a_standalone_cluster_and_outlives_a_worker(tmp_path, how):
    """The workers have neither Muster nor the credentials."""
    python = bare_python(tmp_path)
    env = {**os.environ, "PYTHONPATH": ""}
    _, lacking = await java_project.output(str(python), "-c", "import muster", cwd=tmp_path, env=env)
    assert "No module named 'muster'" in lacking
    async with contextlib.AsyncExitStack() as stack:
        broker_url, trust = await secured(tmp_path, stack)
        master, workers, add = await stack.enter_async_context(cluster(tmp_path, 3))
        await runs(broker_url, trust, master, tmp_path, workers, add, how=how, python=python)


async def test_a_users_job_brings_its_code_to_a_cluster(tmp_path):
    """As the guide shows it, with `spark-submit`."""
    async with contextlib.AsyncExitStack() as stack:
        broker_url, trust = await secured(tmp_path, stack)
        master, *_ = await stack.enter_async_context(cluster(tmp_path, 1))
        creds = tmp_path / "lab.creds"
        creds.write_text(trust.credentials("lab").render())
        async with await client.connect([broker_url], creds=trust.credentials("c1")) as channel:
            stream = await channel.stream(traffic.STREAM)
            for ago_ms in (600_000, 0):
                sent = [traffic.report("a", 1 + ago_ms, traffic.now_ms() - ago_ms, zone="z1")]
                await stream.publish(traffic.SUBJECT, traffic.body(sent))
        python = f"spark.pyspark.python={bare_python(tmp_path)}"
        command = ("--master", master, "--conf", python, "--conf", "spark.driver.host=127.0.0.1")
        load = tmp_path / "load"
        job = (ROOT / "examples" / "spark_stream.py", broker_url, creds, load)
        async with await spark_submit(*command, *job, folder=tmp_path) as driver:

            def has_written() -> bool:
                if driver.exit_code is not None:
                    pytest.fail(driver.tail())
                return any((load / "load").glob("part-*"))

            await eventually(has_written, timeout_s=300)


def executors(worker: child_process.ChildProcess) -> list[psutil.Process]:
    return [
        child
        for child in psutil.Process(worker.pid).children(recursive=True)
        if "CoarseGrainedExecutorBackend" in command_line(child)
    ]


def command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it has just ended
        return ""


async def runs(
    broker_url: str,
    trust: keyring.Keyring,
    master: str,
    folder: Path,
    workers: list[child_process.ChildProcess],
    add: AddWorker,
    *,
    how: str,
    python: Path,
) -> None:
    credentials = folder / "pipeline.creds"
    files.write(credentials, trust.credentials("pipeline").render().encode())
    ui_port = test_drills.free_port()
    words = driver_process.words(
        folder,
        broker_url,
        master=master,
        memory="600m",
        trigger_s=1.0,
        window_s=1.0,
        delay_s=1.0,
        operators="*",
        ui_port=ui_port,
        spark=f"spark.pyspark.python={python}",
    )
    words += ["--creds", str(credentials)]
    root = folder / "history"

    async with await client.connect([broker_url], creds=trust.credentials("c1")) as channel:
        await channel.stream(traffic.STREAM)

    async def report(sequence: int) -> None:
        at_ms = traffic.now_ms()
        rows = [traffic.report(f"m{n}", sequence, at_ms, group=f"g{n % 7}") for n in range(100)]
        async with await client.connect([broker_url], creds=trust.credentials("c1")) as channel:
            stream = await channel.open_stream(traffic.STREAM.name)
            await stream.publish_batch(
                [
                    api.OutgoingMessage(traffic.SUBJECT, traffic.body(rows[n : n + 10]))
                    for n in range(0, 100, 10)
                ]
            )

    def stored() -> int:
        return len(test_history.read(root))

    await report(1)
    async with (
        await submit(how, words, folder) as driver,
        await client.connect([broker_url], creds=trust.credentials("ann")) as bus,
    ):
        ask = pipeline_client.PipelineClient(bus)
        await eventually(lambda: stored() == 100, timeout_s=300)
        assert [len(executors(worker)) for worker in workers] == [1, 1, 1]
        await check_pages(ui_port, trust.credentials("pipeline").seed)
        credentials.rename(folder / "moved.creds")  # executors do not read it
        await workers[0].close()
        await report(2)
        await eventually(lambda: stored() == 200, timeout_s=300)
        (killed,) = executors(workers[1])
        killed.kill()
        await add()
        await report(3)
        await eventually(lambda: stored() == 300, timeout_s=300)
        await eventually(lambda: executors(workers[3]), timeout_s=120)

        async def rolled_up() -> bool:
            actual = await ask.system()
            return actual is not None and actual.to_ms > 0

        await eventually(rolled_up, timeout_s=120)
        await ask.stop()
        assert await driver.wait(timeout_s=120) == 0
    rows = [(row["machine"], row["sequence"]) for row in test_history.read(root)]
    assert len(rows) == len(set(rows)) == 300
    assert readable_secrets(folder, trust.credentials("pipeline").seed) == []


def readable_secrets(folder: Path, seed: str) -> list[Path]:
    """Files that others may read, and that contain the seed."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.stat().st_mode & 0o077 and seed.encode() in path.read_bytes()
    ]


async def submit(how: str, words: list[str], folder: Path) -> child_process.ChildProcess:
    env = {"PYTHONPATH": SOURCE, "SPARK_LOCAL_IP": "127.0.0.1"}
    if how == "python":
        return await child_process.start(sys.executable, "-m", "muster", *words, env=env)
    return await spark_submit(ROOT / "deploy" / "spark" / "pipeline.py", *words[2:], folder=folder)


async def spark_submit(*arguments: str | Path, folder: Path) -> child_process.ChildProcess:
    java = await asyncio.to_thread(java_runtime.find, folder)
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    env = {
        "PYTHONPATH": SOURCE,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_HOME": str(java.home),
        "PYSPARK_DRIVER_PYTHON": sys.executable,
    }
    return await child_process.start(program, *arguments, env=env)


async def check_pages(port: int, seed: str) -> None:
    """Spark's pages, metrics and REST are there, and show no secret."""
    base = f"http://127.0.0.1:{port}"

    async def text(page: str) -> str:
        answer = await http_client.get(f"{base}{page}", timeout_s=60)
        content = answer.body.decode()
        assert seed not in content, page
        return content

    for page, content in (
        ("/environment/", "spark.redaction.regex"),
        ("/metrics/prometheus/", "metrics_"),
        ("/metrics/executors/prometheus/", "executor_id"),
        ("/StreamingQuery/", "fleet"),
        ("/SQL/", "SQL"),  # of which Spark 4.3 fetches the content by REST
    ):
        assert content in await text(page), page
    (application,) = json.loads(await text("/api/v1/applications"))

    async def has_completed() -> bool:
        """Rows are stored before the first batch is done."""
        return "COMPLETED" in await text(f"/api/v1/applications/{application['id']}/sql")

    await eventually(has_completed, timeout_s=120)
