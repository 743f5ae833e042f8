"""Answers that grow with the fleet: bounded, or in pages that fit into a message."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from muster.core import errors, health, messages
from muster.manage import client, manifest, operation_results, protocol, secrets
from muster.manage import rows as manage_rows
from muster.manage.adapters import memory
from muster.manage.registry import (
    agent_selection,
    operations,
    records,
    secret_store,
    views,
)
from muster.manage.registry.rollouts import plan as update_plan
from muster.manage.registry.rollouts import rollout, rollout_executor
from muster.trust import sealed_box
from tests.manage.test_registry import RegistryWorld, play, until

LONG = "frankfurt-2-web-" * 7
MANIFEST = json.dumps({"resources": [{"name": "web", "type": "memory", "agent": "host-a"}]})


def test_lists_of_a_large_fleet_come_in_pages():
    async def scenario(world: RegistryWorld) -> None:
        core = world.registry.processor
        agents: dict[str, records.AgentRecord | None] = {
            f"{LONG}{i:05}": records.AgentRecord(facts={"text": "x" * 200}) for i in range(3_000)
        }
        await world.registry.commit(records.RegistryChanges(agents=agents))
        assert len(await world.client.agents()) == 3_001

        specs = [
            protocol.ResourceSpec(
                name=f"{LONG}{i:05}", type="memory", agent="nowhere", labels={"number": str(i)}
            )
            for i in range(3_000)
        ]
        await world.registry.commit(core.apply(specs, "ann"))
        rows = await world.client.get()
        names = [spec.name for spec in specs]
        assert [row.name for row in rows] == names == await world.client.names()
        assert await world.client.names(where="number IN ('1', '2999')") == [names[1], names[2999]]

        # Reasons may be of any length and in any script.
        status = protocol.ResourceStatus(reason="\N{CJK UNIFIED IDEOGRAPH-4E00}" * 4_000)
        core.accept(records.RegistryChanges(statuses=dict.fromkeys(names[:500], status)))
        assert len(await world.client.get(*names[:500])) == 500
        assert len(await world.client.get()) == 3_000

    play(scenario)


def test_managers_and_rollouts_come_in_pages(monkeypatch):
    monkeypatch.setattr(views, "PAGE", 7)

    async def scenario(world: RegistryWorld) -> None:
        core = world.registry.processor
        await world.apply("web")
        await world.manager.stop()
        for i in range(30):
            core.renew(f"m{i:02}", protocol.RenewRequest(boot=i), asyncio.get_running_loop().time())
        await until(lambda: core.owners["web"].manager in core.managers)
        page = await world.client._read(dict[str, Any], "managers")
        assert (len(page["items"]), page["next"]) == (7, "m06")
        rows = await world.client.managers()
        assert [row.name for row in rows] == sorted(core.managers)
        assert len(rows) >= 30
        assert [row.name for row in rows if row.resources] == [core.owners["web"].manager]

        # Two of them began in the same millisecond.
        made = [
            rollout.Rollout(
                id=f"id{i:02}", by="ann", plan=manage_rows.RolloutPlan(operation="echo"), at_ms=i // 2
            )
            for i in reversed(range(20))
        ]
        for item in made:
            item.state = rollout.DONE

        for entry in made:
            await world.registry.write(rollout_executor._records(entry, {}))
        page = await world.client._read(dict[str, Any], "rollouts")
        assert len(page["items"]) == 7
        assert page["next"] is not None
        assert [row.id for row in await world.client.rollouts()] == [f"id{i:02}" for i in range(20)]
        (row,) = await world.client.rollouts("id07")
        assert (row.id, row.state) == ("id07", rollout.DONE)
        with pytest.raises(errors.NotFound):
            await world.client.rollouts("id99")

    play(scenario)


@pytest.mark.parametrize(
    ("ask", "place"),
    [
        (lambda fleet: fleet.plan(MANIFEST), (manifest, "read")),
        (lambda fleet: fleet.apply(MANIFEST), (manifest, "read")),
        (lambda fleet: fleet.put("web", config={"value": 1}), (manifest, "read")),
        (lambda fleet: fleet.plan(MANIFEST), (agent_selection, "place_entries")),
        (lambda fleet: fleet.apply(MANIFEST), (agent_selection, "place_entries")),
        (lambda fleet: fleet.apply(MANIFEST), (update_plan, "plan")),
        (lambda fleet: fleet.get(where="name = 'web'"), (views, "select")),
        (
            lambda fleet: fleet.rollout(manage_rows.RolloutPlan(operation="echo"), where="name = 'web'"),
            (views, "select"),
        ),
        (lambda fleet: fleet.summary(), (views, "summary")),
        (lambda fleet: fleet.agents(), (views, "agents")),
        (lambda fleet: fleet.secrets(), (secret_store, "users")),
    ],
    ids=[
        "plan-read",
        "apply-read",
        "put-read",
        "plan",
        "apply",
        "apply-plan",
        "where",
        "rollout",
        "summary",
        "agents",
        "secrets",
    ],
)
def test_the_event_loop_continues_during_work_on_every_resource(monkeypatch, ask, place):
    turn, work = threading.Event(), getattr(*place)

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        loop = asyncio.get_running_loop()

        def waiting(*arguments: Any) -> Any:
            loop.call_soon_threadsafe(turn.set)
            assert turn.wait(5), "the event loop had no turn meanwhile"
            return work(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(*place, waiting)
            await ask(world.client)
        assert turn.is_set()

    play(scenario)


def test_a_manifest_is_stored_together_with_what_it_makes_superfluous():
    async def scenario(world: RegistryWorld) -> None:
        def entries(many: int) -> list[dict[str, Any]]:
            labels = {protocol.TOPOLOGY: "ring"}
            return [
                {"name": f"r{i}", "type": "memory", "agent": "nowhere", "labels": {**labels, "of": str(many)}}
                for i in range(many)
            ]

        await world.client._request(manage_rows.ApplyResult, "apply", entries=entries(3))
        commit, commits = world.registry.commit, []

        async def counted(changes: records.RegistryChanges, *more: Any) -> None:
            commits.append(set(changes.resources))
            await commit(changes, *more)

        world.registry.commit = counted
        done = await world.client._request(manage_rows.ApplyResult, "apply", entries=entries(2))
        assert done.deleting == ["r2"]
        assert [item for item in commits if item] == [{"r0", "r1", "r2"}]

    play(scenario)


def test_secrets_come_in_pages_and_name_some_of_their_users(monkeypatch):
    key = sealed_box.SealedBoxKey.create()

    async def scenario(world: RegistryWorld) -> None:
        world.registry._handlers._secret_store._open_key = lambda: key
        kept = secrets.SealedSecret(box="", by="ann", at_ms=1)
        names = [f"{LONG}{i:05}" for i in range(2_500)]

        record = json.dumps({"box": kept.box, "by": "ann", "at_ms": 1}).encode()
        await world.registry.write([(secret_store.SECRETS, name, record) for name in names])
        config = {"key": {"secret": f"store:{names[0]}"}, "again": {"secret": f"store:{names[0]}"}}
        users = [
            protocol.ResourceSpec(name=f"r{i:05}", type="memory", agent="nowhere", config=config)
            for i in range(2_000)
        ]
        await world.registry.commit(world.registry.processor.apply(users, "ann"))
        rows = await world.client.secrets()
        assert [row.name for row in rows] == names
        assert (rows[0].used_by_count, rows[0].used_by[:2]) == (2_000, ["r00000", "r00001"])
        assert rows[1].used_by_count == 0
        done = await world.client.set_secret(names[0], "value")
        assert (done.used_by_count, len(done.used_by)) == (2_000, secret_store.USERS_MAX)

    play(scenario)


def test_an_apply_that_changes_much_is_answered_with_counts_and_a_plan_in_pages():
    async def scenario(world: RegistryWorld) -> None:
        def text(value: str, many: int) -> str:
            entries = [
                {"name": f"r{i:05}", "type": "memory", "agent": "nowhere", "config": {"value": value}}
                for i in range(many)
            ]
            return json.dumps({"resources": entries})

        done = await world.client.apply(text("x" * 1_400, 400))
        assert (done.counts, done.changed_count) == ({"create": 400}, 400)
        assert done.changed[:2] == ["r00000", "r00001"]
        # Each line has the old value and the new one: together more than a message holds.
        after = text("y" * 1_400, 400)
        plan = await world.client.plan(after)
        assert [line.name for line in plan] == [f"r{i:05}" for i in range(400)]
        assert {line.act for line in plan} == {"change"}
        done = await world.client.apply(after)
        assert (done.counts, done.changed_count) == ({"change": 400}, 400)

        large = text("z" * 200_000, 1)
        await world.client.apply(large)
        (line,) = await world.client.plan(text("a" * 200_000, 1))
        assert "too long" in line.changes["…"][1]

    play(scenario)


def test_a_page_ends_where_it_is_full():
    assert views.page([], str, 2) == {"items": [], "next": None}
    assert views.page("abc", str, 3) == {"items": ["a", "b", "c"], "next": None}
    assert views.page("abc", str, 2) == {"items": ["a", "b"], "next": "b"}
    long = "x" * views.PAGE_BYTES
    assert views.page("abc", lambda key: long, 9) == {"items": [long], "next": "a"}


def test_long_results_of_an_exec_are_complete_or_marked():
    async def scenario(world: RegistryWorld) -> None:
        names = [f"r{i:02}" for i in range(30)]
        await world.apply(*names)
        executed = 0
        execute = memory.MemoryAdapter.execute

        async def talkative(self: memory.MemoryAdapter, operation: str, arguments: Any) -> Any:
            nonlocal executed
            if operation != "talk":
                return await execute(self, operation, arguments)
            executed += 1
            return "\n" * arguments["many"] + f"end of {self.context.name}"

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(memory.MemoryAdapter, "execute", talkative)
            rows = await world.client.exec("talk", *names, arguments={"many": 60_000})
            assert [row.resource for row in rows] == names
            assert not any(row.truncated for row in rows)
            assert {len(row.result) for row in rows} == {60_000 + len("end of r00")}
            assert executed == 30, "results are asked for again, operations are not"

            # What no message holds is cut where it is made.
            (row,) = await world.client.exec("talk", "r00", arguments={"many": 2 << 20})
            assert (row.outcome, row.truncated) == ("done", True)
            assert row.result.endswith("\nend of r00")
            assert len(row.result) > 200_000

        with pytest.raises(errors.LimitExceeded, match="at most 500"):
            await world.client._request(
                list[manage_rows.ExecutionRow], "exec", operation="talk", names=["r00"] * 501
            )

    play(scenario)


def test_results_fit_into_one_message():
    answers = [
        protocol.OperationResult(
            id=f"{'i' * 140}-{i}",
            outcome=messages.DecisionOutcome.FAILED,
            result=[{"line": "\x01" * 2_000}] if i % 2 else None,
            reason="\N{CJK UNIFIED IDEOGRAPH-4E00}" * 4_000,
        )
        for i in range(operations.ORDERS_MAX)
    ]
    fitting = operation_results.fit_message(answers)
    for codec in ("json", "msgpack"):
        messages.encode(protocol.OrderResults(results=tuple(fitting)), codec)
    assert all(result.truncated and result.reason for result in fitting)
    assert operation_results.fit_message(answers[:2]) == answers[:2]


def test_a_result_that_cannot_be_sent_is_left_out():
    answer = protocol.OperationResult(
        id="a", outcome=messages.DecisionOutcome.DONE, reason="\udc80", result=object()
    )
    result = operation_results.truncate_result(answer)
    assert (result.outcome, result.code, result.result) == (messages.DecisionOutcome.DONE, "bad-result", None)
    messages.encode(result)
    plain = msgspec.structs.replace(answer, result={"a": 1})
    assert operation_results.truncate_result(plain) == msgspec.structs.replace(plain, reason="?")


def test_facts_of_an_agent_that_are_too_long_are_refused():
    async def scenario(world: RegistryWorld) -> None:
        hello = protocol.AgentHello(boot=1, facts={"text": "x" * 100_000})
        with pytest.raises(errors.LimitExceeded, match="facts and labels of 'ann'"):
            await world.registry._store_agent("ann", hello)

    play(scenario)


class CountedSteps(dict[str, rollout.RolloutStep]):
    """Counts how often all steps are visited."""

    visits = 0

    def _visited(self, steps: Any) -> Any:
        self.visits += 1
        return steps

    def __iter__(self) -> Any:
        return self._visited(super().__iter__())

    def items(self) -> Any:
        return self._visited(super().items())

    def values(self) -> Any:
        return self._visited(super().values())


class HealthyView:
    """All resources are in their desired state."""

    unhealthy: Collection[str] = ()

    def members(self, group: str) -> Collection[str]:
        raise AssertionError("an operation has no groups")

    def health(self, name: str) -> rollout.StepHealth:
        return rollout.StepHealth(True, True, False, (), "up")


def test_a_batch_of_a_rollout_does_not_visit_all_steps():
    steps = CountedSteps({f"web-{number:03}": rollout.RolloutStep() for number in range(100)})
    plan = manage_rows.RolloutPlan(operation="restart", batch="1")
    running = rollout.Rollout(id="r", by="ann", plan=plan, steps=steps)
    engine, view = rollout.RolloutEngine(running, 0.0), HealthyView()
    done = protocol.OperationResult(id="0", outcome=messages.DecisionOutcome.DONE)
    batches = engine.tick(0.0, view)
    visited = steps.visits
    for second in range(1, 101):
        for name in list(engine.operating):
            engine.operated(name, done, second)
        running.header()
        batches += engine.tick(second, view)
    assert batches == [f"web-{number:03}" for number in range(100)]
    assert (running.state, running.header().counts) == (rollout.DONE, {rollout.DONE: 100})
    assert steps.visits == visited


def test_waiting_until_many_are_gone_asks_for_some_of_them_at_a_time(monkeypatch):
    monkeypatch.setattr(client, "NAMES_MAX", 3)
    asked: list[list[str]] = []

    async def scenario(world: RegistryWorld) -> None:
        names = [f"web-{number}" for number in range(8)]
        await world.apply(*names)
        read = world.client._read

        async def recorded(kind: Any, verb: str, **arguments: Any) -> Any:
            asked.append(arguments["names"]) if verb == "existing" else None
            assert verb in ("existing", "get")
            return await read(kind, verb, **arguments)

        monkeypatch.setattr(world.client, "_read", recorded)
        await world.client.delete(*names)
        await world.client.wait_gone(*names, timeout_s=60)
        assert await world.client.names() == []

    play(scenario)
    assert max(map(len, asked)) == 3
    assert {name for names in asked for name in names} == {f"web-{number}" for number in range(8)}


LARGE = 1 << 64  # JSON has such integers, MessagePack has not


def test_an_integer_that_a_renewal_could_not_send_is_refused():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        with pytest.raises(errors.InvalidInput, match="'db' has an integer of more than 64 bits"):
            await world.client.create(
                {"name": "db", "type": "memory", "agent": "host-a", "config": {"value": LARGE}}
            )
        with pytest.raises(errors.InvalidInput, match="64 bits"):
            await world.client.put("web", config={"value": [LARGE]})

    play(scenario)


@pytest.mark.parametrize("value", [LARGE, [0.1] * 120_000])
def test_a_result_that_is_small_in_json_only_reaches_the_caller(value):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        assert await world.client.execute("web", "echo", {"text": value}) == value

    play(scenario)


def test_what_one_agent_reports_does_not_stop_the_manager_of_others():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web", "db")
        bus, state = world.host._bus, world.registry.processor
        hostile: list[tuple[Any, Any, str]] = [
            ("json", LARGE, "ints"),
            ("json", [0.1] * 200_000, "more than"),
            ("msgpack", msgspec.msgpack.Ext(1, b""), "Ext"),
        ]
        for form, value, reason in hostile:
            observed = protocol.ObservedState(
                True, reason="x" * 100_000, digest="d" * 100_000, properties={"value": value}
            )
            event = protocol.ResourceEvent(
                resource="web", what=protocol.CHANGED, observed=observed, epoch=state.owners["web"].epoch
            )
            await bus.publish(protocol.event("host-a", "manager-1"), messages.encode(event, form))

            def stored(reason: str = reason) -> bool:
                return reason in state.statuses["web"].properties.get("left_out", "")

            await until(stored)
            assert len(msgspec.msgpack.encode(state.assignment("web"))) < 10_000
        beat = protocol.ResourceHeartbeat("web", health.HealthState.UP, epoch=1 << 70)
        batch = protocol.HeartbeatBatch(sequence=1, at_ms=1, period_s=1.0, beats=(beat,))
        await bus.publish(protocol.heartbeat("host-a", "manager-1"), messages.encode(batch))
        adapter: Any = world.host.hosted["db"].adapter
        adapter.die("lightning")
        await until(lambda: state.statuses["db"].restarts == 1)
        await world.client.wait("db", "up")
        assert not world.manager._tasks.failures

    play(scenario)
