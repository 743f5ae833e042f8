"""Updates: wave by wave, health-gated, reverted; they survive the registry.

First the decisions alone, with random fleets and faults; then with the real registry, manager and agent in
virtual time (`virtual_clock.run_virtual`). The services are those of `test_as_desired`.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from muster.core import errors, health
from muster.manage import protocol, rows
from muster.manage.manager import manager
from muster.manage.registry import operations
from muster.manage.registry.rollouts import plan, rollout
from tests.manage import test_as_desired
from tests.manage.test_registry import RegistryWorld, until

run = test_as_desired.run  # a fixture
POLICY = protocol.UpdatePolicy(
    max_parallel=1, min_healthy_time_s=5.0, healthy_deadline_s=60.0, progress_deadline_s=200.0
)


def spec(name: str, version: int, policy: protocol.UpdatePolicy | None = POLICY, **more: Any) -> Any:
    config = {"version": version}
    return protocol.ResourceSpec(name=name, type="memory", agent="a", config=config, update=policy, **more)


# Waves


def test_waves_follow_dependencies_zones_and_sizes():
    policy = protocol.UpdatePolicy(max_parallel=2, canary=1)
    specs = {f"web-{n}": spec(f"web-{n}", 2, policy, group="web", depends_on=("db",)) for n in range(1, 6)}
    specs |= {"db": spec("db", 2, POLICY, group="db"), "other": spec("other", 2, None, group="other")}
    for name in specs:
        zone = "east" if name in ("web-4", "web-5") else "west"
        specs[name] = msgspec.structs.replace(specs[name], agent=zone)
    waves = plan.update_waves(specs, set(specs), lambda agent: agent, {"web-3"})
    assert waves["db"] == waves["other"] == 1
    assert waves["web-3"] == 2, "what does not work is the canary"
    assert waves["web-4"] == waves["web-5"] == 3
    assert waves["web-1"] == waves["web-2"] == 4


# Decisions, with random fleets and faults


class RandomFleet:
    """Resources of one group that start, fail and recover at random. Its clock runs in steps."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = self.chance.randint(1, 8)
        self.policy = protocol.UpdatePolicy(
            max_parallel=self.chance.randint(1, 3),
            canary=self.chance.randint(0, 2),
            min_healthy_time_s=self.chance.choice([0.0, 3.0, 10.0]),
            healthy_deadline_s=30.0,
            progress_deadline_s=120.0,
            auto_revert=self.chance.random() < 0.7,
        )
        self.broken = {2} if self.chance.random() < 0.5 else set()  # versions that never work
        names = [f"web-{number}" for number in range(self.count)]
        self.specs = {name: spec(name, 1, self.policy, group="web") for name in names}
        self.up_at: dict[str, float] = dict.fromkeys(names, -100.0)  # inf: it does not work
        self.starts = dict.fromkeys(names, 0)
        self.now = 0.0

    def is_up(self, name: str) -> bool:
        return self.up_at[name] <= self.now

    @property
    def unhealthy(self) -> Collection[str]:
        return {name for name in self.specs if not self.is_up(name)}

    def members(self, group: str) -> Collection[str]:
        return self.specs

    def health(self, name: str) -> rollout.StepHealth:
        is_up = self.is_up(name)
        settled = is_up and self.now - self.up_at[name] >= 2.0
        return rollout.StepHealth(is_up, settled, False, (self.starts[name],), "up" if is_up else "starting")

    def change(self, name: str, after: protocol.ResourceSpec) -> None:
        if self.specs[name] != after:
            self.specs[name] = after
            self.starts[name] += 1
            is_broken = after.config["version"] in self.broken
            self.up_at[name] = float("inf") if is_broken else self.now + self.chance.choice([0.5, 2.0, 8.0])

    def crash(self) -> None:
        name = self.chance.choice(sorted(self.specs))
        if self.specs[name].config["version"] not in self.broken:
            self.up_at[name] = self.now + self.chance.choice([3.0, 10.0])
            self.starts[name] += 1

    def steps(self, version: int) -> dict[str, rollout.RolloutStep]:
        return {
            name: rollout.RolloutStep(before=each, after=spec(name, version, self.policy, group="web"))
            for name, each in self.specs.items()
        }


def _waved(fleet: RandomFleet, steps: dict[str, rollout.RolloutStep]) -> rollout.Rollout:
    specs = {name: step.after for name, step in steps.items() if step.after is not None}
    waves = plan.update_waves(specs, specs.keys(), lambda agent: "", fleet.unhealthy)
    for name, step in steps.items():
        step.wave = waves[name]
    plan_ = rows.RolloutPlan(operation=rollout.UPDATE)
    return rollout.Rollout(id="r", by="ann", plan=plan_, steps=steps, revision=1)


def play_update(fleet: RandomFleet, update: rollout.Rollout, *, crashes: bool, losses: float = 0.02) -> None:
    """Run it to its end; a registry that takes over knows the stored steps only."""
    engine = rollout.RolloutEngine(update, fleet.now)
    for _ in range(20_000):
        if fleet.chance.random() < losses:
            engine = rollout.RolloutEngine(update, fleet.now)
        if crashes and fleet.chance.random() < 0.01:
            fleet.crash()
        already_out = fleet.unhealthy
        begun = engine.tick(fleet.now, fleet)
        for name in begun:
            after = update.steps[name].after
            assert after is not None
            fleet.change(name, after)
        taken = set(begun) - set(already_out)
        assert not taken or len(taken | set(already_out)) <= fleet.policy.max_parallel
        assert len(update.named(rollout.RUNNING)) <= fleet.policy.max_parallel
        fleet.now += 0.5
        if update.state == rollout.STOPPING:
            update.state = rollout.STOPPED
        if engine.is_idle:
            return
    raise AssertionError(f"it does not end: {update}")


@pytest.mark.parametrize("seed", range(150))
def test_an_update_never_takes_more_than_allowed_and_ends_as_it_must(seed):
    fleet = RandomFleet(seed)
    update = _waved(fleet, fleet.steps(2))
    crashes = fleet.chance.random() < 0.5
    play_update(fleet, update, crashes=crashes)
    if not fleet.broken and not crashes:
        assert update.state == rollout.DONE
    if update.state == rollout.DONE:
        assert not fleet.broken
        assert {each.config["version"] for each in fleet.specs.values()} == {2}
        return
    assert update.state == rollout.STOPPED
    assert update.is_reverting == fleet.policy.auto_revert
    if fleet.broken:
        changed = [name for name, each in fleet.specs.items() if each.config["version"] == 2]
        assert len(changed) <= fleet.policy.max_parallel, "it stops at the first wave"
    if update.is_reverting:
        fleet.now += 20.0  # crashes are over
        steps = update.reversal()
        revert = _waved(fleet, steps)
        revert.reverts = update.id
        play_update(fleet, revert, crashes=False)
        assert revert.state == rollout.DONE
        assert {each.config["version"] for each in fleet.specs.values()} == {1}


def test_an_update_that_is_blocked_ends_at_its_progress_deadline():
    fleet = RandomFleet(1)
    names = ["web-0", "web-1", "web-2"]
    fleet.policy = POLICY
    fleet.specs = {name: spec(name, 1, POLICY, group="web") for name in names}
    fleet.up_at, fleet.starts = dict.fromkeys(names, -100.0), dict.fromkeys(names, 0)
    steps = {name: step for name, step in fleet.steps(2).items() if name != "web-2"}
    fleet.up_at["web-2"] = float("inf")  # not part of the update, and it does not work
    update = _waved(fleet, steps)
    play_update(fleet, update, crashes=False, losses=0.0)
    assert update.state == rollout.STOPPED
    assert "no progress for 200 s" in update.reason
    assert fleet.now >= 200
    assert {step.state for step in steps.values()} == {rollout.PENDING}


def test_the_log_of_a_step_that_failed_begins_with_the_step():
    update = rollout.Rollout(id="u", by="ann", plan=rows.RolloutPlan(operation="update"), revision=1)
    fleet = RandomFleet(1)
    fleet.broken = {2}
    update.steps = dict(list(fleet.steps(2).items())[:1])
    (name,) = update.steps
    engine = rollout.RolloutEngine(update, 0.0)
    assert engine.tick(10.0, fleet) == [name]
    assert engine.age_s(name, 15.0) == 5.0
    assert rollout.RolloutEngine(update, 12.0).age_s(name, 15.0) is None, "another registry does not know it"
    engine.fail(name, "it is broken")
    assert engine.age_s(name, 17.0) == 7.0


# With the real registry, manager and agent

UPDATE = {"max_parallel": 1, "min_healthy_time_s": 4.0, "healthy_deadline_s": 30.0}


def manifest(*names: str, update: Any = UPDATE, **config: Any) -> str:
    entry = {"type": "service", "agent": "host-a", "group": "web", "config": config, "update": update}
    return json.dumps({"resources": [{"name": name, **entry} for name in names]})


NAMES = ("web-0", "web-1", "web-2", "web-3")


async def least_up(world: RegistryWorld, names: tuple[str, ...], ends: asyncio.Event) -> int:
    """The lowest number of them that were up at once."""
    least = len(names)
    while not ends.is_set():
        up = [world.host.hosted[name].observed.state is health.HealthState.UP for name in names]
        least = min(least, sum(up))
        await asyncio.sleep(0.01)  # pace
    return least


def versions(world: RegistryWorld) -> list[Any]:
    resources = world.registry.state.resources
    return [resources[name].spec.config.get("ends") for name in NAMES]


def test_an_update_changes_one_after_the_other(run):
    async def scenario(world: RegistryWorld) -> None:
        loop = asyncio.get_running_loop()
        first = await world.client.apply(manifest(*NAMES), wait_s=60)
        assert first.counts == {"create": 4}
        planned = await world.client.plan(manifest(*NAMES, healthy=True))
        assert [(step.name, step.wave) for step in planned] == [
            (name, number) for number, name in enumerate(NAMES, start=1)
        ]
        ends, told, measured = asyncio.Event(), [], set()

        def progress(text: str, _: float) -> None:
            told.append(text)
            (family,) = world.measure._registry.collect()
            assert family.name == "muster_rollout_resources"
            counts = {sample.labels["state"]: sample.value for sample in family.samples}
            measured.add((counts.get("pending", 0), counts.get("done", 0)))

        watching = asyncio.create_task(least_up(world, NAMES, ends))
        began = loop.time()
        done = await world.client.apply(manifest(*NAMES, healthy=True), wait_s=120, progress=progress)
        assert measured >= {(3, 0), (2, 1), (1, 2), (0, 3)}, measured
        ends.set()
        assert await watching == 3
        assert loop.time() - began >= 4 * 4.0, "each was up for the time that its policy demands"
        assert [number for number in range(1, 5) if any(f"wave {number} of 4" in text for text in told)] == [
            *range(1, 5)
        ]
        (row,) = await world.client.rollouts(done.rollout)
        assert (row.state, row.counts, row.revision) == ("done", {"done": 4}, 2)
        assert await world.client.rollouts("web") == [row], "the last update of a group"
        assert [step.name for step in await world.client.rollout_steps("web")] == [*NAMES]
        with pytest.raises(errors.NotFound, match="no group of that name"):
            await world.client.pause("wbe")
        again = await world.client.apply(manifest(*NAMES, healthy=True), wait_s=60)
        assert (again.rollout, again.changed_count) == ("", 0)

    run(scenario)


@pytest.mark.parametrize("broken", [{"healthy": False}, {"ends": 1}], ids=["never healthy", "ends soon"])
def test_a_broken_release_stops_reverts_and_fails_the_command(run, broken):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        before = dict(world.registry.state.resources)
        for name in NAMES:
            adapter = world.host.hosted[name].adapter
            assert isinstance(adapter, test_as_desired.ServiceAdapter)
            adapter.output = f"boom in {name}"
        ends = asyncio.Event()
        watching = asyncio.create_task(least_up(world, NAMES, ends))
        with pytest.raises(errors.Refused, match=r"stopped: web-0 is .* reverts it") as failure:
            await world.client.apply(manifest(*NAMES, **broken), wait_s=300)
        assert "web-0: boom in web-0" in failure.value.__notes__
        rollouts = await world.client.rollouts()
        assert [row.revision for row in rollouts] == [1, 2, 3]
        assert (rollouts[1].reverted_by, rollouts[2].reverts) == (rollouts[2].id, rollouts[1].id)
        ended = await world.client.wait_rollout(rollouts[2].id, timeout_s=120)
        ends.set()
        assert ended.state == "done"
        assert await watching == 3
        await world.client.wait_settled(*NAMES, timeout_s=60)
        after = world.registry.state.resources
        assert {name: after[name].spec for name in NAMES} == {name: before[name].spec for name in NAMES}
        assert [after[name].generation for name in NAMES] == [3, 1, 1, 1]
        with pytest.raises(errors.Conflict, match="was reverted by"):
            await world.client.resume(rollouts[1].id)

    run(scenario)


def test_an_update_continues_after_the_loss_of_its_registry_and_manager(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        standby = await world.start_registry("registry-2")
        ends = asyncio.Event()
        watching = asyncio.create_task(least_up(world, NAMES, ends))
        begun = await world.client.apply(manifest(*NAMES, healthy=True))
        await until(lambda: sum(r.generation > 1 for r in world.registry.state.resources.values()) == 2)
        await world.manager.abandon()
        await world.registry.stop()
        await standby.acting.wait()
        world.registry = standby
        await world.stack.enter_async_context(
            manager.Manager(await world.net.connect("manager-2"), tick_s=0.1)
        )
        row = await world.client.wait_rollout(begun.rollout, timeout_s=300)
        ends.set()
        assert (row.state, row.counts) == ("done", {"done": 4})
        assert await watching == 3
        assert [standby.state.resources[name].generation for name in NAMES] == [2] * 4

    run(scenario)


def test_a_revert_continues_after_the_loss_of_its_registry(run, monkeypatch):
    log_end = operations.log_end

    async def cut_off(*_: Any, **__: Any) -> None:
        await asyncio.sleep(3600)

    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        standby = await world.start_registry("registry-2")
        begun = await world.client.apply(manifest(*NAMES, healthy=False))
        rollouts = world.registry._handlers.rollouts
        monkeypatch.setattr(operations, "log_end", cut_off)
        await until(lambda: rollouts._live[begun.rollout].rollout.state == rollout.STOPPING)
        monkeypatch.setattr(operations, "log_end", log_end)
        await world.registry.stop()
        await standby.acting.wait()
        world.registry = standby
        row = await world.client.wait_rollout(begun.rollout, timeout_s=120)
        assert (row.state, row.counts) == ("stopped", {"failed": 1, "pending": 3})
        assert (await world.client.wait_rollout(row.reverted_by, timeout_s=120)).state == "done"
        assert versions(world) == [None] * 4

    run(scenario)


def test_pause_resume_abort_undo_and_revisions(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        with pytest.raises(errors.Conflict, match="would delete all of it"):
            await world.client.undo("web")
        begun = await world.client.apply(manifest(*NAMES, healthy=True))
        assert (await world.client.pause(begun.rollout)).state == "paused"
        await asyncio.sleep(60)
        (row,) = await world.client.rollouts(begun.rollout)
        assert (row.state, row.counts) == ("paused", {"done": 1, "pending": 3})
        assert (await world.client.resume(begun.rollout)).state == "running"
        joined = await world.client.apply(manifest(*NAMES, healthy=True))
        assert joined.rollout == begun.rollout, "it leads there already"
        await until(lambda: world.registry.state.resources["web-1"].generation == 2)
        aborted = await world.client.abort(begun.rollout)
        assert aborted.state == "stopping"
        row = await world.client.wait_rollout(begun.rollout, timeout_s=60)
        assert row.reason == "aborted by ann"
        await world.client.wait_rollout(row.reverted_by, timeout_s=60)
        assert world.registry.state.resources["web-0"].spec.config == {}

        done = await world.client.apply(manifest(*NAMES, healthy=True), wait_s=120)
        shrunk = manifest(*NAMES, "web-4", update={**UPDATE, "max_parallel": 2}, healthy=True)
        await world.client.apply(shrunk, wait_s=120)
        revisions = await world.client.revisions("web")
        changes = {(row.revision, row.name): (row.act, row.changes) for row in revisions}
        assert changes[4, "web-0"] == ("change", {"config.healthy": (None, True)})
        assert changes[5, "web-4"][0] == "create"
        undone = await world.client.undo("web")
        assert (await world.client.wait_rollout(undone.id, timeout_s=120)).state == "done"
        await until(lambda: "web-4" not in world.registry.state.resources)
        assert world.registry.state.resources["web-0"].spec.config == {"healthy": True}
        undone = await world.client.undo("web", to=1)
        assert (await world.client.wait_rollout(undone.id, timeout_s=120)).state == "done"
        assert world.registry.state.resources["web-0"].spec.config == {}
        with pytest.raises(errors.NotFound, match="has no revision 77"):
            await world.client.undo("web", to=77)
        with pytest.raises(errors.NotFound, match="no revision of the group 'wbe'"):
            await world.client.undo("wbe")
        assert done.rollout

    run(scenario)


def test_a_wave_that_fails_while_the_update_is_paused_is_reverted_by_the_next_registry(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        standby = await world.start_registry("registry-2")
        begun = await world.client.apply(manifest(*NAMES, healthy=False))
        assert (await world.client.pause(begun.rollout)).counts == {"pending": 3, "running": 1}
        await world.registry.stop()
        await standby.acting.wait()
        world.registry = standby
        row = await world.client.wait_rollout(begun.rollout, timeout_s=120)
        assert (row.state, row.counts) == ("stopped", {"failed": 1, "pending": 3})
        assert (await world.client.wait_rollout(row.reverted_by, timeout_s=120)).state == "done"
        assert versions(world) == [None] * 4

    run(scenario)


def test_a_restart_of_a_group_takes_no_more_than_its_batch_and_survives_the_registry(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        standby = await world.start_registry("registry-2")
        ends = asyncio.Event()
        watching = asyncio.create_task(least_up(world, NAMES, ends))
        plan_ = rows.RolloutPlan(operation="restart", batch="2", healthy_s=30.0)
        begun = await world.client.rollout(plan_, where="group = 'web'")
        await until(lambda: test_as_desired.starts(world, "web-0") == 2)
        await world.registry.stop()
        await standby.acting.wait()
        world.registry = standby
        row = await world.client.wait_rollout(begun.id, timeout_s=120)
        ends.set()
        assert (row.state, row.counts) == ("done", {"done": 4})
        assert await watching == 2
        assert [test_as_desired.starts(world, name) for name in NAMES] == [2] * 4

    run(scenario)


def test_a_later_apply_replaces_an_update(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        first = await world.client.apply(manifest(*NAMES, healthy=False))
        second = await world.client.apply(manifest(*NAMES, healthy=True))
        row = await world.client.wait_rollout(second.rollout, timeout_s=200)
        assert row.state == "done"
        (row,) = await world.client.rollouts(first.rollout)
        assert (row.state, row.reason) == ("superseded", f"rollout {second.rollout} replaces it")
        adapter = world.host.hosted["web-3"].adapter
        assert isinstance(adapter, test_as_desired.ServiceAdapter)
        assert adapter.config.healthy

    run(scenario)


def test_an_undo_after_a_revert_returns_to_what_was_before_the_last_release_that_worked(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        await world.client.apply(manifest(*NAMES, healthy=True), wait_s=120)
        with pytest.raises(errors.Refused, match=r"reverts it"):
            await world.client.apply(manifest(*NAMES, healthy=False), wait_s=300)
        (*_, failed, revert) = await world.client.rollouts()
        assert failed.wave == 1, "the wave that failed is shown"
        await world.client.wait_rollout(revert.id, timeout_s=120)
        undone = await world.client.undo("web")
        assert (await world.client.wait_rollout(undone.id, timeout_s=120)).state == "done"
        assert [world.registry.state.resources[name].spec.config for name in NAMES] == [{}] * 4

    run(scenario)


def test_a_release_that_fails_returns_to_the_last_one_that_worked(run):
    """Not to the broken one that it replaces, whether that is still under way or being reverted."""

    async def scenario(world: RegistryWorld) -> None:
        policy = {**UPDATE, "canary": 3}
        await world.client.apply(manifest(*NAMES, update=policy), wait_s=60)
        for waits in (False, True):
            first = await world.client.apply(manifest(*NAMES, update=policy, healthy=False))
            if waits:
                row = await world.client.wait_rollout(first.rollout, timeout_s=200)
                assert row.reverted_by
            with pytest.raises(errors.Refused, match=r"reverts it"):
                await world.client.apply(manifest(*NAMES, update=policy, healthy=False, ends=1), wait_s=300)
            (*_, revert) = await world.client.rollouts()
            assert (await world.client.wait_rollout(revert.id, timeout_s=300)).state == "done"
            await world.client.wait_settled(*NAMES, timeout_s=60)
            assert [world.registry.state.resources[name].spec.config for name in NAMES] == [{}] * 4

    run(scenario)


def test_a_change_by_hand_during_an_update_is_kept(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        begun = await world.client.apply(manifest(*NAMES, healthy=True))
        await world.client.put("web-2", labels={"by": "hand"})
        await world.client.delete("web-3")
        row = await world.client.wait_rollout(begun.rollout, timeout_s=200)
        assert (row.state, row.counts) == ("done", {"done": 2, "skipped": 2})
        assert world.registry.state.resources["web-2"].spec.labels == {"by": "hand"}

    run(scenario)


def test_a_later_apply_of_some_resources_replaces_their_steps_only(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        first = await world.client.apply(manifest(*NAMES, healthy=True))
        await until(lambda: "web-1" in _began(world, first.rollout))
        # One that is done, one that has begun, and one that has not
        second = await world.client.apply(manifest(*NAMES[:3], life_s=9.0))
        rows_ = [await world.client.wait_rollout(each.rollout, timeout_s=300) for each in (second, first)]
        assert [row.state for row in rows_] == ["done", "done"]
        assert rows_[1].counts == {"done": 1, "replaced": 2, "skipped": 1}
        configs = [world.registry.state.resources[name].spec.config for name in NAMES]
        assert configs == [{"life_s": 9.0}] * 3 + [{"healthy": True}]

    run(scenario)


def test_what_another_update_has_replaced_is_not_reverted(run):
    async def scenario(world: RegistryWorld) -> None:
        await world.client.apply(manifest(*NAMES), wait_s=60)
        first = await world.client.apply(manifest(*NAMES, healthy=True))
        await until(lambda: "web-1" in _began(world, first.rollout))
        await world.client.apply(manifest("web-0", life_s=9.0), wait_s=100)
        aborted = await world.client.abort(first.rollout)
        assert aborted.state == "stopping"
        row = await world.client.wait_rollout(first.rollout, timeout_s=100)
        await world.client.wait_rollout(row.reverted_by, timeout_s=200)
        assert [world.registry.state.resources[name].spec.config for name in NAMES] == [
            {"life_s": 9.0},
            {},
            {},
            {},
        ]

    run(scenario)


def _began(world: RegistryWorld, id: str) -> set[str]:
    live = world.registry._handlers.rollouts._live.get(id)
    return set() if live is None else {n for n, step in live.rollout.steps.items() if step.state != "pending"}


def test_a_policy_that_cannot_be_is_refused_with_its_line(run):
    async def scenario(world: RegistryWorld) -> None:
        with pytest.raises(errors.InvalidInput, match=r"resources\[0\].update.max_parallel"):
            await world.client.apply(manifest("web-0", update={"max_parallel": 0}))
        with pytest.raises(errors.InvalidInput, match="min_healthy_time"):
            await world.client.apply(manifest("web-0", update={"min_healthy_time": 3}))

    run(scenario)
