"""The commands, as processes of their own."""

from __future__ import annotations

import asyncio
import json

import pytest

from muster.bus.http import client
from muster.bus.http import server as http_server
from muster.core import errors, messages
from muster.core.reports import columns
from muster.monitor import client as monitor_client
from muster.monitor import report_xml
from muster.testing import child_process
from muster.testing.eventually import eventually
from tests.cli import driver


@pytest.fixture
def muster(broker, start_process, tmp_path):
    async def start(*arguments: str) -> child_process.ChildProcess:
        command = [*driver.command_line(*arguments), "--server", broker.url]
        child: child_process.ChildProcess = await start_process(
            *command, env={"MUSTER_HOME": str(tmp_path), "NO_COLOR": "1"}
        )
        return child

    return start


async def ended(child: child_process.ChildProcess) -> str:
    assert await child.wait(timeout_s=60) == 0, child.tail()
    return "\n".join(line for line in child.lines if not line.startswith("health pages: "))


async def test_a_channel_killed_under_load_costs_nothing_that_is_counted_twice(muster, connect, rows, report):
    """kill -9 of one of two channels; its sensor moves to the other within two periods."""
    quick = ("--set", "channel.hold_s=100ms", "--set", "channel.beat_s=100ms")
    victim, other = [await muster("run", "channel", "--name", name, *quick) for name in ("c1", "c2")]
    for child in (victim, other):
        await child.line("is up", timeout_s=30)
    words = ("sensor.period_s=300ms", "sensor.channels=c1,c2", "sensor.intake=false")
    sensor = await muster("run", "sensor", "--name", "m1", *(w for word in words for w in ("--set", word)))
    await sensor.line("sensor m1 is up", timeout_s=30)
    bus = await connect("reader")

    async def by_channel() -> dict[str, columns.BatchInfo]:
        matches = await monitor_client.recent(bus)
        return {facts.channel: facts for _, facts, _ in matches}

    await eventually(by_channel, timeout_s=30)
    await victim.kill()

    async def moved():
        return "c2" in await by_channel()

    await eventually(moved, timeout_s=30)
    before = len(await rows(bus))

    async def more():
        return len(await rows(bus)) > before + 3

    await eventually(more, timeout_s=30)
    actual = await rows(bus)
    sequences = [row.sequence for row in actual]
    missing = set(range(1, max(sequences))) - set(sequences)
    assert not missing
    assert len(sequences) - len(set(sequences)) <= 1  # stored, and the word of it not yet out
    await sensor.terminate()


async def test_simulate_report_top_and_capacity(muster, connect):
    played = await muster(
        "simulate",
        "sensors",
        "--machines",
        "300",
        "--groups",
        "3",
        "--period",
        "1s",
        "--for",
        "1s",
        "-o",
        "json",
    )
    facts = json.loads(await ended(played))
    assert (facts["rows"], facts["failed"]) == (300, 0)
    system = messages.decode(
        (await ended(await muster("report", "system", "-o", "json", "--window", "1h"))).encode(),
        columns.SystemReport,
    )
    assert system.machines == 300
    assert [(group.group, group.machines) for group in system.groups] == [
        ("g0", 100),
        ("g1", 100),
        ("g2", 100),
    ]
    assert system.stale or system.metrics["cpu_percent"].count == 300  # stale if this machine is slow
    as_xml = await ended(await muster("report", "node", "sim.0000007", "-o", "xml", "--window", "1h"))
    node = report_xml.decode(as_xml.encode())
    assert isinstance(node, messages.NodeReport)
    assert (node.machine, node.zone) == ("sim.0000007", "z7")
    playing = await muster("simulate", "sensors", "--machines", "300", "--groups", "3", "--period", "1s")

    async def fresh():
        table = await ended(await muster("top", "--once", "--window", "1h"))
        assert "GROUP" in table
        assert "g0" in table
        return " %" in table  # columns of metrics are of machines that are not stale

    await eventually(fresh, timeout_s=60)
    await playing.terminate()


async def test_missing_items_are_reported(muster, connect, tmp_path):
    child = await muster("report", "group", "web")
    assert await child.wait(timeout_s=30) == 4
    plan = driver.quick("capacity", "--machines", "1000000", "--period", "10s", "-o", "json").json()
    assert plan["root_cores_used"] < 2
    assert len(plan["channels"]) == 1
    paper = driver.quick("capacity", "--paper", "-o", "json").json()
    assert paper[0]["hierarchy"] == "single-level"
    assert {row["our_machines"] for row in paper} == {500_000}
    path = tmp_path / "plot.svg"
    rows = driver.quick("capacity", "--trade-off", "--to", path, "-o", "json").json()
    assert {row["depth"] for row in rows} == {1, 2, 3}
    assert path.read_text().count("<polyline") == 6
    assert driver.quick("capacity", "--to", path).code == 2
    once = driver.quick("sensor", "-o", "json").json()
    assert "cpu_percent" in once


async def test_one_report_has_the_metrics_of_scraped_services(tmp_path):
    body = "".join(f"m{number} {number}\n" for number in range(400)).encode()

    def page(request: http_server.HttpRequest) -> http_server.HttpResponse:
        return http_server.HttpResponse(200, body, "text/plain; version=0.0.4")

    async with await http_server.serve({"/metrics": page}) as server:
        child = await asyncio.to_thread(
            driver.run, "sensor", "--set", f"sensor.scrape=app={server.url}/metrics", "-o", "json"
        )
        missing = await asyncio.to_thread(
            driver.run, "sensor", "--set", f"sensor.scrape=app={server.url}/other", "-o", "json"
        )
    service = child.json()["service app"]
    assert (service["state"], len(service), service["m399"]) == ("up", 401, 399.0)
    assert missing.code == errors.Unavailable.exit_code


async def test_a_process_of_its_own_has_health_pages(muster, broker):
    child = await muster("run", "channel", "--name", "c1")
    url = (await child.line(r"health pages: (\S+)", timeout_s=30))[1]
    await child.line("is up")
    assert (await client.get(f"{url}/livez")).body == b"ok\n"
    assert (await client.get(f"{url}/readyz")).json()["ready"] is True
    metrics = (await client.get(f"{url}/metrics")).body
    assert b"muster_channel_received_rows" in metrics
    assert b"process_resident_memory_bytes" in metrics
    await broker.kill()

    async def unready():
        answer = await client.get(f"{url}/readyz")
        return answer.status == 503 and "reconnecting" in answer.json()["parts"]["bus"]["reason"]

    await eventually(unready)
