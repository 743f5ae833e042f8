"""Batches while the brokers do not accept messages."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from muster.bus.client import client
from muster.core import errors, messages
from muster.core.messages import AlertState
from muster.pipeline import protocol, settings
from muster.pipeline.alerts import notifications, tracker
from muster.pipeline.fleet import state
from muster.pipeline.history import search
from muster.pipeline.job import batch_commit, window_rows
from muster.testing.eventually import eventually
from tests.pipeline import test_history, traffic

DOWN = [tracker.RuleVerdict("down", "group:web", True, 1000, group="web")]


class LeaderlessStream:
    """A stream without a leader, for longer than any timeout."""

    async def publish(self, *_: Any, **__: Any) -> int:
        raise errors.TimedOut("no acknowledgement came")


async def opened(
    bus: client.NatsBus, folder: Path, pipeline_settings: settings.PipelineSettings | None = None
) -> batch_commit.BatchCommitter:
    if pipeline_settings is None:
        rules = folder / "rules.yaml"
        rules.write_text("rules:\n  - {name: down, scope: group, when: reports = 0}\n")
        pipeline_settings = settings.PipelineSettings(rules=str(rules), operators=("*",))
    made = await asyncio.to_thread(
        batch_commit.BatchCommitter,
        bus,
        pipeline_settings,
        history=str(folder / "history"),
        run="r",
        state_root=str(folder),
        authority=traffic.OnlyDriver(),
    )
    await made.open(protocol.streams())
    return made


async def published_alerts(bus: client.NatsBus) -> list[tuple[str, AlertState]]:
    stream = await bus.open_stream(protocol.ALERTS_STREAM)
    last = (await stream.state()).last_sequence
    actual = (
        [
            messages.decode(message.data, messages.Alert)
            async for message in stream.read(1, last)
            if message.data
        ]
        if last
        else []
    )
    return [(alert.about, alert.state) for alert in actual]


async def test_an_alert_that_could_not_be_published_is_published_later(broker, tmp_path):
    """The batch is repeated; the alert state changes once, and its notifications are not lost."""
    async with await client.connect([broker.url], identity="pipeline") as bus:
        committer = await opened(bus, tmp_path)
        stream, committer._alerts = committer._alerts, LeaderlessStream()  # type: ignore[assignment]
        with pytest.raises(errors.TimedOut):
            await committer._finish(7, DOWN, 1000, [], {}, 0)
        assert await published_alerts(bus) == []
        committer._alerts = stream
        await committer._finish(7, DOWN, 1000, [], {}, 0)
        assert await published_alerts(bus) == [("group:web", AlertState.FIRING)]
        await committer.advance_clock()
        assert await published_alerts(bus) == [("group:web", AlertState.FIRING)]
        rows = [
            row
            for part in search.search(tmp_path / "history", search.HistorySearch("alerts"))
            for row in part.to_pylist()
        ]
        assert [(row["about"], row["state"]) for row in rows] == [("group:web", "firing")]


async def test_unpublished_alerts_are_published_by_the_next_process(broker, tmp_path):
    async with await client.connect([broker.url], identity="pipeline") as bus:
        committer = await opened(bus, tmp_path)
        committer._alerts = LeaderlessStream()  # type: ignore[assignment]
        with pytest.raises(errors.TimedOut):
            await committer._finish(7, DOWN, 1000, [], {}, 0)
        await committer.save()  # as the sender of notifications does, at any time
        again = await opened(bus, tmp_path)
        await again.advance_clock()
        assert await published_alerts(bus) == [("group:web", AlertState.FIRING)]
        await again.advance_clock()
        assert len(await published_alerts(bus)) == 1


async def test_an_acknowledgement_counts_although_no_broker_takes_it(broker, tmp_path):
    async with await client.connect([broker.url], identity="pipeline") as bus:
        committer = await opened(bus, tmp_path)
        await committer._finish(7, DOWN, 1000, [], {}, 0)
        committer._alerts = LeaderlessStream()  # type: ignore[assignment]
        outcome = committer.alert_tracker.acknowledge("down", "group:web", "ann", 2000)
        await committer.store_updates(outcome)
        again = await opened(bus, tmp_path)
        await again.advance_clock()
        assert (await published_alerts(bus))[-1] == ("group:web", AlertState.ACKNOWLEDGED)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("committed", [True, False])
async def test_alerts_are_in_the_history_once_whenever_the_process_ends(
    broker, tmp_path, monkeypatch, committed
):
    """Before the commit of the history, or between it and the saved state."""
    async with await client.connect([broker.url], identity="pipeline") as bus:
        committer = await opened(bus, tmp_path)
        write = committer._write_alerts

        def end(*arguments: Any) -> bool:
            if committed:
                write(*arguments)
            raise Killed

        monkeypatch.setattr(committer, "_write_alerts", end)
        with pytest.raises(Killed):
            await committer._finish(7, DOWN, 1000, [], {}, 0)
        again = await opened(bus, tmp_path)
        await again._finish(7, DOWN, 1000, [], {}, 0)  # Spark repeats the batch
        await again._finish(8, [], 2000, [], {}, 0)
        rows = test_history.read(tmp_path / "history", "alerts")
        assert [(row["about"], row["state"]) for row in rows] == [("group:web", "firing")]


async def test_a_contact_that_does_not_accept_notifications_raises_an_alert(broker, tmp_path, monkeypatch):
    async def refuse(*_: Any) -> int:
        raise errors.Unavailable("the webhook returned HTTP status 503")

    monkeypatch.setattr(notifications, "post", refuse)
    monkeypatch.setattr(notifications, "FIRST_WAIT_S", 0.01)
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n  - {name: down, scope: group, when: reports = 0, notify: [team]}\n"
        'contacts: {team: {webhook: "https://hooks.example/web"}}\n'
    )
    allowed = settings.PipelineSettings(rules=str(rules), webhooks_allowed=("https://hooks.example",))
    async with await client.connect([broker.url], identity="pipeline") as bus:
        committer = await opened(bus, tmp_path, allowed)
        sending = asyncio.create_task(committer.sender.run(committer.save))

        async def commit(number: int, at_ms: int) -> set[tuple[str, str]]:
            outputs = [state.ShardOutput(clock_ms=at_ms)]
            await asyncio.to_thread(committer.commit, number, window_rows.BatchRows(outputs))
            return {(alert.rule, alert.state.value) for alert in committer.alert_tracker.alerts()}

        await committer._finish(1, DOWN, 1000, [], {}, 0)
        await eventually(lambda: committer.sender.failing())
        assert ("notifications-failing", "pending") in await commit(2, 2000)
        assert ("notifications-failing", "firing") in await commit(3, 70_000)
        (failing,) = committer.sender.failing()
        assert (failing.name, failing.waiting) == ("team", 1)
        assert "503" in failing.reason

        async def accept(*_: Any) -> int:
            return 200

        monkeypatch.setattr(notifications, "post", accept)
        await eventually(lambda: not committer.sender.failing())
        assert await commit(4, 80_000) == {("down", "firing")}
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
