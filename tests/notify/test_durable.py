from __future__ import annotations

import asyncio
import collections
import signal
import sys
from collections.abc import Sequence
from typing import Any

from muster.notify import client
from muster.testing.eventually import eventually
from tests.notify.conftest import MODELS

STATE: dict[str, Any] = {"application": "IIS", "load": 0.5}


async def _define(mine: client.Parties) -> None:
    for model in MODELS:
        await mine.define(model)


async def test_a_durable_event_is_kept_until_acknowledged_and_survives_its_notifier(
    notifier, parties, connect
):
    first = await notifier("n1")
    mine = await parties("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    assert (await web.next(timeout_s=5))["threat_level"] == 1  # received, not acknowledged
    await first.stop()

    second = await notifier("n2")
    assert second.engine.state_of("farm/web") == STATE
    await eventually(lambda: second.counts["redelivered"] > 0)
    await eventually(lambda: mine.counts["repeats"] > 0)
    web.acknowledge()
    await eventually(lambda: second.counts["acknowledged"] == 1)
    assert all(not held.pending.owed for held in second.held.values())
    await mine.sender("watch").send("alert", {"threat_level": 2}, durable=True)
    assert (await web.next(timeout_s=5))["threat_level"] == 2


async def test_matched_once_so_later_changes_do_not_change_who_gets_it(notifier, parties):
    first = await notifier("n1")
    mine = await parties("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    await mine.advertise("late", "WebServer", STATE, policy="command", durable=True)
    await mine.sender("watch").send("alert", {"threat_level": 1}, durable=True)
    await web.next(timeout_s=5)
    await web.policy("command")
    late = await mine.advertise("late", "WebServer", STATE, policy="alert", durable=True)
    await first.stop()
    second = await notifier("n2")
    await eventually(lambda: second.counts["redelivered"] > 0)
    assert second.known.vocabulary.parties
    owed = [party for held in second.held.values() for owing in held.pending.owed.values() for party in owing]
    assert owed == ["farm/web"]
    assert not late._queue


async def test_a_repeated_send_is_one_event(notifier, parties):
    await notifier()
    mine = await parties("farm")
    await _define(mine)
    web = await mine.advertise("web", "WebServer", STATE, policy="alert", durable=True)
    for level in (1, 1, 2):
        await mine.sender("watch").send("alert", {"threat_level": level}, durable=True, id=f"e{level}")
    assert [(await web.next(timeout_s=5))["threat_level"] for _ in range(2)] == [1, 2]
    assert not web._queue


async def test_kill_9_of_a_notifier_under_load_loses_and_doubles_nothing(broker, connect, start_process):
    children = {}
    for name in ("n1", "n2"):
        children[name] = await start_process(
            sys.executable, "-m", "tests.notify.run_notifier", broker.url, name
        )
    got: collections.Counter[tuple[str, str]] = collections.Counter()

    def on_event(names: Sequence[str], event: client.Event) -> None:
        got.update((name, event.id) for name in names)

    names = [f"web-{number}" for number in range(20)]
    async with client.Parties(await connect("farm"), on_event=on_event) as mine:
        await _define(mine)
        await asyncio.gather(
            *(mine.advertise(name, "WebServer", STATE, policy="alert", durable=True) for name in names)
        )
        sent: list[str] = []

        async def send(worker: int) -> None:
            for number in range(25):
                event = f"{worker}-{number}"
                await mine.send(
                    f"watch-{worker}", "alert", {"threat_level": number}, durable=True, id=event, timeout_s=60
                )
                sent.append(event)

        workers = asyncio.gather(*(send(worker) for worker in range(8)))
        await eventually(lambda: len(sent) >= 40, timeout_s=30)
        children["n1"].signal(signal.SIGKILL)
        await workers
        expected = {(name, event) for name in names for event in sent}
        await eventually(lambda: expected <= set(got), timeout_s=60)
        assert set(got) == expected
        assert set(got.values()) == {1}
