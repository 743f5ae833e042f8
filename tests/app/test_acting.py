"""What the domain does by itself: alerts that are answered, commands that are carried out, each once."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from pathlib import Path
from typing import Any

import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.policy import commands, responder
from muster.core import errors, messages
from muster.core.settings import loader
from muster.notify import client as notify
from muster.notify import models
from muster.pipeline import protocol
from muster.testing.eventually import eventually
from muster.trust.permissions import roles

NEWS = models.Model("news", {}, models.ModelKind.EVENT)
LISTENER = models.Model("Listener", {})
RULES = """
responses:
  - {alert: infected, event: news, to: "TRUE", durable: false}
  - {alert: unknown, event: no-such-event, to: "TRUE", durable: false}
"""


# Commands


class Manager:
    """Answers what the test says, in turn."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def exec(self, operation: str, resource: str, *, id: str) -> list[dict[str, Any]]:
        self.asked.append((operation, id))
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        outcome, _, code = answer.partition(":")
        return [{"outcome": outcome, "code": code}]


async def obeyed(manager: Manager, *events: Any) -> list[int]:
    """The sequences of the events that were acknowledged."""
    acknowledged: list[int] = []
    receivers: Any = types.SimpleNamespace(
        _receipts=types.SimpleNamespace(
            acknowledge=lambda shard, sequence, receiver: acknowledged.append(sequence)
        )
    )
    receiver = notify.ReceiverHandle(receivers, "web-1", 10)
    for event in events:
        receiver._enqueue(event, 0)
    obeying = asyncio.create_task(commands.execute_command(receiver, "web-1", manager))  # type: ignore[arg-type]
    await eventually(lambda: not manager._answers, timeout_s=600)
    await asyncio.sleep(0)
    obeying.cancel()
    await asyncio.gather(obeying, return_exceptions=True)
    return acknowledged


def command(operation: str, sequence: int) -> Any:
    return types.SimpleNamespace(
        content={"operation": operation}, sender={"_id": "x/y"}, id=f"e{sequence}", sequence=sequence
    )


@pytest.mark.virtual_time
async def test_a_durable_command_is_repeated_until_it_is_answered_and_in_its_order():
    manager = Manager(
        errors.Unavailable("failing over"), errors.TimedOut("no answer"), "in-doubt", "done", "failed"
    )
    acknowledged = await obeyed(manager, command("isolate", 7), command("restart", 8), command("last", 9))
    assert manager.asked[:5] == [("isolate", "x/y:e7")] * 4 + [("restart", "x/y:e8")]
    assert acknowledged[0] == 7
    assert 9 not in acknowledged


@pytest.mark.virtual_time
async def test_a_command_that_is_not_acknowledged_while_no_manager_answers():
    manager = Manager(*[errors.Unavailable("failing over")] * 5)
    assert await obeyed(manager, command("isolate", 7)) == []


@pytest.mark.virtual_time
async def test_a_command_whose_outcome_its_agent_does_not_know_is_not_repeated_for_ever():
    manager = Manager("in-doubt:timed-out", "in-doubt:in-doubt", "done")
    acknowledged = await obeyed(manager, command("isolate", 7), command("restart", 8))
    assert manager.asked == [("isolate", "x/y:e7")] * 2 + [("restart", "x/y:e8")]
    assert 7 in acknowledged


@pytest.mark.virtual_time
async def test_a_refused_command_and_one_that_is_not_durable_are_asked_for_once():
    manager = Manager(errors.NotFound("no such resource"), errors.Unavailable("failing over"), "done")
    acknowledged = await obeyed(manager, command("isolate", 7), command("tell", 0), command("restart", 8))
    assert [operation for operation, _ in manager.asked] == ["isolate", "tell", "restart"]
    assert 7 in acknowledged


# Alerts


def alert(number: int, *, rule: str = "infected", age_s: float = 0.0) -> messages.Alert:
    now_ms = int((time.time() - age_s) * 1000)
    return messages.Alert(
        rule=rule,
        about=f"node:n{number}",
        severity=messages.Severity.CRITICAL,
        state=messages.AlertState.FIRING,
        since_ms=now_ms,
        at_ms=now_ms,
    )


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_the_responder_answers_what_happens_after_it_was_enabled_and_nothing_old(tmp_path: Path):
    (tmp_path / "responses.yaml").write_text(RULES)
    flags = {
        "domain.data_dir": str(tmp_path / "data"),
        "bus.port": 0,
        "web.enabled": False,
        "manage.enabled": False,
        "message.enabled": False,
        "inform.enabled": False,
        "health.enabled": False,
    }

    def domain_of(**more: str) -> domain.Domain:
        wanted = loader.load(app_settings.Settings, flags={**flags, **more})
        return domain.Domain(wanted, parts=app_settings.components(wanted))

    async def publish(running: domain.Domain, *alerts: messages.Alert) -> None:
        async with await running.connect("pipeline", roles.Role.PIPELINE) as bus:
            stream = await bus.stream(protocol.streams()[1])
            for one in alerts:
                await stream.publish("muster.pipeline.from.pipeline.alert.infected", messages.encode(one))

    async with domain_of() as running:
        await publish(running, alert(1), alert(2))

    enabled = {"responder.rules": str(tmp_path / "responses.yaml")}
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(domain_of(**enabled))
        part = running.part(responder.ResponderComponent)
        receivers = await stack.enter_async_context(
            notify.NotifyClient(
                await stack.enter_async_context(await running.connect("ear", roles.Role.USER))
            )
        )
        await receivers.define(NEWS)
        await receivers.define(LISTENER)
        await receivers.advertise("ear", "Listener", {}, policy="news")

        async def begun() -> bool:
            return await running.store.get(responder.COLLECTION, responder.POSITION) is not None

        await eventually(begun)
        assert part.health().facts["sent"] == 0
        await publish(running, alert(3, age_s=30 * 86400), alert(4))
        await eventually(lambda: part.health().facts["sent"] == 1)
        kept = await running.store.get(responder.COLLECTION, responder.POSITION)
        assert kept is not None
        assert int(kept.value) >= 3
        assert running.metrics.value("muster_responses_total", outcome="too-old") == 1

        await publish(running, alert(5, rule="unknown"))
        await eventually(lambda: part.health().facts["refused"] == 1)
        assert running.metrics.value("muster_responses_total", outcome="refused") == 1
