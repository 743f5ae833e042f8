"""The commands of the history and of a running pipeline, without Spark."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from muster.bus.client import client
from muster.cli.monitoring import report
from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline import client as pipeline_client
from muster.pipeline import settings
from muster.pipeline.alerts import tracker
from muster.pipeline.job import commit_state, service
from muster.pipeline.source import session
from muster.testing.eventually import eventually
from tests.cli import driver
from tests.pipeline import test_history, test_notices, traffic


@pytest.fixture
def root(tmp_path) -> Path:
    rows = [
        traffic.report(f"m{n}", 1, test_history.T0, group="web", metrics={"cpu_percent": 10.0 * n})
        for n in range(10)
    ]
    test_history.store(tmp_path, 0, rows)
    return Path(tmp_path)


def test_history_is_searched_and_summarised(root):
    actual = driver.quick("history", "cpu_percent >= 80", "--dir", root, "-o", "json")
    assert sorted(row["machine"] for row in actual.json()) == ["m8", "m9"]
    table = driver.quick("history", "cpu_percent >= 80", "--dir", root).out
    assert "MACHINE" in table
    assert len(table.splitlines()) == 3
    summed = driver.quick(
        "history", "--of", "cpu_percent", "--by", "group", "--dir", root, "-o", "json"
    ).json()
    assert summed == [{"group": "web", "count": 10, "mean": 45.0, "min": 0.0, "max": 90.0}]
    table = driver.quick("history", "--of", "cpu_percent", "--by", "group", "--dir", root).out
    assert "GROUP  COUNT  CPU MEAN  CPU MIN  CPU MAX" in table
    assert "45.0 %    0.0 %   90.0 %" in table


def test_a_wrong_question_is_answered_with_what_is_wrong(root):
    answer = driver.quick("history", "cpu_prcent > 1", "--dir", root)
    assert answer.code == errors.InvalidInput.exit_code
    assert "cpu_percent" in answer.err
    assert "^" in answer.err
    both = driver.quick("history", "TRUE", "--last", "1h", "--from", "2026-01-01", "--dir", root)
    assert both.code == 2
    assert "--last or --from" in both.err
    missing = driver.quick("history", "TRUE", "--dir", root / "nowhere")
    assert missing.code == errors.NotFound.exit_code


def test_a_report_of_long_ago_is_made_from_the_history(root):
    at_ms = test_history.T0 + 5000
    system = report.past(root, "system", "", at_ms, 60.0)
    assert (system.machines, system.metrics["cpu_percent"].max) == (10, 90.0)
    assert [group.group for group in system.groups] == ["web"]
    assert report.past(root, "group", "web", at_ms, 60.0).metrics["cpu_percent"].count == 10
    assert report.past(root, "group", "w'eb", at_ms, 60.0) is None
    assert report.past(root, "node", "m7", at_ms, 60.0).metrics["cpu_percent"] == 70.0
    assert report.past(root, "node", "m7", at_ms + 60_000, 60.0) is None


@pytest.mark.parametrize(
    "words",
    [
        ("pipeline", "replay", "severity = 'critical'"),
        ("pipeline", "demand"),
        ("sql", "--spark", "SELECT 1"),
        ("report", "disks"),
        ("report", "outliers"),
        ("report", "capacity"),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_batch_commands_run_on_the_configured_master_with_the_settings_of_spark(
    root, tmp_path, monkeypatch, words
):
    home = tmp_path / "home"
    home.mkdir()
    (home / "muster.toml").write_text(
        '[pipeline]\nmaster = "spark://10.0.0.5:7077"\nmemory = "3g"\nspark = ["spark.archives=a.tar.gz"]\n'
    )
    started = []

    def start(*, master: str, extra: dict[str, str], **_: object) -> None:
        started.append((master, extra["spark.executor.memory"], extra.get("spark.archives")))
        raise errors.Unavailable("no cluster")

    monkeypatch.setattr(session, "start", start)
    answer = driver.quick(*words, "--dir", root, home=home)
    assert started == [("spark://10.0.0.5:7077", "3g", "a.tar.gz")]
    assert answer.code == errors.Unavailable.exit_code


@pytest.fixture(autouse=True)
def _no_java(monkeypatch):
    """Only requests are tested here: Java would outlive the tests."""
    monkeypatch.setattr(service.PipelineService, "_begin_spark", lambda _: None)


def _is_fenced(running: Any) -> bool:
    """Whether no former driver can publish alerts any more, so that this one may."""
    alerts = getattr(getattr(running, "_committer", None), "_alerts", None)
    return alerts is not None and alerts._last > 0


async def test_alerts_are_listed_acknowledged_and_silenced_from_the_command_line(broker, tmp_path):
    """A real service on a real bus; only its query waits, since there is no stream of reports yet."""
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: down, scope: group, when: reports = 0}\n")
    pipeline_settings = settings.PipelineSettings(rules=str(rules), operators=("ann",), trigger_s=60.0)
    async with await client.connect([broker.url], identity="pipeline") as bus:
        pipeline_service = await asyncio.to_thread(
            service.PipelineService, bus, pipeline_settings, service.PipelinePaths(tmp_path, (broker.url,))
        )
        task = asyncio.create_task(pipeline_service.run())
        await eventually(lambda: _is_fenced(pipeline_service))
        down = [
            tracker.RuleVerdict("down", f"group:{name}", True, 1000, group=name) for name in ("web", "db")
        ]
        await pipeline_service._committer._finish(0, down, 1000, [], {}, 0)

        async with await client.connect([broker.url], identity="ann") as user:
            ask = pipeline_client.PipelineClient(user)
            await eventually(lambda: _answers(ask), timeout_s=30)
            assert [(a.rule, a.state) for a in await ask.alerts()] == [("down", AlertState.FIRING)] * 2
            seen = asyncio.create_task(_first(ask))
            await ask.acknowledge("down", "group:web")
            sequence, alert = await asyncio.wait_for(seen, 30)
            assert (sequence, alert.state) == (2, AlertState.FIRING)  # the first is the driver's
            made = await ask.silence("group = 'web'", for_s=60)
            await ask.unsilence(made.id)
            progress = await ask.progress()
            assert "waiting for the stream" in progress.reason
        async with await client.connect([broker.url], identity="eve") as other:
            with pytest.raises(errors.Forbidden, match="eve may not"):
                await pipeline_client.PipelineClient(other).acknowledge("down", "group:web")
            assert len(await pipeline_client.PipelineClient(other).alerts()) == 2
        pipeline_service.stop()
        await task
        stored = commit_state.CommitStateStore(str(tmp_path / "pipeline"), 99).load().alerts
        kept = {item.about: item.state for item in stored.entries}
        assert kept == {"group:web": AlertState.ACKNOWLEDGED, "group:db": AlertState.FIRING}


async def test_the_commands_acknowledge_silence_and_plan_maintenance(broker, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n  - {name: down, scope: group, when: reports = 0}\n")
    pipeline_settings = settings.PipelineSettings(rules=str(rules), operators=("*",), trigger_s=60.0)

    async def muster(*arguments: str) -> driver.Answer:
        line = (*arguments, "--server", broker.url, "-o", "json")
        answer = await asyncio.to_thread(driver.run, *line, home=tmp_path / "home")
        assert answer.code == 0, answer.err
        return answer

    async def states() -> dict[str, str]:
        return {row["about"]: row["state"] for row in (await muster("alert", "list")).json()}

    async with await client.connect([broker.url], identity="pipeline") as bus:
        pipeline_service = await asyncio.to_thread(
            service.PipelineService, bus, pipeline_settings, service.PipelinePaths(tmp_path, (broker.url,))
        )
        task = asyncio.create_task(pipeline_service.run())
        await eventually(lambda: _is_fenced(pipeline_service))
        now_ms = traffic.now_ms()
        down = [
            tracker.RuleVerdict("down", f"group:{name}", True, now_ms, group=name) for name in ("web", "db")
        ]
        await pipeline_service._committer._finish(0, down, now_ms, [], {}, 0)
        assert await states() == {"group:web": "firing", "group:db": "firing"}
        await muster("alert", "ack", "down", "group:web")
        made = (
            await muster("alert", "silence", "group = 'db'", "--for", "1h", "--reason", "new disks")
        ).json()
        assert await states() == {"group:web": "acknowledged", "group:db": "silenced"}
        planned = await muster(
            "alert", "maintenance", "group = 'web'", "--at", "2090-01-01T02:00:00+00:00", "--for", "1h"
        )
        assert planned.json()["until"] == "2090-01-01T03:00:00+00:00"
        listed = (await muster("alert", "silences")).json()
        assert [(row["covers"], row["reason"]) for row in listed] == [
            ("group = 'db'", "new disks"),
            ("group = 'web'", ""),
        ]
        await muster("alert", "unsilence", made["id"])
        assert (await states())["group:db"] == "firing"
        assert (await muster("pipeline", "status")).json()["state"] == "starting"
        line = ("pipeline", "status", "--server", broker.url)
        shown = (await asyncio.to_thread(driver.run, *line, home=tmp_path / "home")).out
        assert shown.startswith("state"), shown
        assert "batch" not in shown, "there was none yet"
        await muster("pipeline", "stop")
        await task


async def test_the_command_tests_a_receiver_and_fails_if_it_cannot_be_notified(broker, tmp_path):
    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 202 ok\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()

    async def test(receiver: str, *more: str) -> driver.Answer:
        line = ("alert", "test", receiver, "--server", broker.url, *more)
        return await asyncio.to_thread(driver.run, *line, home=tmp_path / "home")

    async with (
        test_notices.serving(handle) as port,
        await client.connect([broker.url], identity="pipeline") as bus,
    ):
        urls = {"team": f"http://127.0.0.1:{port}/", "gone": "http://127.0.0.1:1/"}
        contacts = "".join(f"  {name}: {{webhook: '{url}'}}\n" for name, url in urls.items())
        rules = tmp_path / "rules.yaml"
        rules.write_text(f"rules: []\ncontacts:\n{contacts}")
        pipeline_settings = settings.PipelineSettings(
            rules=str(rules), operators=("*",), trigger_s=60.0, webhooks_allowed=tuple(urls.values())
        )
        pipeline_service = await asyncio.to_thread(
            service.PipelineService, bus, pipeline_settings, service.PipelinePaths(tmp_path, (broker.url,))
        )
        task = asyncio.create_task(pipeline_service.run())
        await eventually(lambda: _is_fenced(pipeline_service))
        sent = await test("team", "-o", "json")
        assert (sent.code, sent.json()) == (
            0,
            [{"transport": "webhook", "outcome": "sent", "status": 202, "reason": ""}],
        )
        failed = await test("gone")
        assert failed.code == 1
        assert "failed" in failed.out
        missing = await test("taem")
        assert missing.code == errors.NotFound.exit_code
        assert "gone, team" in missing.err
        pipeline_service.stop()
        await task


async def _answers(ask) -> bool:
    try:
        return bool(await ask.progress())
    except errors.Unavailable:
        return False


async def _first(ask: pipeline_client.PipelineClient) -> tuple[int, messages.Alert]:
    async for follow_alert in ask.follow_alerts(first=1):
        return follow_alert
    raise AssertionError
