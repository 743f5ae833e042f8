"""The registry's core against a naive model, on a log of the simulated bus.

Random operations, commits that fail, are cancelled or are in doubt, crashes after which a standby or a new
process continues, restores from a backup, managers that lose answers and clocks that jump.  Checked: what is
stored is the state before a decision or the state after it, never a part; memory is what is stored, on a
standby too; a manager that has asked knows what it owns; a resource's epoch rises; and in the end every
resource is obeyed by its agent under its owner's epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any
from unittest import mock

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from muster.bus.log import journal, pages
from muster.bus.memory import network, storage
from muster.core import errors, health
from muster.manage import protocol
from muster.manage.registry import assignments, records, registry_log
from muster.supervision import tasks
from muster.testing import virtual_clock
from tests.manage import assignment_cases, log_copies

TTL_S = 15.0
AGENTS = ["a", "b"]
MANAGERS = ["m1", "m2", "m3"]
NAMES = [f"r{number}" for number in range(4)]
BULK = [f"bulk-{number:04}" for number in range(1_100)]  # in one decision

names = st.sampled_from(NAMES)
few = st.lists(names, min_size=1, max_size=3, unique=True)
some_names = st.one_of(few, few, st.just(BULK))
agents = st.sampled_from(AGENTS)
managers = st.sampled_from(MANAGERS)
PAGE_BYTES = 20_000  # smaller than the decision about `BULK`, which is stored as a body
TRIM_BYTES_MIN = 100_000
#: What becomes of a commit, and at which of its messages.
fates = st.sampled_from(["stored"] * 3 + ["refused", "cancelled", "in doubt"])
turns = st.sampled_from([1, 2, 3])


class ModelManager:
    """Knows what it was granted, and nothing else."""

    def __init__(self, boot: int) -> None:
        self.asked = protocol.RenewRequest(boot=boot)
        self.known: dict[str, protocol.Assignment] = {}
        self.named: set[str] | None = None

    def take(self, granted: protocol.RenewResult) -> None:
        if granted.anew:
            self.named = set()
        for name in granted.released:
            self.known.pop(name, None)
        for assignment in granted.assigned:
            self.known[assignment.spec.name] = assignment
            if self.named is not None:
                self.named.add(assignment.spec.name)
        if not granted.more and self.named is not None:
            self.known = {name: item for name, item in self.known.items() if name in self.named}
            self.named = None
        self.asked = protocol.RenewRequest(
            boot=self.asked.boot, term=granted.term, session=granted.session, revision=granted.revision
        )


class RegistryModel:
    """What a user expects of the registry."""

    def __init__(self) -> None:
        self.agents: dict[str, bool] = {}  # whether it is drained
        self.resources: dict[str, dict[str, Any]] = {}

    def seen(self) -> tuple[dict[str, bool], dict[str, dict[str, Any]]]:
        return self.agents, self.resources


def seen(core: assignments.AssignmentProcessor) -> tuple[dict[str, bool], dict[str, dict[str, Any]]]:
    return (
        {name: agent.cordoned for name, agent in core.agents.items()},
        {
            name: {
                "agent": resource.spec.agent,
                "desired": resource.spec.desired,
                "generation": resource.generation,
                "deleting": resource.deleting,
                "formerly": resource.formerly,
            }
            for name, resource in core.resources.items()
        },
    )


def core_state(core: assignments.AssignmentProcessor) -> tuple[Any, ...]:
    return core.resources, core.owners, core.statuses, core.agents, core.epoch


class Registries(stateful.RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner(loop_factory=virtual_clock.VirtualLoop)
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(mock.patch.object(pages, "PAGE_BYTES", PAGE_BYTES))
        self.stack.enter_context(mock.patch.object(journal, "TRIM_BYTES_MIN", TRIM_BYTES_MIN))
        self.net = network.SimulatedNetwork(1)
        self.log: Any = None
        self.standby = self.run(self._open())
        self.term = 0
        self.now = 1_000.0
        self.model = RegistryModel()
        self.managers: dict[str, ModelManager] = {}
        self.boots = 0
        self.obeyed: dict[str, int] = {}  # by agents, of a resource: the highest epoch
        self.epochs: dict[str, int] = {}  # of each resource that is there: the last given
        self.backups: list[tuple[storage.SimulatedLog, RegistryModel]] = []
        self.interruptions: list[tuple[str, int]] = []
        self.core: assignments.AssignmentProcessor
        self.act()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    async def _open(self) -> Any:
        log: Any = await registry_log.RegistryLog.open(await self.net.connect("registry"), ttl_s=TTL_S)
        await log.start()
        publish = log._log._stream.publish

        async def interrupted(*arguments: Any, **options: Any) -> Any:
            if not self.interruptions:
                return await publish(*arguments, **options)
            fate, turn = self.interruptions[0]
            self.interruptions[0] = (fate, turn - 1)
            if turn > 1:
                return await publish(*arguments, **options)
            self.interruptions.clear()
            if fate == "refused":
                raise errors.LimitExceeded("the disk is full")
            sequence = await publish(*arguments, **options)
            if fate == "in doubt":
                raise errors.TimedOut("the connection broke")
            return sequence

        log._log._stream.publish = interrupted
        return log

    async def _end(self) -> None:
        for log in (self.log, self.standby):
            if log is not None:
                await log.stop()

    def act(self, *, is_warm: bool = True) -> None:
        """A registry begins a term: the standby, or a new process."""
        former = self.log
        self.log, self.standby = self.standby, self.run(self._open())
        if not is_warm:
            self.log, self.standby = self.standby, self.log
        self.term = self.run(self.log.own(self.term + 1))
        if former is not None:
            self.run(former.stop())
        self.core = self.log.fleet
        self.core.begin_term(self.term, self.term * 1_000_000)
        assignment_cases.check(self.core)

    def commit(
        self, changes: records.RegistryChanges, after: RegistryModel, fate: str = "stored", turn: int = 1
    ) -> bool:
        """Whether it was stored, as far as the registry knows."""
        if not changes:
            return True
        before = self.model
        if fate != "stored":
            self.interruptions = [(fate, turn)]
        try:
            self.run(self._commit(changes, cancelled=fate == "cancelled"))
        except errors.Unavailable:
            self._read_again(before, after)
            return False
        except errors.LimitExceeded:
            assert fate == "refused"
            self._accepted(before)
            return False
        except asyncio.CancelledError:
            pass  # and it was stored all the same
        finally:
            self.interruptions = []
        self._accepted(after)
        return True

    async def _commit(self, changes: records.RegistryChanges, *, cancelled: bool) -> None:
        changed = registry_log.written(changes, epoch=self.core.epoch)
        work = asyncio.ensure_future(tasks.finish(self.log.write(changed)))
        if cancelled:
            await asyncio.sleep(0)
            work.cancel()
        await work

    def _read_again(self, before: RegistryModel, after: RegistryModel) -> None:
        """The process ends; another reads what is stored: all of the decision, or nothing of it."""
        self.act()
        assert seen(self.core) in (before.seen(), after.seen()), "a part of a decision is stored"
        self._accepted(before if seen(self.core) == before.seen() else after)

    def _accepted(self, after: RegistryModel) -> None:
        self.model = after
        assert seen(self.core) == after.seen()
        assignment_cases.check(self.core)
        for name, owner in self.core.owners.items():
            assert owner.epoch >= self.epochs.get(name, 0), f"the epoch of {name} fell"
        self.epochs = {name: owner.epoch for name, owner in self.core.owners.items()}

    def next_model(self) -> RegistryModel:
        after = RegistryModel()
        after.agents = dict(self.model.agents)
        after.resources = {name: dict(resource) for name, resource in self.model.resources.items()}
        return after

    # Users

    @stateful.rule(agent=agents, fate=fates)
    def enrol(self, agent: str, fate: str) -> None:
        after = self.next_model()
        after.agents.setdefault(agent, False)
        if agent not in self.model.agents:
            self.commit(records.RegistryChanges(agents={agent: records.AgentRecord()}), after, fate)

    @stateful.rule(
        values=some_names, agent=agents, desired=st.sampled_from(["up", "down"]), fate=fates, turn=turns
    )
    def apply(self, values: list[str], agent: str, desired: str, fate: str, turn: int) -> None:
        self._apply(values, agent, desired, fate, turn)

    @stateful.rule(
        desired=st.sampled_from(["up", "down"]), fate=st.sampled_from(["refused", "in doubt"]), turn=turns
    )
    def interrupt_a_large_decision(self, desired: str, fate: str, turn: int) -> None:
        agent = self.model.resources.get(BULK[0], {}).get("agent", AGENTS[0])
        self._apply(BULK, agent, desired, fate, turn)

    def _apply(self, values: list[str], agent: str, desired: str, fate: str, turn: int) -> None:
        after = self.next_model()
        formerly = {resource["formerly"] for resource in self.model.resources.values()}
        specs = [
            protocol.ResourceSpec(
                name=name, type="memory", agent=agent, desired=protocol.DesiredState(desired)
            )
            for name in values
        ]
        there = [self.model.resources[name] for name in values if name in self.model.resources]
        refused = formerly & {*values} or any(item["deleting"] or item["agent"] != agent for item in there)
        try:
            changes = self.core.apply(specs, "ann")
        except errors.Conflict:
            assert refused
            return
        assert not refused
        for spec in specs:
            before = after.resources.get(spec.name)
            if before is None or before["desired"] is not spec.desired:
                after.resources[spec.name] = {
                    "agent": agent,
                    "desired": spec.desired,
                    "generation": before["generation"] + 1 if before else 1,
                    "deleting": False,
                    "formerly": before["formerly"] if before else "",
                }
        self.commit(changes, after, fate, turn)

    @stateful.rule(values=some_names, force=st.booleans(), fate=fates, turn=turns)
    def delete(self, values: list[str], force: bool, fate: str, turn: int) -> None:
        after = self.next_model()
        try:
            changes = self.core.delete(values, "ann", force=force)
        except errors.NotFound:
            assert not {*values} <= self.model.resources.keys()
            return
        for name in values:
            if force:
                del after.resources[name]
            elif not after.resources[name]["deleting"]:
                after.resources[name]["deleting"] = True
                after.resources[name]["generation"] += 1
        self.commit(changes, after, fate, turn)

    @stateful.rule(name=names, to=names, fate=fates)
    def rename(self, name: str, to: str, fate: str) -> None:
        after = self.next_model()
        before = self.model.resources.get(name)
        taken = to in self.model.resources or any(
            other != name and resource["formerly"] == to for other, resource in self.model.resources.items()
        )
        allowed = before is not None and not taken and not before["deleting"]
        allowed = allowed and before is not None and before["formerly"] in ("", to)
        try:
            changes = self.core.rename(name, to, "ann")
        except (errors.Refused, errors.NotFound, errors.AlreadyExists):
            assert not allowed
            return
        assert allowed
        moved = after.resources.pop(name)
        after.resources[to] = {**moved, "generation": moved["generation"] + 1, "formerly": name}
        self.commit(changes, after, fate)

    @stateful.rule(name=st.one_of(names, agents), drain=st.booleans(), fate=fates)
    def drain(self, name: str, drain: bool, fate: str) -> None:
        after = self.next_model()
        up, drained = protocol.DesiredState.UP, protocol.DesiredState.DRAINED
        try:
            changes = self.core.set_desired(name, drained if drain else up, "ann")
        except errors.NotFound:
            assert name not in self.model.resources
            assert name not in self.model.agents
            return
        except errors.Conflict:
            assert not drain
            assert self.model.agents[self.model.resources[name]["agent"]]
            return
        if name in after.resources:
            resource = after.resources[name]
            if not resource["deleting"] and resource["desired"] is (up if drain else drained):
                resource["desired"], resource["generation"] = (
                    drained if drain else up,
                    resource["generation"] + 1,
                )
        else:
            after.agents[name] = drain
        self.commit(changes, after, fate)

    @stateful.rule(agent=agents, fate=fates, turn=turns)
    def forget(self, agent: str, fate: str, turn: int) -> None:
        after = self.next_model()
        try:
            changes = self.core.forget(agent)
        except errors.NotFound:
            assert agent not in self.model.agents
            return
        after.agents[agent] = True  # drained
        after.resources = {
            name: resource for name, resource in after.resources.items() if resource["agent"] != agent
        }
        self.commit(changes, after, fate, turn)

    # Managers

    @stateful.rule(name=managers, again=st.booleans())
    def start_manager(self, name: str, again: bool) -> None:
        if again or name not in self.managers:
            self.boots += 1
            self.managers[name] = ModelManager(self.boots)
            self.core.renew(name, self.managers[name].asked, self.now)

    @stateful.rule(name=managers, pages=st.integers(0, 3), lost=st.booleans())
    def renew(self, name: str, pages: int, lost: bool) -> None:
        """Some pages; the last answer may be lost."""
        manager = self.managers.get(name)
        if manager is None:
            return
        self.core.renew(name, manager.asked, self.now)
        for page in range(pages):
            granted = self.core.renewal_page(name, manager.asked)
            if not (lost and page == pages - 1):
                manager.take(granted)
            if not granted.more:
                break

    @stateful.rule(fate=fates, turn=turns)
    def assign(self, fate: str, turn: int) -> None:
        changes = self.core.assign()
        self.commit(changes, self.next_model(), fate, turn)

    @stateful.rule(step_s=st.sampled_from([-3600.0, 1.0, TTL_S + 1, 3600.0]))
    def clock_steps(self, step_s: float) -> None:
        self.now += step_s
        for name in self.core.expire(self.now):
            self.managers.pop(name, None) if step_s == 3600.0 else None

    @stateful.rule(name=managers, data=st.data(), gone=st.booleans(), again=st.booleans(), fate=fates)
    def checkpoint(self, name: str, data: st.DataObject, gone: bool, again: bool, fate: str) -> None:
        """Of what a manager knows, which may be long out of date; perhaps sent twice."""
        manager = self.managers.get(name)
        if manager is None or not manager.known:
            return
        values = data.draw(
            st.lists(st.sampled_from(sorted(manager.known)), min_size=1, max_size=3, unique=True)
        )
        items = {}
        for key in values:
            known = manager.known[key]
            if (higher := self.claim(key, known.epoch)) is not None:
                status = protocol.ResourceStatus(superseded_by=higher)
            else:
                status = protocol.ResourceStatus(
                    state=health.HealthState.UP, generation=known.generation, gone=gone and known.deleting
                )
            items[key] = (known.epoch, status)
        for _ in range(2 if again else 1):
            changes, refused = self.core.apply_checkpoints(name, items)
            after = self.next_model()
            for key, resource in changes.resources.items():
                assert key not in refused
                if resource is None:
                    assert after.resources.pop(key)["deleting"]
                else:
                    assert after.resources[key]["formerly"]
                    after.resources[key]["formerly"] = ""
            self.commit(changes, after, fate)

    def claim(self, name: str, epoch: int) -> int | None:
        """An agent accepts the highest epoch only; returns that, if it is above this one."""
        if epoch < self.obeyed.get(name, 0):
            return self.obeyed[name]
        self.obeyed[name] = epoch
        return None

    # Ends and beginnings

    @stateful.rule(is_warm=st.booleans())
    def crash(self, is_warm: bool) -> None:
        before = core_state(self.core)
        self.act(is_warm=is_warm)
        assert core_state(self.core) == before, "memory was not what is stored"

    @stateful.precondition(lambda self: len(self.backups) < 2)
    @stateful.rule()
    def back_up(self) -> None:
        self.backups.append((log_copies.copy_log(self.net), self.model))

    @stateful.precondition(lambda self: self.backups)
    @stateful.rule(is_marked=st.booleans())
    def restore(self, is_marked: bool) -> None:
        """Not ``is_marked``: as where files of the broker were copied back."""
        copied, model = self.backups.pop()
        self.backups.clear()
        epoch = self.core.epoch
        self.run(self._end())
        self.run(log_copies.restore_log(self.net, copied, is_marked=is_marked))
        self.log, self.standby = None, self.run(self._open())
        self.act()
        self.epochs = {}
        self._accepted(model)
        assert not is_marked or self.core.epoch >= epoch, "a restored registry goes on beyond what was given"

    def teardown(self) -> None:
        try:
            self.crash(False)
            self._settle()
            self.run(self._end())
        finally:
            self.stack.close()
            self.runner.close()

    def _settle(self) -> None:
        """All managers renew until nothing changes: each knows what it owns, and agents accept its epoch."""
        self.managers = {
            name: self.managers.get(name) or ModelManager(900 + n) for n, name in enumerate(MANAGERS)
        }
        for name, manager in self.managers.items():
            self.core.renew(name, manager.asked, self.now)
        for _ in range(3):
            self.commit(self.core.assign(), self.next_model())
            for name, manager in self.managers.items():
                while True:
                    granted = self.core.renewal_page(name, manager.asked)
                    manager.take(granted)
                    if not granted.more:
                        break
                owned = {item for item, owner in self.core.owners.items() if owner.manager == name}
                assert manager.known.keys() == owned
                items = {}
                for key, known in manager.known.items():
                    if (higher := self.claim(key, known.epoch)) is not None:
                        items[key] = (known.epoch, protocol.ResourceStatus(superseded_by=higher))
                changes, refused = self.core.apply_checkpoints(name, items)
                assert not refused
                self.commit(changes, self.next_model())
        for name in self.core.resources:
            assert self.obeyed[name] == self.core.owners[name].epoch


TestRegistries = Registries.TestCase
TestRegistries.settings = hypothesis.settings(
    max_examples=60,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    derandomize=True,
    database=None,
)
