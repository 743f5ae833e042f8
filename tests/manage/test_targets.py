"""Predicates over resources: facts, labels, and what is known of machines now: state, metrics and alerts."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from muster.app.supervisor import machine_alerts
from muster.bus import api
from muster.bus.memory import network
from muster.core import errors, messages
from muster.manage import protocol, rows
from muster.manage.agent import agent
from muster.pipeline import protocol as pipeline_protocol
from muster.testing import virtual_clock
from tests.manage.test_registry import RegistryWorld, play, until


def test_targets_by_metrics_health_and_alerts():
    async def scenario(world: RegistryWorld) -> None:
        load = {"load_1": 3.5}
        await world.start(
            agent.Agent(
                await world.net.connect("host-a"),
                None,
                beat_s=1.0,
                clock=asyncio.get_running_loop().time,
                labels={"disk": "ssd"},
                sample=lambda: load,
                sensor="node-7",
            )
        )
        await world.apply("web-1", labels={"tier": "front"})
        alerts = {"node-7": {"disk-full", "hot"}}
        world.registry.state.machines._alerts = lambda: alerts

        async def found(where: str) -> list[str]:
            return [row.name for row in await world.client.get(where=where)]

        for where in (
            "load_1 > 3 AND tier = 'front' AND disk = 'ssd' AND cpus > 0 AND state = 'up'",
            "machine_state = 'up'",
            "alerts LIKE '%hot%' AND alert_count = 2",
        ):
            assert await found(where) == ["web-1"], where
        for where in ("load_1 > 4", "machine_state = 'down'", "alerts LIKE '%cold%'", "alert_count = 0"):
            assert await found(where) == [], where
        row = await world.client.rollout(rows.RolloutPlan(operation="restart"), where="load_1 > 3")
        assert (await world.client.wait_rollout(row.id, timeout_s=60)).counts == {"done": 1}
        with pytest.raises(errors.ParseError, match="no resource has an attribute laod_1") as refused:
            await found("laod_1 > 3")
        assert refused.value.hint == "did you mean load_1?"
        with pytest.raises(errors.ParseError) as refused:
            await found("alert_cuont > 0")
        assert refused.value.hint == "did you mean alert_count?"
        stored, load["load_1"] = world.registry.state.agents["host-a"], 0.5
        world.host._announce_now.set()
        await until(lambda: world.registry.presence.metrics["host-a"] == {"load_1": 0.5})
        assert world.registry.state.agents["host-a"] is stored, "metrics are not written to the log"
        assert "load_1" not in stored.facts
        alerts.clear()
        assert await found("load_1 < 1 AND alerts = '' AND alert_count = 0") == ["web-1"]

    play(scenario, starts=False)


def test_metrics_of_an_agent_are_bounded():
    async def scenario(world: RegistryWorld) -> None:
        made = agent.Agent(
            await world.net.connect("host-a"),
            None,
            clock=asyncio.get_running_loop().time,
            sample=lambda: {f"m{number}": 1.0 for number in range(1_000)},
        )
        await world.start(made)
        await until(lambda: len(world.registry.presence.metrics["host-a"]) == protocol.METRICS_MAX)

    play(scenario, starts=False)


def alert(rule: str, about: str, state: messages.AlertState) -> messages.Alert:
    return messages.Alert(
        rule=rule, about=about, severity=messages.Severity.WARNING, state=state, since_ms=1, at_ms=1
    )


def test_alerts_are_followed_from_the_stream():
    async def scenario() -> None:
        net = network.SimulatedNetwork(1)
        bus = await net.connect("registry-1")
        followed = machine_alerts.MachineAlerts(bus)
        task = asyncio.create_task(followed.follow())
        await asyncio.sleep(1.0)  # there is no stream yet
        pipeline = await net.connect("pipeline")
        stream = await pipeline.stream(
            api.StreamSettings(pipeline_protocol.ALERTS_STREAM, subjects=(pipeline_protocol.ALERTS,))
        )
        firing, resolved = messages.AlertState.FIRING, messages.AlertState.RESOLVED

        async def publish(*changes: messages.Alert) -> None:
            for change in changes:
                await stream.publish(
                    pipeline_protocol.alert("pipeline", change.rule), messages.encode(change)
                )

        await publish(
            alert("hot", "node:a", firing),
            alert("full", "node:a", firing),
            alert("full", "node:b", messages.AlertState.ACKNOWLEDGED),
            alert("slow", "group:web", firing),
            alert("hot", "node:a", resolved),
        )
        await until(lambda: followed.rules == {"a": {"full"}, "b": {"full"}})
        await publish(alert("full", "node:a", resolved), alert("full", "node:b", resolved))
        await until(lambda: followed.rules == {})
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    virtual_clock.run_virtual(scenario())
