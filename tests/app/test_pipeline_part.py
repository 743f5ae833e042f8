"""The pipeline as a component of a domain: started with it, restarted when killed, stopped with it.

There is no stream of reports, so the process waits for one and starts no Spark.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import psutil
import pytest

from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver


@pytest.mark.timeout(300)
async def test_a_pipeline_that_is_killed_is_started_again_and_ends_with_its_domain(tmp_path: Path):
    place = await asyncio.to_thread(driver.init, tmp_path / "home")
    env = driver.environment(place)
    expected = ("--set", "pipeline.enabled=true", "--set", "manage.enabled=false")
    async with await child_process.start_muster("up", *expected, env=env) as up:
        await up.line("is up", timeout_s=60)

        def pipelines() -> list[psutil.Process]:
            processes = []
            for child in psutil.Process(up.pid).children(recursive=True):
                try:
                    if "run pipeline" in " ".join(child.cmdline()):
                        processes.append(child)
                except psutil.Error:
                    continue
            return processes

        async def waits() -> bool:
            answer = await asyncio.to_thread(driver.run, "pipeline", "status", "-o", "json", home=place)
            return answer.code == 0 and "waiting for the stream" in json.loads(answer.out)["reason"]

        async def state_of_part() -> str:
            answer = await asyncio.to_thread(driver.run, "status", "-o", "json", home=place)
            rows = {row["name"]: row for row in json.loads(answer.out)["components"]}
            return str(rows["pipeline"]["state"])

        await eventually(waits, timeout_s=60)
        assert await state_of_part() != "up", "it has nothing to read yet"
        (first,) = pipelines()
        first.kill()
        await eventually(
            lambda: [pipeline.pid for pipeline in pipelines()] not in ([], [first.pid]), timeout_s=60
        )
        assert await state_of_part() != "up"
        await eventually(waits, timeout_s=60)
        (second,) = pipelines()
        await up.terminate(timeout_s=60)
        assert not second.is_running()
