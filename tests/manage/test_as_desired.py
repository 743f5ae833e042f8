"""`apply` with a wait and rollouts succeed only for resources that stay in their desired state.

In virtual time, with the real registry, manager and agent. The services of a test work, are never healthy, or
end soon after their start, as their configuration says.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest

from muster.bus import api
from muster.core import errors, health
from muster.manage import protocol, rows
from muster.manage.adapters import base, plugins
from muster.manage.agent import agent
from muster.testing.eventually import eventually
from tests.manage.test_registry import RegistryWorld, play, until

START_S, LIFE_S = 0.3, 0.5
WAIT_S = 60.0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    ends: int | None = None  # the exit code with which it ends soon after its start
    healthy: bool = True
    life_s: float = LIFE_S  # until that end


class ServiceAdapter(base.Adapter):
    type_name = "service"
    config_type = ServiceConfig

    def __init__(self, context: base.AdapterContext) -> None:
        super().__init__(context)
        self.config = ServiceConfig()
        self.state, self.properties = health.HealthState.DOWN, dict[str, Any]()
        self.running: asyncio.Task[None] | None = None
        self.starts = 0
        self.output = ""

    async def create(self, config: ServiceConfig, *, start: bool) -> None:
        self.config = config
        if start:
            await self.do_start()

    async def put(self, config: ServiceConfig) -> None:
        self.config = config
        await self.do_restart()

    async def delete(self) -> None:
        await self.do_stop()

    async def observe(self) -> protocol.ObservedState:
        ran = self.context.runtime.get("ran", 0)
        return protocol.ObservedState(True, self.state, properties=self.properties, ran=ran)

    async def resume(self, config: ServiceConfig) -> None:
        self.config = config

    async def do_start(self) -> None:
        self.context.runtime["ran"] = self.context.generation
        self.starts += 1
        self.state, self.properties = health.HealthState.STARTING, {}
        self.running = asyncio.create_task(self._run())

    async def do_stop(self) -> None:
        if self.running is not None:
            self.running.cancel()
        self.state = health.HealthState.DOWN

    async def do_restart(self) -> None:
        await self.do_stop()
        await self.do_start()

    async def do_logs(self) -> str:
        return self.output

    async def do_break(self) -> None:
        """Its next runs are never healthy."""
        self.config = ServiceConfig(healthy=False)

    async def _run(self) -> None:
        if not self.config.healthy:
            return
        if self.config.ends is None:
            await asyncio.sleep(START_S)  # pace
        self.state = health.HealthState.UP
        self.context.report_state(await self.observe())
        if self.config.ends is not None:
            await asyncio.sleep(self.config.life_s)  # pace
            self.state, self.properties = health.HealthState.DOWN, {"exit_code": self.config.ends}
            self.context.report_state(await self.observe())


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[RegistryWorld], Awaitable[None]]], None]:
    """Play a scenario with an agent that has services."""
    known = plugins.config_validators()
    monkeypatch.setattr(plugins, "config_validators", lambda: {**known, "service": lambda _: None})

    def run_scenario(scenario: Callable[[RegistryWorld], Awaitable[None]]) -> None:
        async def started(world: RegistryWorld) -> None:
            host = agent.Agent(
                await world.net.connect("host-a"),
                None,
                beat_s=1.0,
                clock=asyncio.get_running_loop().time,
                adapters=lambda _: ServiceAdapter,
                types=("service",),
            )
            await world.start(host)
            await scenario(world)

        play(started, starts=False)

    return run_scenario


def manifest(*names: str, depends_on: tuple[str, ...] = (), restart: Any = None, **config: Any) -> str:
    return json.dumps(
        {
            "resources": [
                {
                    "name": name,
                    "type": "service",
                    "agent": "host-a",
                    "depends_on": depends_on,
                    "restart": restart or {},
                    "config": config,
                }
                for name in names
            ]
        }
    )


def starts(world: RegistryWorld, name: str) -> int:
    adapter = world.host.hosted[name].adapter
    assert isinstance(adapter, ServiceAdapter)
    return adapter.starts


BROKEN = {"never healthy": {"healthy": False}, "ends soon": {"ends": 1}}


# Apply


@pytest.mark.parametrize("config", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("count", [1, 6])
def test_apply_fails_for_a_new_version_that_does_not_become_healthy(run, config, count):
    async def scenario(world: RegistryWorld) -> None:
        names = [f"web-{number}" for number in range(count)]
        await world.client.apply(manifest(*names), wait_s=WAIT_S)
        assert {row.state for row in await world.client.get(*names)} == {"up"}
        with pytest.raises(errors.MusterError, match="web-0 is ") as failure:
            await world.client.apply(manifest(*names, **config), wait_s=20.0)
        assert failure.value.exit_code not in (0, None)

    run(scenario)


def test_a_new_version_is_not_shown_as_up_before_it_is(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest("web"), wait_s=WAIT_S)
        await world.client.apply(manifest("web", healthy=False))
        seen = set()
        for _ in range(200):
            (row,) = await world.client.get("web")
            seen.add(row.state)
            await asyncio.sleep(0.02)  # pace
        assert seen == {"starting"}

    run(scenario)


def test_a_resource_that_is_given_up_ends_the_wait_with_its_reason(run):
    async def scenario(world: RegistryWorld) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        text = manifest("web", restart={"attempts": 1, "delay_s": 0.1}, ends=3)
        with pytest.raises(errors.Refused, match=r"web is failed: .*given up after 1 restarts") as failure:
            await world.client.apply(text, wait_s=600.0)
        assert loop.time() - began < 30
        assert "muster logs web" in (failure.value.hint or "")
        again = await world.client.apply(text)
        assert again.changed_count == 0
        assert any("web" in note and "failed" in note for note in again.notes)

    run(scenario)


def test_a_completed_job_is_as_desired_and_satisfies_its_dependants(run):
    async def scenario(world: RegistryWorld) -> None:
        job = manifest("migrate", restart={"policy": "on-failure"}, ends=0)
        await world.client.apply(job, wait_s=WAIT_S)
        row = await world.client.wait("migrate", "completed")
        assert row.applied
        await world.client.apply(manifest("app", depends_on=("migrate",)), wait_s=WAIT_S)
        assert (await world.client.get("app"))[0].state == "up"
        assert starts(world, "migrate") == 1
        # A registry that begins later knows it as completed.
        assert (await world.client.describe("migrate")).reason

    run(scenario)


# Rollouts


async def ended(world: RegistryWorld, id: str) -> Any:
    async def look() -> Any:
        (row,) = await world.client.rollouts(id)
        return None if row.state == "running" else row

    return await eventually(look, timeout_s=600)


async def rolled(world: RegistryWorld, *names: str, **plan: Any) -> tuple[Any, dict[str, str]]:
    begun = await world.client.rollout(rows.RolloutPlan(**plan), *names)
    row = await ended(world, begun.id)
    steps = await world.client.rollout_steps(begun.id)
    return row, {step.name: step.state for step in steps}


def test_a_rollout_waits_for_the_health_of_each_batch(run):
    async def scenario(world: RegistryWorld) -> None:
        names = [f"web-{number}" for number in range(6)]
        await world.client.apply(manifest(*names), wait_s=WAIT_S)
        not_up = 0

        async def watch() -> None:
            nonlocal not_up
            while True:
                states = [world.host.hosted[name].observed.state for name in names]
                not_up = max(not_up, sum(state is not health.HealthState.UP for state in states))
                await asyncio.sleep(0.01)  # pace

        watching = asyncio.create_task(watch())
        row, steps = await rolled(world, *names, operation="restart", batch="1")
        watching.cancel()
        assert (row.state, set(steps.values())) == ("done", {"done"})
        assert not_up == 1

    run(scenario)


@pytest.mark.parametrize("broken", ["break", "ends"])
def test_a_rollout_stops_at_the_first_resource_that_does_not_become_healthy(run, broken):
    async def scenario(world: RegistryWorld) -> None:
        names = [f"web-{number}" for number in range(6)]
        await world.client.apply(manifest(*names), wait_s=WAIT_S)
        for name in names:  # the next run of each is broken
            adapter = world.host.hosted[name].adapter
            assert isinstance(adapter, ServiceAdapter)
            adapter.config = ServiceConfig(**({"healthy": False} if broken == "break" else {"ends": 1}))
        row, steps = await rolled(world, *names, operation="restart", batch="1", healthy_s=20.0)
        assert row.state == "stopped"
        assert steps == {"web-0": "failed"} | dict.fromkeys(names[1:], "pending")
        (step,) = [step for step in await world.client.rollout_steps(row.id) if step.name == "web-0"]
        assert step.reason.startswith("it is ")
        assert row.reason == f"1 steps failed; at most 0 may fail. web-0: {step.reason}"
        assert sum(starts(world, name) for name in names[1:]) == 5

    run(scenario)


def test_a_rollout_that_reaches_no_resource_fails_and_resuming_tries_again(run):
    async def scenario(world: RegistryWorld) -> None:
        names = ["web-0", "web-1"]
        await world.client.apply(manifest(*names), wait_s=WAIT_S)
        world.net.disconnect(world.host._bus)
        row, steps = await rolled(world, *names, operation="restart", batch="100%", timeout_s=1.0)
        assert (row.state, set(steps.values())) == ("stopped", {"unreachable"})
        assert "2 of 2 resources" in row.reason
        await until(lambda: world.host._bus.state is api.ConnectionState.CONNECTED)
        await world.client.resume(row.id)
        assert (await ended(world, row.id)).state == "done"
        assert [starts(world, name) for name in names] == [2, 2]

    run(scenario)


def test_a_rollout_does_not_trust_a_state_from_before_the_operation(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest("web"), wait_s=WAIT_S)

        async def fail(names: Any) -> None:
            raise errors.Unavailable("the store is lost")

        world.manager._orders._flush = fail
        row, _ = await rolled(world, "web", operation="restart")
        assert row.state == "stopped"
        assert "could not report its state" in row.reason
        (executed,) = await world.client.exec("restart", "web")
        assert executed.outcome == "done"

    run(scenario)


@pytest.mark.parametrize(("lost", "state"), [("lease", "done"), ("resource", "stopped")])
def test_a_rollout_trusts_a_manager_that_renews_and_none_that_lost_the_resource(run, lost, state):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest("web"), wait_s=WAIT_S)
        executed = world.manager._orders._on_executed

        def lose(name: str, *of: Any) -> None:
            executed(name, *of)
            if lost == "lease":
                world.manager.renewal.valid_until = 0.0
            else:
                del world.manager.managed[name]

        world.manager._orders._on_executed = lose
        row, _ = await rolled(world, "web", operation="restart")
        assert row.state == state
        assert ("could not report its state" in row.reason) is (state == "stopped")

    run(scenario)


def test_reading_logs_does_not_delay_a_wait(run):
    async def scenario(world: RegistryWorld) -> None:
        async def read() -> None:
            while True:
                await asyncio.sleep(0.5)  # pace
                await world.client.logs("web")

        await world.client.apply(manifest("web"))
        reading = asyncio.create_task(read())
        await world.client.wait_settled("web", timeout_s=WAIT_S)
        reading.cancel()

    run(scenario)


def test_a_rollout_can_skip_the_check_of_health(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest("web", healthy=False))
        await until(lambda: "web" in world.host.hosted)
        row, _ = await rolled(world, "web", operation="break", healthy_s=0.0)
        assert row.state == "done"

    run(scenario)


# What an apply reports, and large manifests


def test_an_apply_names_agents_that_are_not_known(run):
    async def scenario(world: RegistryWorld) -> None:
        applied = await world.client.apply(manifest("web").replace("host-a", "hst-a"))
        assert applied.notes == [
            "no agent 'hst-a' has joined: 1 resource cannot start before it joins; did you mean host-a?"
        ]
        with pytest.raises(errors.TimedOut, match="hst-a does not reply") as failure:
            await world.client.apply(manifest("web").replace("host-a", "hst-a"), wait_s=20.0)
        assert "did you mean host-a?" in (failure.value.hint or "")
        assert (await world.client.apply(manifest("app"))).notes == []

    run(scenario)


def test_a_manifest_larger_than_a_message_is_applied_as_a_whole():
    async def scenario(world: RegistryWorld) -> None:
        def text(agent: str) -> str:
            value = "x" * 200_000
            entries: list[Any] = [
                {"name": f"r{number}", "type": "memory", "agent": "host-a", "config": {"value": value}}
                for number in range(8)
            ]
            return json.dumps({"resources": [*entries, {"name": "last", "type": "spark", "agent": agent}]})

        with pytest.raises(errors.MusterError):
            await world.client.apply(text("host-a"))
        assert await world.client.get() == []
        entries = json.loads(text("host-a"))["resources"][:8]
        large = json.dumps({"resources": entries})
        assert len(large) > 1_500_000
        assert (await world.client.apply(large, wait_s=WAIT_S)).counts == {"create": 8}
        assert [step.act for step in await world.client.plan(large)] == ["keep"] * 8
        assert [decision.target for decision in await world.client.decisions() if decision.what == "apply"][
            -1
        ].startswith("r0, r1")

    play(scenario)


def test_draining_a_name_of_a_resource_and_an_agent_needs_a_kind(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest("host-a", "web"), wait_s=WAIT_S)
        with pytest.raises(errors.InvalidInput, match="a resource and of an agent"):
            await world.client.drain("host-a")
        assert (await world.client.drain("host-a", "resource")).changed == ["host-a"]
        assert (await world.client.drain("host-a", "agent")).changed == ["web"]
        with pytest.raises(errors.NotFound, match="no agent 'web'"):
            await world.client.drain("web", "agent")

    run(scenario)
