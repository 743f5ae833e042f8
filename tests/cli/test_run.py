"""``muster run``: what it offers, and a machine that has settings and credentials only."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from muster.app.components import factories
from muster.bus.client import client
from muster.bus.http import client as http_client
from muster.cli.domain import run
from muster.monitor import client as monitor_client
from muster.testing import child_process
from muster.testing.eventually import eventually
from muster.trust import keyring
from tests.cli import driver


def test_the_command_offers_each_component_that_may_run_alone():
    assert set(run.COMPONENTS) == set(factories.SERVING)
    assert set(run.TOGETHER) < set(run.COMPONENTS)


def test_unknown_components_and_settings_are_named():
    unknown = driver.quick("run", "chanel")
    assert (unknown.code, "'chanel'" in unknown.err) == (2, True)
    assert "sensor" in unknown.err
    misspelt = driver.quick("run", "sensor", "--set", "sensor.perod_s=1s")
    assert misspelt.code == 2
    assert "period_s" in misspelt.err
    shown = driver.quick("run", "--help").out
    assert all(len(line) <= 80 for line in shown.splitlines()), shown


@pytest.mark.timeout(180)
async def test_a_machine_with_credentials_only_runs_components(tmp_path: Path):
    """No folder of the domain: settings on the command line, credentials of one identity, their own pages."""
    home = await asyncio.to_thread(
        driver.init, tmp_path / "home", "[manage]\nenabled = false\n[web]\nenabled = false\n"
    )
    up = await asyncio.to_thread(driver.run, "up", "--detach", home=home)
    assert up.code == 0, up.err
    try:
        status = (await asyncio.to_thread(driver.quick, "status", "-o", "json", home=home)).json()
        for name, role in (("c9", "channel"), ("m9", "agent")):
            words = ("creds", "issue", name, "--role", role, "--to", tmp_path / f"{name}.creds")
            issued = await asyncio.to_thread(driver.quick, *words, home=home)
            assert issued.code == 0, issued.err
        there = tmp_path / "machine"
        there.mkdir()
        env = driver.environment(there)

        async def start(component: str, name: str, *words: str) -> child_process.ChildProcess:
            where = ("--server", status["servers"][0], "--creds", str(tmp_path / f"{name}.creds"))
            return await child_process.start_muster("run", component, *where, *words, env=env)

        quick = ("--set", "sensor.period_s=300ms", "--set", "sensor.intake=false")
        async with await start("channel", "c9") as channel, await start("sensor", "m9", *quick) as sensor:
            for child, name in ((channel, "channel c9"), (sensor, "sensor m9")):
                page = (await child.line(r"health pages: (\S+)", timeout_s=60))[1]
                await child.line(f"{name} is up", timeout_s=60)
                ready = (await http_client.get(f"{page}/readyz")).json()
                assert ready["ready"], ready
                assert set(ready["parts"]) == {"bus", name.split()[0], "tasks"}
            creds = keyring.Keyring.open(home / "local" / "keys").credentials("admin")
            async with await client.connect(status["servers"], creds=creds) as bus:

                async def reported() -> bool:
                    return any(facts.channel == "c9" for _, facts, _ in await monitor_client.recent(bus))

                await eventually(reported, timeout_s=60)
            keys = await asyncio.to_thread(
                driver.run, "run", "amqp", "--server", status["servers"][0], "--creds",
                tmp_path / "m9.creds", "--set", "amqp.processes=1", "--set", "amqp.port=0", home=there,
            )  # fmt: skip
            assert keys.code == 4, keys.err
            assert "no keys of the domain" in keys.err
            assert await sensor.terminate(timeout_s=30) == 0
            assert await channel.terminate(timeout_s=30) == 0
        assert not (there / "local" / "keys").exists()
    finally:
        assert (await asyncio.to_thread(driver.run, "down", home=home)).code == 0
