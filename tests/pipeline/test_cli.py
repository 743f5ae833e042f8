"""The commands over a history and over a service that answers, without Spark."""

import asyncio
from pathlib import Path

import pytest

from muster.bus import client
from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline import alerts, service, settings
from muster.pipeline import client as pipeline_client
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.pipeline import test_history, traffic


@pytest.fixture
def root(tmp_path) -> Path:
    rows = [
        traffic.report(f"m{n}", 1, test_history.T0, group="web", metrics={"cpu_percent": 10.0 * n})
        for n in range(10)
    ]
    test_history.store(tmp_path, 0, rows)
    return Path(tmp_path)


def test_history_is_searched_and_summarised(root):
    found = driver.quick("history", "cpu_percent >= 80", "--dir", root, "-o", "json")
    assert sorted(row["machine"] for row in found.json()) == ["m8", "m9"]
    table = driver.quick("history", "cpu_percent >= 80", "--dir", root).out
    assert "MACHINE" in table
    assert len(table.splitlines()) == 3
    summed = driver.quick(
        "history", "--of", "cpu_percent", "--by", "group", "--dir", root, "-o", "json"
    ).json()
    assert summed == [{"group": "web", "count": 10, "mean": 45.0, "min": 0.0, "max": 90.0}]


def test_a_wrong_question_is_answered_with_what_is_wrong(root):
    answer = driver.quick("history", "cpu_prcent > 1", "--dir", root)
    assert answer.code == errors.InvalidInput.exit_code
    assert "cpu_percent" in answer.err
    assert "^" in answer.err
    missing = driver.quick("history", "TRUE", "--dir", root / "nowhere")
    assert missing.code == errors.NotFound.exit_code


async def test_alerts_are_listed_acknowledged_and_silenced_from_the_command_line(broker, tmp_path):
    """A real service on a real bus; only its query waits, since there is no stream of reports yet."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: down, level: group, when: reports = 0}\n")
    wanted = settings.Pipeline(rules=str(rules), operators=("ann",), trigger_s=60.0)
    async with await client.connect([broker.url], identity="pipeline") as bus:
        one = await asyncio.to_thread(service.Service, bus, wanted, service.Places(tmp_path, (broker.url,)))
        task = asyncio.create_task(one.run())
        await eventually(lambda: hasattr(one, "_alerts"))
        await one._finish(0, [alerts.Judgement("down", "group:web", True, 1000)], 1000, [], {}, 0)

        async with await client.connect([broker.url], identity="ann") as user:
            ask = pipeline_client.Client(user)
            await eventually(lambda: _answers(ask), timeout_s=30)
            assert [(a.rule, a.state) for a in await ask.alerts()] == [("down", AlertState.FIRING)]
            seen = asyncio.create_task(_first(ask))
            await ask.acknowledge("down", "group:web")
            sequence, alert = await asyncio.wait_for(seen, 30)
            assert (sequence, alert.state) in {(1, AlertState.FIRING), (2, AlertState.ACKNOWLEDGED)}
            made = await ask.silence("group = 'web'", for_s=60)
            await ask.unsilence(made.id)
            progress = await ask.progress()
            assert "waiting for the stream" in progress.reason
        async with await client.connect([broker.url], identity="eve") as other:
            with pytest.raises(errors.Forbidden, match="eve may not"):
                await pipeline_client.Client(other).acknowledge("down", "group:web")
            assert len(await pipeline_client.Client(other).alerts()) == 1
        one.stop()
        await task
        again = await asyncio.to_thread(service.Service, bus, wanted, service.Places(tmp_path, (broker.url,)))
        assert again._book.alerts()[0].state is AlertState.ACKNOWLEDGED


async def _answers(ask) -> bool:
    try:
        return bool(await ask.progress())
    except errors.Unavailable:
        return False


async def _first(ask: pipeline_client.Client) -> tuple[int, messages.Alert]:
    async for found in ask.follow_alerts(first=1):
        return found
    raise AssertionError
