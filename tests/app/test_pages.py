"""Every kind of process has the same three health pages and publishes their address."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path

import pytest

from muster.app import home
from muster.bus.http import client
from muster.bus.http import health as http_health
from muster.bus.http import server as http_server
from muster.core import health
from muster.core.settings import domain, loader
from muster.core.telemetry import metrics
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver

PORTS = ("--set", "sensor.http_port=0", "--set", "sensor.statsd_port=0")
BESIDE = {  # processes that a user starts beside the domain's own
    "amqp": ("run", "amqp", "--set", "amqp.port=0", "--set", "amqp.processes=2"),
    "n9": ("run", "inform", "--name", "n9"),
    "m9": ("run", "sensor", "--name", "m9", *PORTS),
    "c9": ("run", "channel", "--name", "c9"),
    "sim": ("simulate", "sensors", "--machines", "3"),
}
STARTED = ("domain", "registry-1", "manager-1", "agent-local", "inform", "web", "pipeline")
SLOW = {"pipeline", "sim", "c9"}  # it takes Spark, and those who make and feed the stream it reads


async def read(url: str) -> tuple[int, dict[str, object]]:
    """All three pages; the status and the body of /readyz."""
    assert (await client.get(f"{url}/livez")).body == b"ok\n"
    body = (await client.get(f"{url}/metrics")).body
    assert b"process_resident_memory_bytes" in body
    assert b"\nmuster_" in body
    ready = await client.get(f"{url}/readyz")
    return ready.status, ready.json()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("without", [SLOW, pytest.param(set(), marks=pytest.mark.slow, id="all")])
async def test_every_kind_of_process_has_them(tmp_path: Path, without: set[str]):
    pytest.importorskip("proton", reason="the AMQP gateway's engine is not installed")
    place = await asyncio.to_thread(driver.init, tmp_path / "home", settings="")
    env = {**driver.environment(place), "PYTHONPATH": str(driver.SOURCE)}
    expected = ["manage.enabled=true", "manage.registries=1", "manage.managers=1"]
    expected += [] if "pipeline" in without else ["pipeline.enabled=true"]
    beside = {name: words for name, words in BESIDE.items() if name not in without}
    options = [word for setting in expected for word in ("--set", setting)]
    folder = home.DomainFolder(place / "local")
    async with contextlib.AsyncExitStack() as stack:
        up = await stack.enter_async_context(await child_process.start_muster("up", *options, env=env))
        await up.line("is up", timeout_s=120)
        for words in beside.values():
            await stack.enter_async_context(await child_process.start_muster(*words, env=env, cwd=tmp_path))

        def all_told() -> dict[str, str]:
            return {endpoint.process: endpoint.url for endpoint in http_health.advertised(folder.pages)}

        def kind_of(name: str) -> str:
            return name.partition("-")[0] if name.startswith(("amqp-", "web-", "inform-")) else name

        everybody = {*STARTED, *BESIDE} - without

        def all_are_there() -> bool:
            missing = everybody - set(map(kind_of, all_told()))
            assert not missing, missing
            return True

        await eventually(all_are_there, timeout_s=120)
        for name, url in all_told().items():

            async def ready(name: str = name, url: str = url) -> bool:
                status, page = await read(url)
                assert status == 200, f"{name}: {page}"
                return True

            await eventually(ready, timeout_s=300)  # Spark takes its time, and says so meanwhile
        shown = await asyncio.to_thread(driver.run, "status", "-o", "json", home=place)
        assert {kind_of(row["process"]) for row in shown.json()["pages"]} == everybody
        (page,) = folder.pages.glob("domain-*.json")
        scraped = json.loads(page.read_text())
        assert scraped[0]["targets"][0] in all_told()["domain"]
        await up.terminate(timeout_s=60)
        left = {kind_of(name) for name in all_told()}
        assert left == set(beside)  # those of the domain have gone with it


async def test_a_killed_process_is_not_listed(tmp_path: Path):
    child = await child_process.start("sleep", "60")
    async with child, await http_server.serve({}) as server:
        file = http_health.advertise(tmp_path, "gone", server)
        file.write_text(file.read_text().replace(f'"{os.getpid()}"', f'"{child.pid}"'))
        assert [endpoint.process for endpoint in http_health.advertised(tmp_path)] == ["gone"]
        await child.kill()
        assert list(http_health.advertised(tmp_path)) == []
        assert not file.exists()


async def test_ready_is_what_its_parts_are(tmp_path: Path):
    page = {
        "one": http_health.HealthReport(),
        "two": http_health.HealthReport(health.HealthState.STARTING, "not yet"),
    }
    expected = loader.load(domain.BaseSettings).health
    async with http_health.serve_process(
        expected, process="p", conditions=lambda: page, metrics=metrics.Metrics(), folder=tmp_path
    ) as server:
        assert server is not None
        answer = await client.get(f"{server.url}/readyz")
        assert answer.status == 503
        assert answer.json()["parts"]["two"] == {"state": "starting", "reason": "not yet"}
        page["two"] = http_health.HealthReport()
        assert (await client.get(f"{server.url}/readyz")).status == 200
    assert os.listdir(tmp_path) == []


async def test_pages_can_be_disabled(tmp_path: Path):
    settings = domain.HealthSettings(enabled=False)
    async with http_health.serve_process(
        settings, process="p", conditions=dict, metrics=metrics.Metrics(), folder=tmp_path
    ) as server:
        assert server is None
    assert os.listdir(tmp_path) == []
