"""Alerts that the responder could not process are counted and shown in its state."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from muster.app import home, positions
from muster.app.components import loop
from muster.core import health, messages
from muster.core.telemetry import log, metrics
from muster.loop import responder
from muster.loop import settings as loop_settings
from muster.notify import client as notify
from muster.pipeline import protocol
from muster.supervision import tasks
from muster.testing.eventually import eventually

RULES = """
responses:
  - {alert: infected, event: news, to: "TRUE"}
"""


def alert(rule: str = "quiet", *, age_s: float = 0.0) -> bytes:
    now_ms = int((time.time() - age_s) * 1000)
    return messages.encode(
        messages.Alert(
            rule=rule,
            about="node:n1",
            severity=messages.Severity.CRITICAL,
            state=messages.AlertState.FIRING,
            since_ms=now_ms,
            at_ms=now_ms,
        )
    )


@pytest.fixture
async def world(connect: Any, tmp_path: Path) -> Any:
    """A responder that was enabled before the first alert, and is not started yet."""
    (tmp_path / "responses.yaml").write_text(RULES)
    supervisor = tasks.TaskSupervisor("responder")
    await positions.StoredPosition(tmp_path, "responder").store(0)

    async def connected(identity: str, _: object) -> Any:
        return await connect(identity)

    yield SimpleNamespace(
        part=loop.ResponderComponent(loop_settings.ResponderSettings(rules=str(tmp_path / "responses.yaml"))),
        bus=await connect("pipeline"),
        folder=home.DomainFolder(tmp_path),
        connect=connected,
        metrics=metrics.Metrics(),
        log=log.EventLog("app"),
        tasks=supervisor,
    )
    await supervisor.close()


async def position(world: Any) -> int | None:
    return await positions.StoredPosition(world.folder.root, "responder").load()


async def test_alerts_that_were_dropped_before_they_were_read_are_counted(world):
    stream = await world.bus.stream(protocol.streams()[1])
    for _ in range(5):
        await stream.publish("muster.pipeline.from.pipeline.alert.quiet", alert())
    await stream.purge(before=4)
    await world.part.start(world)

    async def at_the_end() -> bool:
        return await position(world) == 5

    await eventually(at_the_end)
    assert world.part.health().facts["missed"] == 3
    assert world.metrics.value("muster_responses_total", outcome="missed") == 3


async def test_alerts_that_are_too_old_are_counted(world):
    stream = await world.bus.stream(protocol.streams()[1])
    await world.part.start(world)
    await stream.publish("muster.pipeline.from.pipeline.alert.infected", alert("infected", age_s=7200))
    await eventually(lambda: world.part.health().facts["too_old"] == 1)
    assert world.part.health().facts["sent"] == 0
    assert world.metrics.value("muster_responses_total", outcome="too-old") == 1


async def test_a_clock_that_is_ahead_does_not_end_the_responses(world, monkeypatch):
    """Of the machine of the responder."""
    stream = await world.bus.stream(protocol.streams()[1])
    sent: list[str] = []

    async def send(type: str, *_: object, **options: object) -> None:
        sent.append(type)

    monkeypatch.setattr(notify.NotifyClient, "sender", lambda *_: SimpleNamespace(send=send))
    data = alert("infected")
    now_s = time.time
    monkeypatch.setattr(time, "time", lambda: now_s() + 7200)
    await world.part.start(world)
    await stream.publish("muster.pipeline.from.pipeline.alert.infected", data)
    await eventually(lambda: sent or world.part.health().facts["too_old"])
    assert sent == ["news"]


async def test_it_is_late_only_while_there_are_no_alerts_to_read(world, monkeypatch):
    monkeypatch.setattr(responder, "RETRY_S", 0.01)
    await world.part.start(world)
    await eventually(lambda: world.part.health().state is health.HealthState.LATE)
    await world.bus.stream(protocol.streams()[1])
    await eventually(lambda: world.part.health().state is health.HealthState.UP)
