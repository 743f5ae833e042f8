"""From a domain's reports to analyses of its history, by commands."""

import asyncio
import datetime
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from muster import connection
from muster.core import messages
from muster.core.reports import columns
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.pipeline import traffic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RULES = "rules:\n  - {name: busy, scope: node, when: cpu_percent > 85, severity: critical}\n"
ROUNDS, MACHINES = 4, 20


async def muster(*words: str | Path, home: Path) -> driver.Answer:
    result = await asyncio.to_thread(driver.run, *words, home=home, timeout_s=300)
    assert result.code == 0, (words, result.err)
    return result


async def run_json(*words: str | Path, home: Path) -> Any:
    return json.loads((await muster(*words, "-o", "json", home=home)).out)


async def tell(where: dict[str, Any], number: int) -> int:
    """A round of reports into the stream, larger than the one before; how many."""
    (creds,) = await asyncio.to_thread(lambda: list(Path(where["keys"]).rglob("admin.creds")))
    servers = [row["url"] for row in where["brokers"]]
    async with await connection.connect(servers, creds=creds) as bus:
        stream = await bus.open_stream(columns.REPORTS_STREAM)
        for part in range(number):
            body = traffic.body(machines(100 * number + part))
            await stream.publish(f"muster.monitor.from.{bus.identity}.batch.root.0", body)
    return MACHINES * number


def machines(sequence: int) -> list[messages.NodeReport]:
    at_ms = traffic.now_ms()
    return [
        traffic.report(
            f"m{n}",
            sequence,
            at_ms,
            group=f"g{n % 2}",
            zone=f"z{n % 3}",
            period_s=1.0,
            metrics={"cpu_percent": 5.0 * n},
            services=(messages.ServiceReport(name="shop", metrics={"reads.users_s": float(n)}),),
        )
        for n in range(MACHINES)
    ]


async def test_a_history_is_created_and_queried_by_every_command(tmp_path, start_process):
    home = tmp_path / "home"
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    await muster("init", "--port", "0", home=home)
    await muster("up", "--detach", "--set", "channel.enabled=true", home=home)
    try:
        quick = [f"pipeline.{word}" for word in ("trigger_s=5s", "window_s=1s", "delay_s=900ms")]
        child: child_process.ChildProcess = await start_process(
            *driver.command_line("run", "pipeline", "--set", f"pipeline.rules={rules}"),
            *(part for word in quick for part in ("--set", word)),
            env=driver.environment(home),
        )
        where = await run_json("status", home=home)
        total = 0
        for number in range(1, ROUNDS + 1):
            total += await tell(where, number)

            async def read(total: int = total) -> bool:
                result = await asyncio.to_thread(driver.run, "pipeline", "status", "-o", "json", home=home)
                return result.code == 0 and result.json()["total_rows"] >= total

            await eventually(read, timeout_s=300)
        rounds = itertools.count(ROUNDS + 1)

        async def checked() -> Any:
            """Of batches that had not to catch up; there may be none yet on a busy machine."""
            await tell(where, next(rounds))
            result = await asyncio.to_thread(
                driver.run, "capacity", "--check", "--window", "10m", "-o", "json", home=home
            )
            return result.json() if result.code == 0 else None

        check = await eventually(checked, timeout_s=300)
        assert {"Spark's trigger", "batch"} <= set(check["stages_s"])
        assert check["batches"] > 0
        assert check["measured_max_s"] > 0
        assert check["predicted_max_s"] == pytest.approx(sum(check["stages_s"].values()), abs=0.01)
        system = await run_json("report", "system", home=home)
        assert system["kind"].startswith("system-report")
        await muster("pipeline", "stop", home=home)
        assert await child.wait(timeout_s=120) == 0, child.tail()
        await the_past(home, tmp_path)
        at = (await run_json("history", "machine = 'm19'", "-n", "1", home=home))[0]["reported_at"]
        await muster("down", home=home)
        then = await run_json("report", "node", "m19", "--at", at, home=home)
        assert then["metrics"]["cpu_percent"] == 95.0
    finally:
        await asyncio.to_thread(driver.run, "down", "--force", home=home)


async def the_past(home: Path, folder: Path) -> None:
    hot = await run_json("history", "cpu_percent > 85", "-n", "0", home=home)
    assert {row["machine"] for row in hot} == {"m18", "m19"}
    alerts = await run_json("history", "rule = 'busy'", "--in", "alerts", home=home)
    assert {row["about"] for row in alerts} == {"node:m18", "node:m19"}
    replayed = await run_json(
        "pipeline", "replay", "severity = 'critical'", "--address", "zone = 'z1'", home=home
    )
    assert replayed["events"] == len(alerts)
    assert replayed["receivers"] == len([n for n in range(MACHINES) if n % 3 == 1])
    answer = await muster("pipeline", "replay", "severity = 'critical'", home=home)
    assert "would have reached 20 machines" in answer.err + answer.out
    demand = await run_json("pipeline", "demand", home=home)
    (users,) = demand
    assert users["key"] == "users"
    assert set(users["by_zone"]) == {"z0", "z1", "z2"}
    fit = await run_json("pipeline", "fit", "--period", "10s", home=home)
    assert fit["batches"] >= 3
    assert "r2" in fit
    assert (fit["machines_max"] is not None) == fit["usable"]
    page = folder / "week.html"
    today = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).strftime("%Y-%m-%d")
    await muster("report", "capacity", "--date", today, "--demand", "--to", page, home=home)
    text = page.read_text()
    assert text.count("<svg") >= 3
    assert "<td>users</td>" in text
    assert "<td>busy</td><td>critical</td>" in text
    count = "SELECT count(DISTINCT machine) AS machines FROM nodes"
    assert await run_json("sql", "--spark", count, home=home) == [{"machines": MACHINES}]
