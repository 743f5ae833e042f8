"""`muster fleet forget` with real processes: machines leave the fleet, their alerts end, for good."""

import asyncio

import pytest

from muster.bus.client import client
from muster.core import messages
from muster.pipeline import client as pipeline_client
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.pipeline import test_standby, traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RULES = "rules:\n  - {name: there, scope: node, when: cpu_percent > 5}\n"


async def test_forgotten_machines_stay_away_over_a_restart_and_a_new_checkpoint(broker, tmp_path):
    rows = [traffic.report(f"m{n}", 1, traffic.now_ms(), group="lab" if n < 4 else "web") for n in range(8)]
    await traffic.store(broker.url, traffic.body(rows))
    async with await client.connect([broker.url], identity="ann") as bus:
        ask = pipeline_client.PipelineClient(bus)

        async def machines() -> int | None:
            progress = await test_standby.status(ask)
            return None if progress is None else progress.machines

        async def firing() -> set[str]:
            return {
                alert.about.removeprefix("node:")
                for alert in await ask.alerts()
                if alert.state is messages.AlertState.FIRING
            }

        def forget(*arguments: str) -> None:
            answer = driver.run("fleet", "forget", *arguments, "--server", broker.url)
            assert answer.code == 0, answer

        async with await test_standby.driver(tmp_path, broker.url) as process:
            await eventually(lambda: _equals(machines, 8), timeout_s=300)
            await eventually(lambda: _equals(firing, {row.machine for row in rows}), timeout_s=60)
            await asyncio.to_thread(forget, "m7")
            await eventually(lambda: _equals(machines, 7), timeout_s=60)
            await asyncio.to_thread(forget, "--where", "group = 'lab'")
            await eventually(lambda: _equals(machines, 3), timeout_s=60)
            await eventually(lambda: _equals(firing, {"m4", "m5", "m6"}), timeout_s=60)
            progress = await ask.progress()
            assert progress.counts["removed"] == 5
            await process.kill()
        async with await test_standby.driver(tmp_path, broker.url) as process:
            await eventually(lambda: _equals(machines, 3), timeout_s=300)
            assert await firing() == {"m4", "m5", "m6"}
            await ask.stop()
            assert await process.wait(timeout_s=120) == 0
        # A new checkpoint knows no machine; alerts continue until their machines report or are forgotten.
        checkpoint = tmp_path / "pipeline" / "checkpoint"
        await asyncio.to_thread(checkpoint.rename, tmp_path / "moved")
        back = [
            traffic.report("m4", 2, traffic.now_ms(), group="web"),
            traffic.report("m0", 2, traffic.now_ms()),
        ]
        await traffic.store(broker.url, traffic.body(back))
        async with await test_standby.driver(tmp_path, broker.url) as process:
            await eventually(lambda: _equals(machines, 2), timeout_s=300)  # m0 has reported again
            # After a minute: m5 and m6 are not confirmed by the new state.
            await eventually(lambda: _equals(firing, {"m0", "m4"}), timeout_s=180)
            await ask.stop()
            assert await process.wait(timeout_s=120) == 0


async def _equals(read, expected) -> bool:
    return bool(await read() == expected)
