"""The registry's decisions in pages, over restores, renames, drains and losses of connection.

In virtual time on the simulated bus, with the real registry, manager and agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

import msgspec
import pytest

from muster.bus import leases
from muster.bus.memory import network
from muster.bus.rpc import request_audit, server
from muster.bus.streams import key_value
from muster.core import errors, health, messages, subjects
from muster.core.telemetry import metrics
from muster.manage import client, protocol, rows
from muster.manage.adapters import memory
from muster.manage.agent import agent, operation_log, resource_host
from muster.manage.manager import agent_calls, manager, reconciler, zones
from muster.manage.registry import assignments, endpoint, operations, records
from muster.testing import virtual_clock
from muster.testing.eventually import eventually
from muster.trust.permissions import roles
from tests.manage import assignment_cases, log_copies

Scenario = Callable[["RegistryWorld"], Awaitable[None]]


def virtual_wall_s() -> float:
    return 1_800_000_000.0 + asyncio.get_running_loop().time()


class RegistryWorld:
    """A registry, a manager and an agent."""

    def __init__(self, net: network.SimulatedNetwork, stack: contextlib.AsyncExitStack) -> None:
        self.net: Any = net
        self.stack = stack
        self.client: client.ManageClient
        self.registry: Any
        self.manager: manager.Manager
        self.host: agent.Agent

    async def start(self, host: agent.Agent | None = None) -> None:
        net, enter = self.net, self.stack.enter_async_context
        self.registry = await self.start_registry("registry-1")
        self.manager = await self.start_manager("manager-1")
        clock = asyncio.get_running_loop().time
        self.host = await enter(
            host or agent.Agent(await net.connect("host-a"), None, beat_s=1.0, clock=clock)
        )
        await self.registry.acting.wait()
        self.client = client.ManageClient(await net.connect("ann"))
        await until(lambda: "host-a" in self.registry.processor.agents)

    async def start_manager(self, name: str) -> manager.Manager:
        made = manager.Manager(await self.net.connect(name), tick_s=0.1, clock=virtual_wall_s)
        return await self.stack.enter_async_context(made)

    async def start_registry(self, name: str) -> Any:
        self.measure = metrics.Metrics()
        made = endpoint.RegistryEndpoint(
            await self.net.connect(name), manager_ttl_s=3.0, clock=virtual_wall_s, measure=self.measure
        )
        return await self.stack.enter_async_context(made)

    async def apply(self, *names: str, **fields: Any) -> None:
        entries = [{"name": name, "type": "memory", "agent": "host-a", **fields} for name in names]
        await self.client.apply(json.dumps({"resources": entries}))
        for name in names:
            await self.client.wait(name, "up", timeout_s=120)

    def hosted(self, name: str) -> health.HealthState | None:
        entry = self.host.hosted.get(name)
        return (
            entry.adapter.state
            if entry is not None and isinstance(entry.adapter, memory.MemoryAdapter)
            else None
        )


def play(scenario: Scenario, *, starts: bool = True) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            world = RegistryWorld(network.SimulatedNetwork(1), stack)
            if starts:
                await world.start()
            await scenario(world)

    virtual_clock.run_virtual(run())


async def until(condition: Callable[[], bool], within_s: float = 120.0) -> None:
    await eventually(condition, timeout_s=within_s)


# Elections


@pytest.mark.parametrize("election_s", [4.0, *(5.0 + tenths / 10 for tenths in range(21)), 9.0])
def test_an_election_of_the_leases_replaces_neither_the_registry_nor_managers(monkeypatch, election_s: float):
    has_leader = True

    def stored(function: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(bucket: key_value.StreamKeyValue, *arguments: Any, **options: Any) -> Any:
            if bucket.bucket == leases.BUCKET and not has_leader:
                raise errors.Unavailable("no leader")
            return await function(bucket, *arguments, **options)

        return call

    for name in ("get", "create", "update"):
        monkeypatch.setattr(key_value.StreamKeyValue, name, stored(getattr(key_value.StreamKeyValue, name)))

    async def scenario(world: RegistryWorld) -> None:
        nonlocal has_leader
        standby = await world.start_registry("registry-2")
        for number in range(2, 5):
            await world.stack.enter_async_context(
                manager.Manager(await world.net.connect(f"manager-{number}"))
            )
        names = [f"web-{number}" for number in range(8)]
        await until(lambda: len(world.registry.processor.managers) == 4)
        await world.apply(*names)
        acting, lease = world.registry.processor, world.registry._lease
        owners = dict(acting.owners)
        has_leader = False
        await asyncio.sleep(election_s)
        if election_s > leases.TTL_S:
            assert not lease.held, "it does not act: another registry could by now"
        has_leader = True
        await until(lambda: lease.held, within_s=2.0)
        await asyncio.sleep(20.0)
        assert world.registry.processor is acting
        assert acting.owners == owners
        assert not standby.acting.is_set()
        assert (await world.client.describe("web-1")).spec.name == "web-1"

    play(scenario)


def test_a_registry_that_is_cut_off_is_replaced_within_ten_seconds():
    async def scenario(world: RegistryWorld) -> None:
        standby = await world.start_registry("registry-2")
        await world.stack.enter_async_context(
            manager.Manager(await world.net.connect("manager-2"), tick_s=0.1)
        )
        await world.apply(*(f"web-{number}" for number in range(4)))
        await until(lambda: world.registry.processor.owning_managers == {"manager-1", "manager-2"})
        cut_at = asyncio.get_running_loop().time()
        # Their connections stay open for 40 s: no broker reports them as closed.
        world.net.unplug("registry-1", "manager-1")
        await until(
            lambda: standby.processor is not None and standby.processor.owning_managers == {"manager-2"},
            within_s=30.0,
        )
        assert asyncio.get_running_loop().time() - cut_at < 10.0
        world.net.heal()

    play(scenario)


# Epochs after a restore


def test_a_registry_that_was_set_back_goes_beyond_the_epoch_that_agents_obey():
    async def scenario(world: RegistryWorld) -> None:
        host = agent.Agent(await world.net.connect("host-a"), None, beat_s=1.0)
        obeyed = operation_log.OperationRecord(
            name="web", type="memory", config={}, epoch=900, manager="manager-1"
        )
        host._get_or_create("web", obeyed)
        await world.start(host)
        await world.apply("web", "new")
        owners = world.registry.processor.owners
        assert owners["web"].epoch > 900 > owners["new"].epoch, "an agent raises its own resources only"
        # Its next manager has a higher one still.
        await world.manager.stop()
        await world.stack.enter_async_context(manager.Manager(await world.net.connect("manager-2")))
        await until(lambda: owners["web"].manager == "manager-2")
        assert owners["web"].epoch > 901
        await world.client.wait("web", "up")

    play(scenario, starts=False)


def test_an_agent_that_reports_an_absurd_period_harms_nothing_else():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        hostile = await world.net.connect("host-b")

        async def claimed(message: Any) -> None:
            answer = {"kind": "claimed/1", "period_s": 0.0, "zone": "another"}
            answer["observed"] = {"odd": {"exists": True, "state": "up"}}
            await message.respond(msgspec.msgpack.encode(answer))

        await hostile.subscribe(protocol.claim("host-b"), handler=claimed)
        await world.client.create({"name": "odd", "type": "memory", "agent": "host-b"})
        await until(lambda: "odd" in world.manager.managed)
        await asyncio.sleep(30)
        adapter: Any = world.host.hosted["web"].adapter
        adapter.die("lightning")
        await until(lambda: adapter.state is health.HealthState.UP)
        assert not world.manager._tasks.failures

    play(scenario)


def test_an_agent_that_does_not_reply_delays_no_other():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        silent = await world.net.connect("host-b")
        await silent.subscribe(protocol.operations_of("host-b"), handler=lambda _: None)
        calls = world.manager._agents

        def get(resource: str) -> protocol.Operation:
            epoch = world.registry.processor.owners["web"].epoch
            return protocol.Operation(id=resource, verb=protocol.Verb.GET, resource=resource, epoch=epoch)

        waiting = [
            asyncio.create_task(calls.call("host-b", get(f"r{number}")))
            for number in range(2 * agent_calls.AT_ONCE)
        ]
        await asyncio.sleep(1)
        async with asyncio.timeout(1):
            answer = await calls.call("host-a", get("web"))
        assert answer.outcome is messages.DecisionOutcome.DONE
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    play(scenario)


def test_an_agent_that_does_not_reply_to_claims_delays_no_other(monkeypatch):
    monkeypatch.setattr(manager, "CLAIMS_MAX", 1)

    async def scenario(world: RegistryWorld) -> None:
        silent = await world.net.connect("host-b")
        await silent.subscribe(protocol.claim("host-b"), handler=lambda _: None)
        names = [f"r{number:02}" for number in range(4 * manager.CLAIMS_AT_ONCE)]
        entries = [{"name": name, "type": "memory", "agent": "host-b"} for name in names]
        await world.client.apply(json.dumps({"resources": entries}))
        await until(lambda: len(world.manager.managed) == len(names))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await world.apply("web")
        assert loop.time() - began_s < manager.CLAIM_TIMEOUT_S

    play(scenario)


def test_the_time_for_an_operation_is_limited():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        for timeout_s in (0.0, 1e9):
            with pytest.raises(errors.InvalidInput, match="timeout_s"):
                await world.client.exec("echo", "web", timeout_s=timeout_s)

    play(scenario)


def test_only_so_many_zones_are_known(monkeypatch):
    monkeypatch.setattr(zones, "ZONES_MAX", 2)
    reachability = zones.ZoneReachability(0.0)
    for zone in ("a", "b", "c", "a"):
        reachability.record(zone, 1.0, 5.0)
    assert [reachability.last_seen_at(zone) for zone in "abc"] == [5.0, 5.0, 0.0]


def test_an_agent_that_reports_an_absurd_epoch_harms_nothing_else():
    core = assignments.AssignmentProcessor(term=1, ttl_s=15)
    core.accept(core.apply([protocol.ResourceSpec(name="web", type="memory", agent="a")], "u"))
    core.renew("m", protocol.RenewRequest(boot=1), 0.0)
    core.accept(core.assign())
    epoch = core.owners["web"].epoch
    lie = protocol.ResourceStatus(superseded_by=(1 << 63) - 1)
    changes, refused = core.apply_checkpoints("m", {"web": (epoch, lie)})
    assert (bool(changes), refused) == (False, {"web": epoch})
    # Only the present owner's report counts.
    for name, of in (("other", epoch), ("m", epoch - 1)):
        changes, refused = core.apply_checkpoints(
            name, {"web": (of, protocol.ResourceStatus(superseded_by=900))}
        )
        assert (bool(changes), refused) == (False, {"web": epoch})


def test_a_restored_log_gives_epochs_beyond_all_that_were_given_since():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        copied = log_copies.copy_log(world.net)
        before = world.registry.processor.owners["web"].epoch
        for _ in range(3):  # what happens after the backup
            await world.manager.stop()
            world.manager = await world.stack.enter_async_context(
                manager.Manager(await world.net.connect("manager-1"), tick_s=0.1)
            )
            await world.client.wait("web", "up")
            await until(lambda: world.registry.processor.owners["web"].boot == world.manager.renewal.boot)
        since = world.registry.processor.owners["web"].epoch
        assert since > before
        await world.registry.stop()
        await log_copies.restore_log(world.net, copied)
        world.registry = await world.start_registry("registry-2")
        await world.registry.acting.wait()
        await until(lambda: "web" in world.registry.processor.owners)
        assert world.registry.processor.owners["web"].epoch > since, "at once, without an agent's help"
        epoch = world.registry.processor.epoch
        await until(lambda: world.host.hosted["web"].record.epoch > since)
        await world.client.execute("web", "echo", {"text": "here"})
        await world.registry.stop()
        third = await world.start_registry("registry-3")
        await third.acting.wait()
        assert third.processor.epoch < epoch + 100, "a restart is no restore"

    play(scenario)


def test_a_manager_accepts_a_registry_with_lower_terms():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        renewal = world.manager.renewal
        renewal._term += 1_000  # as of a registry before the restore
        await asyncio.sleep(60)
        assert renewal.is_valid
        await world.apply("another")

    play(scenario)


# Pages


def test_what_a_manager_loses_is_sent_in_pages():
    core = assignments.AssignmentProcessor(term=1, ttl_s=15)
    all_names = [f"{'frankfurt-2-web-' * 7}{i:06d}" for i in range(20_000)]
    specs = [protocol.ResourceSpec(name=name, type="memory", agent="a") for name in all_names]
    core.accept(core.apply(specs, "u"))
    known: dict[str, tuple[protocol.RenewRequest, set[str]]] = {}

    def renew(name: str) -> int:
        """All pages. Returns how many."""
        request, names = known.setdefault(name, (protocol.RenewRequest(boot=hash(name) & 0xFFFF), set()))
        core.renew(name, request, 0.0)
        for number in range(1, 1_000):
            granted = core.renewal_page(name, request)
            messages.encode(granted, "msgpack")
            if granted.anew:
                names.clear()
            names.difference_update(granted.released)
            names.update(resource.spec.name for resource in granted.assigned)
            request = protocol.RenewRequest(
                boot=request.boot, term=granted.term, session=granted.session, revision=granted.revision
            )
            known[name] = (request, names)
            if not granted.more:
                return number
        raise AssertionError("no end of pages")

    def assign() -> None:
        while (changes := core.assign()).owners:
            core.accept(changes)

    renew("m1")
    assign()
    assert renew("m1") >= 20
    assert len(known["m1"][1]) == 20_000
    core.renew("m2", protocol.RenewRequest(boot=hash("m2") & 0xFFFF), 0.0)
    assign()
    renew("m1")
    renew("m2")
    assert {name: len(names) for name, (_, names) in known.items()} == {"m1": 10_000, "m2": 10_000}
    assert known["m1"][1] == {name for name, owner in core.owners.items() if owner.manager == "m1"}
    assert renew("m1") == 1
    assert not core.changes.released["m1"], "what is known to be known is dropped"
    # A manager whose lease expired gets a full list, even if it did not notice.
    core.managers["m2"].expires_at = -1.0
    core.expire(0.0)
    assign()
    renew("m2")
    assert not known["m2"][1]
    assignment_cases.check(core)


def test_orders_that_do_not_fit_into_a_message_are_sent_in_several():
    async def scenario(world: RegistryWorld) -> None:
        names = [f"r{i}" for i in range(30)]
        await world.apply(*names)
        plan = rows.RolloutPlan(operation="echo", batch="100%", arguments={"text": "x" * 50_000})
        begun = await world.client.rollout(plan, *names)
        await asyncio.sleep(60)
        (rollout,) = await world.client.rollouts(begun.id)
        assert (rollout.state, rollout.counts) == ("done", {"done": 30})
        steps = await world.client.rollout_steps(begun.id)
        assert [step.name for step in steps] == sorted(names)
        assert all("too long" in step.reason for step in steps)

    play(scenario)


# Rollouts


def test_a_rollout_continues_after_a_short_disconnect(monkeypatch):
    async def slow(self: memory.MemoryAdapter) -> None:
        await asyncio.sleep(2)

    monkeypatch.setattr(memory.MemoryAdapter, "do_echo", lambda self: slow(self))

    async def scenario(world: RegistryWorld) -> None:
        names = [f"r{i}" for i in range(6)]
        await world.apply(*names)
        begun = await world.client.rollout(rows.RolloutPlan(operation="echo", batch="1"), *names)
        await asyncio.sleep(5)
        registry, loop = world.registry, asyncio.get_running_loop()
        world.net._reconnect_soon = lambda bus: loop.call_later(1.0, world.net._reconnect, bus)
        term = registry.processor.term
        world.net.disconnect(registry.bus)
        await asyncio.sleep(120)
        assert registry.processor.term == term, "the lease was not lost"
        (rollout,) = await world.client.rollouts(begun.id)
        assert (rollout.state, rollout.counts) == ("done", {"done": 6})

    play(scenario)


def test_an_operation_has_its_outcome_although_the_registry_was_disconnected_meanwhile(monkeypatch):
    async def slow(self: memory.MemoryAdapter) -> str:
        self.done.append("slow")
        await asyncio.sleep(6)
        return "done"

    async def store_slowly(self: request_audit.RequestAudit, record: messages.Decision) -> None:
        await asyncio.sleep(2)  # longer than until the lease is renewed

    monkeypatch.setattr(memory.MemoryAdapter, "do_echo", slow)
    monkeypatch.setattr(request_audit.RequestAudit, "_store", store_slowly)

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        loop = asyncio.get_running_loop()
        world.net._reconnect_soon = lambda bus: loop.call_later(1.0, world.net._reconnect, bus)
        term = world.registry.processor.term
        loop.call_later(3.0, world.net.disconnect, world.registry.bus)
        assert await world.client.execute("web", "echo") == "done"
        assert world.registry.processor.term == term, "the lease was not lost"
        adapter: Any = world.host.hosted["web"].adapter
        assert adapter.done.count("slow") == 1

    play(scenario)


def test_the_id_of_an_operation_may_be_longer_than_agents_accept():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        for _ in range(2):
            (row,) = await world.client.exec("echo", "web", id="x" * 300)
            assert row.outcome == messages.DecisionOutcome.DONE.value
        adapter: Any = world.host.hosted["web"].adapter
        assert adapter.done.count("echo") == 1

    play(scenario)


def test_a_rollout_that_cannot_continue_stops_with_a_reason(monkeypatch):
    async def fail(*_: Any) -> Any:
        raise errors.LimitExceeded("too much of it")

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        monkeypatch.setattr(operations, "submit_operation", fail)
        begun = await world.client.rollout(rows.RolloutPlan(operation="echo"), "web")
        await asyncio.sleep(10)
        (rollout,) = await world.client.rollouts(begun.id)
        assert rollout.state == "stopped"
        assert "too much of it" in rollout.reason

    play(scenario)


def test_rollouts_continue_after_a_failure_of_their_loop():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        rollouts = world.registry._handlers.rollouts
        read, failures = rollouts._headers, [ValueError("a record that cannot be read")]

        def headers() -> Any:
            if failures:
                raise failures.pop()
            return read()

        rollouts._headers = headers
        await until(lambda: not failures)
        begun = await world.client.rollout(rows.RolloutPlan(operation="echo"), "web")
        await asyncio.sleep(60)
        (rollout,) = await world.client.rollouts(begun.id)
        assert rollout.state == "done"

    play(scenario)


def test_a_pause_that_was_not_stored_did_not_happen():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("a", "b")
        begun = await world.client.rollout(
            rows.RolloutPlan(operation="echo", batch="1", pause_s=20), "a", "b"
        )
        await asyncio.sleep(5)

        async def away(_: Any) -> None:
            raise errors.Unavailable("nothing can be stored")

        world.registry.write, kept = away, world.registry.write
        with pytest.raises(errors.Unavailable):
            await world.client.pause(begun.id)
        world.registry.write = kept
        await asyncio.sleep(60)
        (rollout,) = await world.client.rollouts(begun.id)
        assert rollout.state == "done"

    play(scenario)


def test_a_pause_while_the_last_batch_ends_leaves_the_rollout_done():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("a")
        write, rollouts = world.registry.write, world.registry._handlers.rollouts
        begun = await world.client.rollout(rows.RolloutPlan(operation="echo"), "a")

        async def slow(fill: Any) -> None:
            await asyncio.sleep(2)  # the batch ends meanwhile
            await write(fill)

        world.registry.write = slow
        assert rollouts._live[begun.id].rollout.state == "running"
        await rollouts.set_state(begun.id, "paused", "paused by ann")
        world.registry.write = write
        await asyncio.sleep(60)
        (ended,) = await world.client.rollouts(begun.id)
        assert (ended.state, ended.counts) == ("done", {"done": 1})

    play(scenario)


def test_resuming_a_rollout_whose_last_batch_stopped_it_ends_it():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("a")
        begun = await world.client.rollout(rows.RolloutPlan(operation="absent", errors_max=0), "a")
        await asyncio.sleep(5)
        (stopped,) = await world.client.rollouts(begun.id)
        assert stopped.state == "stopped"
        assert (await world.client.resume(begun.id)).state == "done"
        await asyncio.sleep(20)
        (ended,) = await world.client.rollouts(begun.id)
        assert (ended.state, ended.counts) == ("done", {"failed": 1})

    play(scenario)


def test_a_registry_that_gives_up_its_role_starts_no_rollout():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("a")
        registry = world.registry
        write, rollouts = registry.write, registry._handlers.rollouts
        stored, go_on = asyncio.Event(), asyncio.Event()

        async def slow(fill: Any) -> None:
            await write(fill)
            stored.set()
            await go_on.wait()

        registry.write = slow
        plan = {"operation": "echo"}
        beginning = asyncio.create_task(rollouts.begin("ann", plan, ["a"]))
        await stored.wait()
        term = registry.processor.term
        registry._lease.lost.set()
        await until(lambda: registry.processor is not None and registry.processor.term > term)
        go_on.set()
        begun = await beginning
        registry.write = write
        assert not rollouts._live
        await until(lambda: begun.id in registry._handlers.rollouts._live)
        await asyncio.sleep(20)
        (ended,) = await world.client.rollouts(begun.id)
        assert ended.state == "done"

    play(scenario)


# Writes in doubt


@pytest.mark.parametrize("has_standby", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
def test_a_request_whose_write_is_in_doubt_is_executed_once(is_stored: bool, has_standby: bool):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        standby = await world.start_registry("registry-2") if has_standby else world.registry
        term, stream = world.registry.processor.term, world.registry.log._log._stream

        async def doubtful(*arguments: Any, **options: Any) -> int:
            del stream.publish
            if is_stored:
                await stream.publish(*arguments, **options)
            raise errors.TimedOut("no acknowledgement")

        stream.publish = doubtful
        entry = {"name": "late", "type": "memory", "agent": "host-a"}
        # Its client repeats it, and the next owner of the log answers.
        result = await world.client.apply(json.dumps({"resources": [entry]}))
        assert result.counts == ({"keep": 1} if is_stored else {"create": 1})
        await world.client.wait("late", "up", timeout_s=60)
        acting = standby.processor or world.registry.processor
        assert acting.term > term
        assert acting.resources["late"].generation == 1

    play(scenario)


def test_an_owner_that_was_cut_off_in_the_middle_of_a_write_changes_nothing_afterwards():

    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        former = world.registry
        standby = await world.start_registry("registry-2")
        await until(lambda: standby.log.age_s < 2)
        publish, go_on = former.log._log._stream.publish, asyncio.Event()

        async def held_back(*arguments: Any, **options: Any) -> Any:
            await go_on.wait()
            return await publish(*arguments, **options)

        former.log._log._stream.publish = held_back
        stale = protocol.ResourceSpec(name="stale", type="memory", agent="host-a")
        writing = asyncio.create_task(former.commit(former.processor.apply([stale], "ann")))
        await asyncio.sleep(0.1)
        world.net.unplug("registry-1")
        await until(lambda: standby.processor is not None, within_s=15)
        await world.client.put("web", labels={"tier": "front"})
        world.net.heal()
        go_on.set()
        with pytest.raises(errors.Unavailable):
            await writing
        assert "stale" not in standby.processor.resources
        await until(lambda: "stale" not in former.log.fleet.resources and former.processor is None)
        await until(lambda: former.log.fleet.resources["web"].spec.labels == {"tier": "front"}, within_s=60)

    play(scenario)

    play(scenario)


def test_a_commit_is_not_interrupted_by_its_callers_cancellation():
    async def scenario(world: RegistryWorld) -> None:
        registry = world.registry
        store, begun, go = registry.log.write, asyncio.Event(), asyncio.Event()

        async def slow(*arguments: Any, **options: Any) -> None:
            begun.set()
            await go.wait()
            await store(*arguments, **options)

        registry.log.write = slow
        spec = protocol.ResourceSpec(name="web", type="memory", agent="host-a")

        async def write() -> None:
            async with registry.writing() as state:
                await registry.commit(state.apply([spec], "ann"))

        writer = asyncio.create_task(write())
        await begun.wait()
        writer.cancel()
        next_writer = asyncio.create_task(write())
        await asyncio.sleep(1)
        assert not next_writer.done(), "it waits until the first is stored"
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await writer
        await next_writer
        assert registry.processor.resources["web"].generation == 1

    play(scenario)


def test_what_is_stored_is_done_although_no_manager_can_be_notified():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        bus = world.registry.bus

        kept = bus.publish

        async def away(subject: str, data: bytes, **options: Any) -> None:
            if subject.endswith(".poke"):
                raise errors.NotConnected("no connection")
            await kept(subject, data, **options)

        bus.publish = away
        await world.client.put("web", labels={"tier": "front"})
        bus.publish = kept
        assert world.registry.processor.resources["web"].spec.labels == {"tier": "front"}

    play(scenario)


# Renaming and deleting


def test_deleting_while_it_is_renamed_leaves_nothing():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("old")
        world.net.unplug("host-a")
        await world.client.rename("old", "new")
        await asyncio.sleep(5)
        await world.client.delete("new")
        await asyncio.sleep(5)
        world.net.heal()
        await world.client.wait_gone("new", timeout_s=300)
        assert not world.host.hosted["old"].observed.exists
        assert not world.host.hosted["new"].observed.exists

    play(scenario)


def test_what_its_agent_cannot_rename_can_be_renamed_back_or_deleted(monkeypatch):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("old", "other")
        monkeypatch.setattr(memory.MemoryAdapter, "can_be_renamed", False)
        with pytest.raises(errors.Refused, match="cannot be renamed"):
            await world.client.rename("old", "new")
        # Where only the agent knows, it is renamed here first.
        monkeypatch.setattr("muster.manage.registry.handlers._require_renamable", lambda *_: None)
        await world.client.rename("old", "new")
        await world.client.rename("other", "another")
        await asyncio.sleep(20)
        shown = await world.client.describe("new")
        assert "a resource of type memory cannot be renamed" in shown.reason
        assert shown.status is not None
        assert shown.status.fault == shown.reason
        with pytest.raises(errors.Conflict):
            await world.client.rename("new", "third")
        await world.client.rename("new", "old")
        assert "cannot be renamed" not in (await world.client.wait("old", "up")).reason
        await world.client.delete("another")
        await world.client.wait_gone("another", timeout_s=60)
        assert world.hosted("old") is health.HealthState.UP
        assert not world.host.hosted["other"].observed.exists

    play(scenario)


def test_a_tick_that_fails_does_not_end_the_loop():
    async def scenario(world: RegistryWorld) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.manager, "_claim_soon", lambda: 1 / 0)
            await asyncio.sleep(5)
        failures = world.manager._tasks.failures
        assert failures["tick"]
        assert failures["renewal"]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(world.manager._checkpoints, "flush", lambda: 1 / 0)
            await asyncio.sleep(5)
        assert failures["checkpoints"]
        await world.apply("a")
        await world.host.stop()
        await eventually(
            lambda: world.manager.managed["a"].runtime.health.state is not health.HealthState.UP,
            timeout_s=120,
        )

    play(scenario)


def test_deleting_while_its_creation_is_in_doubt_leaves_nothing(monkeypatch):
    create = memory.MemoryAdapter.create

    async def slow(self: memory.MemoryAdapter, config: Any, *, start: bool) -> None:
        await asyncio.sleep(20)
        await create(self, config, start=start)

    monkeypatch.setattr(memory.MemoryAdapter, "create", slow)

    async def scenario(world: RegistryWorld) -> None:
        entry = {"name": "web", "type": "memory", "agent": "host-a"}
        await world.client.apply(json.dumps({"resources": [entry]}))
        await asyncio.sleep(5)
        world.net.unplug("manager-1")  # its successor sees nothing of the creation
        other = manager.Manager(await world.net.connect("manager-2"), tick_s=0.1)
        await world.stack.enter_async_context(other)
        await world.client.delete("web")
        await until(lambda: "web" in other.managed)
        assert not world.host.hosted["web"].observed.exists
        await world.client.wait_gone("web", timeout_s=120)
        await asyncio.sleep(60)
        assert not world.host.hosted["web"].observed.exists

    play(scenario)


def test_what_is_on_a_lost_machine_is_deleted_by_force():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        await world.host.stop()
        await world.client.delete("web")
        with pytest.raises(errors.TimedOut, match="force"):
            await world.client.wait_gone("web", timeout_s=60)
        await world.client.delete("web", force=True)
        await world.client.wait_gone("web", timeout_s=10)
        assert "web" not in world.registry.processor.owners
        await until(lambda: "web" not in world.manager.managed)

    play(scenario)


# Draining


def test_undraining_a_machine_starts_nothing_that_was_to_be_down():
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("on", "off", "resting")
        await world.client.put("off", desired="down")
        await world.client.drain("resting")
        await until(lambda: world.hosted("off") is world.hosted("resting") is health.HealthState.DOWN)
        assert (await world.client.drain("host-a")).changed == ["on"]
        await until(lambda: world.hosted("on") is health.HealthState.DOWN)
        assert {row.desired for row in await world.client.get()} == {"down", "drained"}
        with pytest.raises(errors.Conflict, match="drained"):
            await world.client.undrain("on")
        await world.client.undrain("host-a")
        await until(lambda: world.hosted("on") is health.HealthState.UP)
        await asyncio.sleep(60)
        assert world.hosted("off") is world.hosted("resting") is health.HealthState.DOWN
        await world.client.undrain("resting")
        await world.client.undrain("off")  # it was not drained
        await until(lambda: world.hosted("resting") is health.HealthState.UP)
        await asyncio.sleep(60)
        assert world.hosted("off") is health.HealthState.DOWN

    play(scenario)


@pytest.mark.parametrize("drained", [True, False])
def test_a_wait_for_a_drained_or_stopped_resource_lasts_until_it_is_down(drained):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        entry = {"name": "web", "type": "memory", "agent": "host-a", "labels": {"tier": "front"}}
        if drained:
            await world.client.drain("host-a")
        else:
            entry["desired"] = "down"
        await world.client.apply(json.dumps({"resources": [entry]}), wait_s=60)
        assert (await world.client.wait("web")).state == "down"

    play(scenario)


# Silence


@pytest.mark.parametrize(("slow_is_heard", "state"), [(False, "late"), (True, "down")])
def test_in_a_zone_with_mixed_periods_only_what_others_show_is_down(slow_is_heard, state):
    reachability = zones.ZoneReachability(0.0)
    for period_s in (5.0, 60.0):
        reachability.record("z", period_s, 100.0)
    up = health.Health(health.HealthState.UP, "", 0)
    runtime = reconciler.ResourceRuntime(
        up, protocol.ObservedState(True, health.HealthState.UP), last_seen_at=100.0, zone="z"
    )
    if slow_is_heard:
        reachability.record("z", 60.0, 160.0)
    for now in range(101, 170):
        reachability.update(float(now))
        reconciler.check_silence(
            runtime,
            float(now),
            0,
            zone_silent="z" in reachability.silent,
            connected_since=0.0,
            zone_last_seen_at=reachability.last_seen_at("z") if now >= 160 or not slow_is_heard else 100.0,
        )
    assert runtime.health.state.value == state


# Claims


async def test_a_claim_that_times_out_continues_at_its_position(connect, tmp_path, monkeypatch):
    """Each record costs a sync; the same claim again costs only those that are left."""
    stored: list[str] = []
    store = resource_host._store

    def count(path: Any, data: bytes) -> None:
        stored.append(path.stem)
        store(path, data)

    monkeypatch.setattr(resource_host, "_store", count)
    names = {f"r{i}": 1 for i in range(100)}
    bus = await connect("manager-1")
    claim = messages.encode(protocol.ClaimRequest(manager="manager-1", resources=names))
    async with agent.Agent(await connect("host-a"), tmp_path / "a"):
        for _ in range(2):
            answer = await bus.request(protocol.claim("host-a"), claim, timeout_s=20)
            assert len(messages.decode(answer.data, protocol.ClaimResult).observed) == 100
        assert sorted(stored) == sorted(names), "each once"
    async with agent.Agent(await connect("host-b"), tmp_path / "a", name="host-a") as again:
        await bus.request(protocol.claim("host-a"), claim, timeout_s=20)
        assert len(stored) == 100
        assert again.hosted["r7"].record.epoch == 1


# Selecting


def test_a_misspelt_attribute_is_an_error_that_names_the_right_one():
    async def scenario(world: RegistryWorld) -> None:
        assert await world.client.names(where="tier = 'front'") == [], "nothing is known yet"
        await world.apply("web", labels={"tier": "front"})
        for select in (
            lambda: world.client.get(where="teir = 'front'"),
            lambda: world.client.exec("echo", where="type = 'memory' AND teir IS NULL"),
            lambda: world.client.rollout(rows.RolloutPlan(operation="echo"), where="teir = 'front'"),
        ):
            with pytest.raises(errors.InvalidInput, match="teir") as caught:
                await select()
            assert caught.value.hint == "did you mean tier?"
        with pytest.raises(errors.InvalidInput, match="sate") as caught:
            async with asyncio.timeout(60):
                await anext(world.client.watch(where="sate = 'up'"))
        assert caught.value.hint == "did you mean state?"
        assert await world.client.names(where="tier = 'front' AND zone = 'default' AND os <> ''") == ["web"]
        assert await world.client.names(where="tier = 'back'") == []
        entry = {"name": "x", "type": "memory", "where": "zoen = 'default'"}
        with pytest.raises(errors.Unavailable) as refused:
            await world.client.create(entry)
        assert "did you mean zone?" in (refused.value.hint or "")

    play(scenario)


# Requests that are repeated after a take-over


async def _create(world: RegistryWorld) -> Any:
    row = await world.client.create({"name": "new", "type": "memory", "agent": "host-a"})
    return row.name, row.generation


async def _put(world: RegistryWorld) -> Any:
    row = await world.client.put("web", generation=1, labels={"tier": "front"})
    return row.spec.labels, row.generation


async def _rename(world: RegistryWorld) -> Any:
    return (await world.client.rename("web", "site")).name


async def _delete(world: RegistryWorld) -> Any:
    return (await world.client.delete("web", generation=1, force=True)).deleting


async def _forget(world: RegistryWorld) -> Any:
    return (await world.client.forget("host-b")).forgotten


async def _rollout(world: RegistryWorld) -> Any:
    row = await world.client.rollout(rows.RolloutPlan(operation="echo"), "web")
    await until(lambda: world.hosted("web") is health.HealthState.UP)
    return [other.id for other in await world.client.rollouts()] == [row.id]


async def _exec(world: RegistryWorld) -> Any:
    """Of a client that leaves the id of the operation to the registry."""
    await world.client._request(list[rows.ExecutionRow], "exec", operation="echo", names=["web"])
    adapter = world.host.hosted["web"].adapter
    assert isinstance(adapter, memory.MemoryAdapter)
    return adapter.done.count("echo")


async def _apply(world: RegistryWorld) -> Any:
    """The client waits for the update that its request has begun."""
    entry = {"name": "web", "type": "memory", "agent": "host-a", "config": {"value": 2}}
    result = await world.client.apply(json.dumps({"resources": [entry]}), wait_s=60)
    return [row.id for row in await world.client.rollouts()] == [result.rollout]


@pytest.mark.parametrize(
    ("request_", "result"),
    [
        (_apply, True),
        (_create, ("new", 1)),
        (_put, ({"tier": "front"}, 2)),
        (_rename, "site"),
        (_delete, ["web"]),
        (_forget, "host-b"),
        (_rollout, True),
        (_exec, 1),
    ],
)
def test_a_request_whose_reply_is_lost_with_its_registry_is_executed_once(monkeypatch, request_, result):
    async def scenario(world: RegistryWorld) -> None:
        await world.apply("web")
        known = records.RegistryChanges(agents={"host-b": records.AgentRecord()})
        await world.registry.commit(known)
        second = await world.start_registry("registry-2")
        respond = server.RpcServer._respond
        lost: list[asyncio.Task[None]] = []

        async def lose_first(self: server.RpcServer, message: Any, data: bytes) -> None:
            if ".request." in message.subject and not lost:
                lost.append(asyncio.create_task(world.registry.stop()))
            else:
                await respond(self, message, data)

        monkeypatch.setattr(server.RpcServer, "_respond", lose_first)
        assert await request_(world) == result
        assert second.acting.is_set()
        await lost[0]

    play(scenario)


def test_a_registry_whose_lease_ended_while_it_took_the_log_does_not_act():
    async def scenario(world: RegistryWorld) -> None:
        held: list[bool] = []  # whether the lease was held when it had the log
        acted: list[bool] = []
        registry: Any = await world.start_registry("registry-9")
        own = registry.log.own

        async def own_slowly(*arguments: Any) -> int:
            lease = registry._lease
            if not held:
                world.net.unplug("registry-9")
                await lease.lost.wait()
                world.net.heal()
            term: int = await own(*arguments)
            held.append(lease.held)
            return term

        class RecordedEvent(asyncio.Event):
            def set(self) -> None:
                acted.append(held[-1])
                super().set()

        registry.log.own, registry.acting = own_slowly, RecordedEvent()
        await world.registry.stop()
        await registry.acting.wait()
        assert (held, acted) == ([False, True], [True])

    play(scenario)


def test_a_change_whose_event_was_lost_is_repeated_before_the_next_heartbeat():
    async def scenario(world: RegistryWorld) -> None:
        await world.start(agent.Agent(await world.net.connect("host-a"), None, beat_s=60.0))
        await world.apply("a")
        host: Any = world.host
        host.publish_event = lambda *_, **__: None  # the broker of the manager failed
        host.hosted["a"].adapter.die()
        began_s = asyncio.get_running_loop().time()
        await until(lambda: world.hosted("a") is health.HealthState.UP)
        assert asyncio.get_running_loop().time() - began_s < 5.0
        await until(lambda: not host._changed)

    play(scenario, starts=False)


def test_only_operations_of_managers_are_free_of_charge():
    free = [
        each.name for each in endpoint.RegistryEndpoint._operations(mock.MagicMock()) if not each.is_charged
    ]
    patterns = [subjects.from_identity("manage", "*", word) for word in roles.OWN_WORDS["manage"]]
    for name in free:
        subject = subjects.from_identity("manage", "eve", name)
        assert any(subjects.matches(pattern, subject) for pattern in patterns), f"anyone may send {name}"
    assert len(free) == 3
