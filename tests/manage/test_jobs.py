"""Jobs: one-off and periodic ones, over registries that end, and the history of their runs.

First the decisions alone; then with the real registry, manager and agent in virtual time
(`virtual_clock.run_virtual`). A run is that of a service of `test_as_desired`, which ends half a second after
it is up.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import random
from typing import Any

import msgspec
import pytest

from muster.core import errors
from muster.manage import cron, protocol, rows
from muster.manage.registry.jobs import executor, schedules
from tests.manage import test_as_desired
from tests.manage.test_registry import RegistryWorld, until

run = test_as_desired.run  # a fixture
MINUTE = 60_000


def at(text: str) -> int:
    return int(datetime.datetime.fromisoformat(f"2026-11-19T{text}:00+00:00").timestamp() * 1000)


def decide(
    now: int, *, since: int, active: tuple[str, ...] = (), queue: tuple[int, ...] = (), **policy: Any
) -> schedules.DueRuns:
    made = protocol.JobSchedule(**{"cron": "*/10 * * * *", **policy})
    state = schedules.ScheduleState(cron=made.cron, time_zone=made.time_zone, at_ms=since, queue=queue)
    return schedules.decide(made, state, active, now)


# What is due


def test_a_run_starts_when_it_is_due_and_once():
    assert decide(at("10:09"), since=at("10:00")).starts == ()
    due = decide(at("10:10"), since=at("10:00"))
    assert due.starts == (at("10:10"),)
    left = schedules.begun(due.state, due.starts)
    assert (left.at_ms, left.queue) == (at("10:10"), ())
    policy = protocol.JobSchedule(cron="*/10 * * * *")
    assert schedules.decide(policy, left, (), at("10:10") + 9_000).starts == ()
    assert schedules.decide(policy, left, (), at("10:00")).starts == (), "the clock was set back"


def test_a_schedule_follows_its_time_zone():
    due = decide(at("08:00"), since=at("06:00"), cron="30 8 * * *", time_zone="Europe/Berlin")
    assert due.state.at_ms == at("07:30")


@pytest.mark.parametrize(
    ("missed", "starts", "left", "count"),
    [
        ("skip", (), (), 3),
        ("last", ("10:30",), (), 2),
        ("all", ("10:10",), ("10:20", "10:30"), 0),
    ],
)
def test_missed_runs(missed, starts, left, count):
    due = decide(at("10:35"), since=at("10:00"), missed=missed)
    assert due.starts == tuple(map(at, starts))
    state = schedules.begun(due.state, due.starts)
    assert state.queue == tuple(map(at, left))
    assert (state.missed, state.at_ms) == (count, at("10:30"))


def test_a_run_that_is_due_makes_up_for_those_that_were_missed():
    due = decide(at("10:30"), since=at("10:00"))
    assert (due.starts, due.state.missed) == ((at("10:30"),), 2)


@pytest.mark.parametrize(
    ("concurrency", "starts", "stops", "skipped"),
    [("allow", True, False, 0), ("forbid", False, False, 1), ("replace", False, True, 0)],
)
def test_a_run_is_due_while_another_has_not_ended(concurrency, starts, stops, skipped):
    due = decide(at("10:10"), since=at("10:00"), active=("job-1",), concurrency=concurrency)
    assert due.starts == ((at("10:10"),) if starts else ())
    assert (due.stops, due.state.skipped) == (stops, skipped)
    policy = protocol.JobSchedule(cron="*/10 * * * *", concurrency=concurrency)
    later = schedules.decide(policy, due.state, (), at("10:10") + 5_000)
    assert later.starts == (() if concurrency == "forbid" else (at("10:10"),))


def test_missed_runs_that_wait_are_started_one_after_the_other():
    due = decide(at("10:45"), since=at("10:00"), missed="all", active=("job-1",))
    assert (due.starts, len(due.state.queue), due.state.skipped) == ((), 4, 0)
    policy = protocol.JobSchedule(cron="*/10 * * * *", missed="all")
    assert schedules.decide(policy, due.state, (), at("10:46")).starts == (at("10:10"),)


def test_a_year_without_a_registry_is_bounded():
    due = decide(
        at("10:00"),
        since=at("10:00") - 365 * 24 * 60 * MINUTE,
        cron="* * * * *",
        missed="all",
        concurrency="allow",
    )
    assert len(due.state.queue) == schedules.QUEUE_MAX
    assert due.state.queue[-1] == at("10:00")
    yearly = decide(at("10:00"), since=at("10:00") - 800 * 24 * 60 * MINUTE, cron="@yearly", missed="all")
    assert len(yearly.state.queue) == 2


def test_jobs_that_are_not_due_cost_nothing(monkeypatch):
    states = [
        schedules.ScheduleState(cron=f"{minute} * * * *", time_zone="Europe/Berlin", at_ms=at("10:00"))
        for minute in range(1, 60)
    ]
    for state in states:
        schedules.next_ms(state)
    monkeypatch.setattr(cron.CronSchedule, "times_after", None)  # nothing is computed again
    policy = protocol.JobSchedule(cron="@hourly")
    for state in states:
        now = at("10:00") + 1_000
        assert schedules.decide(policy, state, (), now).state is state
        assert schedules.suspend(state, now) is state, "nothing is stored"


def test_what_no_machine_can_run_in_time_is_missed():
    queue = (at("10:00"), at("10:10"))
    state = schedules.ScheduleState(cron="*/10 * * * *", time_zone="UTC", at_ms=queue[-1], queue=queue)
    kinds: Any = {"skip": (), "last": queue[1:], "all": queue}
    for missed, left in kinds.items():
        policy = protocol.JobSchedule(cron="*/10 * * * *", missed=missed)
        assert schedules.without_late(policy, state, at("10:30")).queue == left
        assert schedules.without_late(policy, state, queue[0]) == state


def test_a_changed_schedule_counts_from_now():
    policy = protocol.JobSchedule(cron="*/5 * * * *")
    old = schedules.ScheduleState(cron="@yearly", time_zone="UTC", at_ms=0, queue=(1,), missed=3)
    state = schedules.current(policy, old, at("10:01"))
    assert (state.at_ms, state.queue, state.missed) == (at("10:01"), (), 3)
    assert schedules.current(policy, state, at("10:02")) is state
    assert schedules.suspend(state, at("10:20")).at_ms == at("10:20")


def test_a_clock_that_was_far_ahead_stops_no_schedule():
    policy, year_ms = protocol.JobSchedule(cron="*/10 * * * *"), 366 * 86_400_000
    ahead = decide(at("10:10") + year_ms, since=at("10:00")).state
    state = schedules.current(policy, schedules.begun(ahead, ahead.queue), at("10:11"))
    assert schedules.decide(policy, state, (), at("10:19")).starts == ()
    assert schedules.decide(policy, state, (), at("10:20")).starts == (at("10:20"),)
    state = schedules.ScheduleState(cron=policy.cron, time_zone="UTC", at_ms=at("10:40"))
    assert schedules.current(policy, state, at("10:11")) is state, "a little: what has run is not due again"


@pytest.mark.parametrize("seed", range(30))
def test_no_run_is_started_twice_and_none_is_forgotten(seed):
    """At random times, by registries that know only what is stored."""
    chance = random.Random(seed)
    policy = protocol.JobSchedule(
        cron=chance.choice(["* * * * *", "*/7 * * * *", "@hourly"]),
        concurrency=chance.choice(["allow", "forbid", "replace"]),
        missed=chance.choice(["skip", "last", "all"]),
    )
    state = schedules.ScheduleState(cron=policy.cron, time_zone="UTC", at_ms=at("00:00"))
    now, ends_at, started = at("00:00"), 0, list[int]()
    for _ in range(200):
        now += chance.choice([1_000, 20_000, 60_000, 600_000])
        due = schedules.decide(policy, state, ("run",) if now < ends_at else (), now)
        state = due.state
        if chance.random() < 0.1:  # it could not be stored, or no machine was suitable
            continue
        if due.stops:
            ends_at = 0
        if due.starts:
            assert now >= ends_at or policy.concurrency == "allow"
            ends_at = now + chance.choice([1_000, 90_000, 900_000])
        started += due.starts
        state = schedules.begun(state, due.starts)
    assert started == sorted(set(started))
    counted = len(started) + len(state.queue) + state.skipped + state.missed
    passed = len(schedules._passed(msgspec.structs.replace(state, at_ms=at("00:00")), now))
    assert counted >= passed - len(state.queue)


# With the real registry, manager and agent


def job(name: str, *, depends_on: tuple[str, ...] = (), config: Any = None, **fields: Any) -> Any:
    entry = {"name": name, "type": "service", "where": "agent = 'host-a'", **fields}
    return {**entry, "config": {"ends": 0} if config is None else config, "depends_on": depends_on}


async def apply(world: RegistryWorld, *entries: Any, **options: Any) -> Any:
    return await world.client.apply(json.dumps({"resources": entries}), **options)


async def ended(world: RegistryWorld, name: str, count: int) -> list[rows.JobRunRow]:
    found: list[rows.JobRunRow] = []
    while len(found) < count:
        await asyncio.sleep(0.5)  # pace
        found = await world.client.job_runs(name)
    return found


async def replace_registry(world: RegistryWorld) -> None:
    standby = await world.start_registry(f"{world.registry.name}-next")
    await world.registry.stop()
    await standby.acting.wait()
    world.registry = standby


def test_a_job_runs_once_for_each_version_and_its_end_satisfies_dependants(run):
    async def scenario(world: RegistryWorld) -> None:
        migrate = job("migrate", job={})
        web = job("web", config={}, depends_on=("migrate",))
        await apply(world, migrate, web, wait_s=30)
        (row,) = await world.client.job_runs("migrate")
        assert (row.state, row.exit_code, row.resource, row.generation) == ("completed", 0, "migrate", 1)
        assert 0 < row.began_ms < row.ended_ms
        assert test_as_desired.starts(world, "migrate") == 1
        assert (await world.client.describe("migrate")).state == "completed"
        await replace_registry(world)
        await apply(world, migrate, wait_s=30)
        assert test_as_desired.starts(world, "migrate") == 1, "it is the same version"
        await apply(world, job("migrate", job={}, labels={"version": "2"}), wait_s=30)
        assert len(await ended(world, "migrate", 2)) == 2
        assert test_as_desired.starts(world, "migrate") == 2
        begun = await world.client.run_job("migrate")
        last = await world.client.wait_run(begun, timeout_s=30)
        assert (last.generation, last.state) == (3, "completed")
        await world.client.delete("web", "migrate")
        await world.client.wait_gone("web", "migrate")
        assert await world.client.job_runs() == []

    run(scenario)


def test_a_job_that_fails_keeps_its_output_and_its_dependants_down(run):
    async def scenario(world: RegistryWorld) -> None:
        failing = job("migrate", job={"keep": 2}, config={"ends": 3})
        with pytest.raises(errors.Refused, match="migrate is failed"):
            await apply(world, failing, job("web", config={}, depends_on=("migrate",)), wait_s=30)
        (row,) = await ended(world, "migrate", 1)
        assert (row.state, row.exit_code) == ("failed", 3)
        assert "web" not in world.host.hosted or not world.host.hosted["web"].observed.exists
        world.host.hosted["migrate"].adapter.output = "no such table\n"  # type: ignore[union-attr]
        for _ in range(2):
            last = await world.client.wait_run(await world.client.run_job("migrate"), timeout_s=30)
            assert last.output == "no such table\n"
        assert [row.generation for row in await world.client.job_runs("migrate")] == [2, 3], "it keeps two"

    run(scenario)


def test_a_run_that_takes_too_long_is_stopped_and_has_failed(run):
    async def scenario(world: RegistryWorld) -> None:
        with pytest.raises(errors.Refused, match="it ran longer than 5 s"):
            await apply(world, job("slow", job={"deadline_s": 5}, config={}), wait_s=30)
        (row,) = await ended(world, "slow", 1)
        assert row.state == "failed"
        assert 5_000 <= row.ended_ms - row.began_ms < 8_000
        await asyncio.sleep(10)
        assert test_as_desired.starts(world, "slow") == 1

    run(scenario)


def test_the_deadline_of_a_run_holds_for_the_next_manager(run):
    async def scenario(world: RegistryWorld) -> None:
        await apply(world, job("slow", job={"deadline_s": 30}, config={}))
        await world.client.wait("slow", "up")
        await asyncio.sleep(10)
        await world.manager.abandon()
        await world.start_manager("manager-2")
        (row,) = await ended(world, "slow", 1)
        assert row.state == "failed"
        assert 30_000 <= row.ended_ms - row.began_ms < 34_000

    run(scenario)


def test_a_run_that_ended_in_time_is_completed_however_late_that_is_seen(run):
    async def scenario(world: RegistryWorld) -> None:
        await apply(world, job("quick", job={"deadline_s": 10}, config={"ends": 0, "life_s": 5.0}))
        await world.client.wait("quick", "up")
        await world.manager.abandon()
        await asyncio.sleep(20)
        await world.start_manager("manager-2")
        (row,) = await ended(world, "quick", 1)
        assert (row.state, row.exit_code) == ("completed", 0)
        await world.client.drain("host-a")
        await world.client.undrain("host-a")
        await asyncio.sleep(5)
        assert (await world.client.describe("quick")).reason == row.reason

    run(scenario)


def test_an_update_waits_for_a_job_as_long_as_that_may_take(run):
    async def scenario(world: RegistryWorld) -> None:
        update = {"min_healthy_time_s": 1.0, "healthy_deadline_s": 20.0}
        web = job("web", config={}, update=update, depends_on=("migrate",))
        await apply(world, job("migrate", job={}, config={"ends": 0}), web, wait_s=60)
        web["config"] = {"healthy": True}
        slow = job("migrate", job={}, config={"ends": 0, "life_s": 400.0})
        done = await apply(world, slow, web, wait_s=900)
        assert (await world.client.rollouts(done.rollout))[0].state == "done"

    run(scenario)


def test_periodic_runs_over_registries_that_end(run):
    async def scenario(world: RegistryWorld) -> None:
        result = await apply(world, job("backup", schedule={"cron": "* * * * *"}, job={"keep": 4}), wait_s=5)
        assert result.changed_count == 1
        row = await world.client.describe("backup")
        assert (row.state, row.spec.agent, row.manager) == ("up", "", None)
        assert row.reason.startswith("next run: 20")
        for _ in range(4):
            await replace_registry(world)
            await asyncio.sleep(45)
        runs = await world.client.job_runs("backup")
        assert 2 <= len(runs) <= 4
        assert {(run.state, run.exit_code, run.agent) for run in runs} == {("completed", 0, "host-a")}
        minutes = [run.began_ms // MINUTE for run in runs]
        assert minutes == list(range(minutes[0], minutes[0] + len(runs))), "each minute once"
        await until(lambda: not world.registry.state.runs("backup"))
        assert set(world.registry.state.resources) == {"backup"}
        (shown,) = await world.client.jobs()
        assert (shown.cron, shown.active, shown.last_state) == ("* * * * *", 0, "completed")
        deleted = await world.client.delete("backup")
        await world.client.wait_gone(*deleted.deleting)
        assert await world.client.job_runs() == []
        assert await world.client.jobs() == []

    run(scenario)


def test_what_was_missed_while_no_registry_was_active(run):
    async def scenario(world: RegistryWorld) -> None:
        entries = [
            job(missed, schedule={"cron": "* * * * *", "missed": missed})
            for missed in ("skip", "last", "all")
        ]
        await apply(world, *entries, wait_s=5)
        await world.registry.stop()
        await asyncio.sleep(4 * 60)
        world.registry = await world.start_registry("registry-2")
        await world.registry.acting.wait()
        await ended(world, "all", 3)
        await until(lambda: all(not _schedule(world, name).queue for name in ("skip", "last", "all")))
        counts = {name: _schedule(world, name).missed for name in ("skip", "last", "all")}
        assert counts["all"] == 0
        assert counts["skip"] >= counts["last"] >= 2

    run(scenario)


def _schedule(world: RegistryWorld, name: str) -> schedules.ScheduleState:
    record = world.registry.log.get(executor.SCHEDULES, name)
    return msgspec.json.decode(record.value, type=schedules.ScheduleState)


def test_runs_that_do_not_end(run):
    async def scenario(world: RegistryWorld) -> None:
        kinds = ("allow", "forbid", "replace")
        schedule = {"cron": "* * * * *"}
        await apply(
            world,
            *(job(kind, schedule={**schedule, "concurrency": kind}, config={}) for kind in kinds),
            wait_s=5,
        )
        await asyncio.sleep(130)
        runs = {kind: world.registry.state.runs(kind) for kind in kinds}
        assert {kind: len(each) for kind, each in runs.items()} == {"allow": 2, "forbid": 1, "replace": 1}
        jobs = {row.name: row for row in await world.client.jobs()}
        assert {kind: row.active for kind, row in jobs.items()} == {"allow": 2, "forbid": 1, "replace": 1}
        assert {kind: row.skipped for kind, row in jobs.items()} == {"allow": 0, "forbid": 1, "replace": 0}
        assert [(row.job, row.state) for row in await world.client.job_runs()] == [("replace", "deleted")]
        with pytest.raises(errors.Conflict, match="has not ended"):
            await world.client.run_job("forbid")
        for need in ("allow", runs["allow"][0]):
            with pytest.raises(errors.InvalidInput, match="periodic job or a run of one"):
                await apply(world, job("web", config={}, depends_on=(need,)))
        deleted = await world.client.delete(*kinds)
        assert set(deleted.deleting) == {*kinds, *runs["allow"], *runs["forbid"], *runs["replace"]}
        await world.client.wait_gone(*deleted.deleting)
        assert await world.client.job_runs() == []

    run(scenario)


def test_a_periodic_job_that_is_down_or_has_no_machine(run):
    async def scenario(world: RegistryWorld) -> None:
        await apply(world, job("backup", schedule={"cron": "* * * * *"}, desired="down"), wait_s=5)
        await asyncio.sleep(65)
        assert (await world.client.describe("backup")).reason == "suspended"
        assert await world.client.job_runs() == []
        await world.client.drain("host-a")
        await apply(world, job("backup", schedule={"cron": "* * * * *", "missed": "skip"}), wait_s=5)
        await asyncio.sleep(130)
        row = await world.client.describe("backup")
        assert row.reason.startswith("a run is due and cannot start: 'backup-20")
        assert _schedule(world, "backup").missed == 1
        await world.client.undrain("host-a")
        assert (await ended(world, "backup", 1))[0].state == "completed"

    run(scenario)


def test_a_run_by_hand_is_a_run_of_its_own(run):
    async def scenario(world: RegistryWorld) -> None:
        await apply(world, job("backup", schedule={"cron": "@yearly"}), wait_s=5)
        begun = await world.client.run_job("backup")
        assert begun.resource.startswith("backup-")
        row = await world.client.wait_run(begun, timeout_s=30)
        assert (row.job, row.state) == ("backup", "completed")
        with pytest.raises(errors.NotFound, match="no job 'bakcup'"):
            await world.client.run_job("bakcup")
        with pytest.raises(errors.Refused, match="is a periodic job"):
            await world.client.execute("backup", "restart")
        with pytest.raises(errors.Conflict, match="cannot become a job with or without"):
            await apply(world, job("backup", job={}))
        assert (
            "muster job history backup"
            in (await world.client.log_parts({"backup": protocol.LogQuery()}))[0].reason
        )
        await world.client.put("backup", labels={"tier": "back"})
        assert (await world.client.describe("backup")).spec.labels == {"tier": "back"}

    run(scenario)


def test_a_run_that_its_machine_has_forgotten_does_not_run_again(run):
    async def scenario(world: RegistryWorld) -> None:
        await apply(world, job("once", job={}, config={}))
        await world.client.wait("once", "up")
        await until(lambda: world.registry.state.statuses["once"].ran == 1)
        hosted = world.host.hosted["once"]
        await hosted.adapter.delete()  # type: ignore[union-attr]
        hosted.adapter, hosted.record.config = None, None  # its machine was reinstalled
        hosted.record_observation(protocol.ObservedState(False))
        world.host.publish_event(hosted, protocol.CHANGED, hosted.observed)
        (row,) = await ended(world, "once", 1)
        assert (row.state, row.reason) == (
            "failed",
            "it ran, and its machine does not know any more how it ended",
        )
        await asyncio.sleep(20)
        assert not hosted.observed.exists

    run(scenario)
