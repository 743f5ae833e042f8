"""Responses and reactions: alerts become events, accepted events become operations, each once."""

from __future__ import annotations

import asyncio
import contextlib
import time
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from muster.app import domain, positions
from muster.app import settings as app_settings
from muster.app.components import factories, loop
from muster.bus.memory import network
from muster.core import errors, messages
from muster.core.settings import loader
from muster.loop import reaction_rules, reactions
from muster.loop import settings as loop_settings
from muster.manage import client as manage
from muster.manage import rows
from muster.notify import client as notify
from muster.notify import models, queries
from muster.notify import settings as notify_settings
from muster.notify.matcher import kernels_numpy
from muster.notify.notifier import notifier
from muster.pipeline import protocol
from muster.predicates import types as types_
from muster.supervision import tasks
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


class FakeManager:
    """Returns the given answers in order."""

    def __init__(self, *answers: Any) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    async def exec(self, operation: str, resource: str, *, id: str) -> list[Any]:
        self.asked.append((operation, id))
        if not self._answers:
            await asyncio.Event().wait()
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        outcome, _, code = answer.partition(":")
        return [types.SimpleNamespace(outcome=outcome, code=code)]


async def obeyed(manager: FakeManager, *events: Any) -> list[int]:
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
    rule = reaction_rules.ReactionSpec(
        where="TRUE", model="Server", policy="command", operations=("isolate", "restart", "last", "tell")
    )
    work = reactions.execute_commands(receiver, "web-1", rule, lambda sender: manager)  # type: ignore[arg-type,return-value]
    obeying = asyncio.create_task(work)
    await eventually(lambda: not manager._answers, timeout_s=600)
    await asyncio.sleep(0)
    obeying.cancel()
    await asyncio.gather(obeying, return_exceptions=True)
    return acknowledged


def command(operation: str, sequence: int) -> Any:
    return types.SimpleNamespace(
        type="command",
        content={"operation": operation},
        sender={"_id": "x/y"},
        id=f"e{sequence}",
        sequence=sequence,
    )


@pytest.mark.virtual_time
async def test_a_durable_command_is_repeated_until_it_is_answered_and_in_its_order():
    manager = FakeManager(
        errors.Unavailable("failing over"), errors.TimedOut("no answer"), "in-doubt", "done", "failed"
    )
    acknowledged = await obeyed(manager, command("isolate", 7), command("restart", 8), command("last", 9))
    assert manager.asked[:5] == [("isolate", "x/y:e7")] * 4 + [("restart", "x/y:e8")]
    assert acknowledged[0] == 7
    assert 9 not in acknowledged


@pytest.mark.virtual_time
async def test_a_command_that_is_not_acknowledged_while_no_manager_answers():
    manager = FakeManager(*[errors.Unavailable("failing over")] * 5)
    assert await obeyed(manager, command("isolate", 7)) == []


@pytest.mark.virtual_time
async def test_a_command_whose_outcome_its_agent_does_not_know_is_not_repeated_for_ever():
    manager = FakeManager("in-doubt:timed-out", "in-doubt:in-doubt", "done")
    acknowledged = await obeyed(manager, command("isolate", 7), command("restart", 8))
    assert manager.asked == [("isolate", "x/y:e7")] * 2 + [("restart", "x/y:e8")]
    assert 7 in acknowledged


@pytest.mark.virtual_time
async def test_a_refused_command_and_one_that_is_not_durable_are_asked_for_once():
    manager = FakeManager(errors.NotFound("no such resource"), errors.Unavailable("failing over"), "done")
    acknowledged = await obeyed(manager, command("isolate", 7), command("tell", 0), command("restart", 8))
    assert [operation for operation, _ in manager.asked] == ["isolate", "tell", "restart"]
    assert 7 in acknowledged


@pytest.mark.virtual_time
async def test_a_resource_that_is_selected_again_before_it_could_leave_obeys_again(monkeypatch):
    rule = reaction_rules.ReactionSpec(
        where="TRUE", model="Server", policy="command", operations=("restart",)
    )
    receiver = reaction_rules.ResourceReceiver(rule=rule, state={})
    begun: list[str] = []

    async def obey(handle: Any, name: str, *_: Any) -> None:
        begun.append(name)
        await asyncio.Event().wait()

    async def advertise(name: str, *_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(name=name)

    async def leave() -> None:
        raise errors.TimedOut("no notifier replied")

    async def get(**_: Any) -> list[Any]:
        return []

    due: dict[str, Any] = {"web-1": receiver}
    monkeypatch.setattr(reactions, "execute_commands", obey)
    monkeypatch.setattr(reaction_rules, "receivers", lambda *_: due)
    receivers: Any = types.SimpleNamespace(
        advertise=advertise, sender=lambda name: types.SimpleNamespace(name=name, leave=leave)
    )
    kept = reactions.ResourceReceivers(None, [rule])  # type: ignore[arg-type]
    kept._fleet = types.SimpleNamespace(get=get)  # type: ignore[assignment]
    kept._earlier_left = True
    await kept._update(receivers)
    await asyncio.sleep(0)
    due.clear()
    with pytest.raises(errors.TimedOut):
        await kept._update(receivers)
    due["web-1"] = receiver
    await kept._update(receivers)
    await kept._update(receivers)
    await asyncio.sleep(0)
    assert begun == ["web-1", "web-1"]
    assert kept._supervisor.pending == 1
    await kept._supervisor.close()


def resource(name: str) -> rows.ResourceRow:
    return rows.ResourceRow(
        name=name, type="process", group="shop", agent="local", desired="up", state="up", generation=1
    )


@pytest.mark.virtual_time
async def test_resources_that_were_deleted_while_the_domain_was_down_leave_at_the_start(monkeypatch):
    monkeypatch.setattr(reactions, "PAGE", 1)
    net = network.SimulatedNetwork(seed=1)
    rules = reaction_rules.load(REACTIONS)
    reports: list[tuple[int, str]] = []

    async def names(bus: Any) -> list[str]:
        return [row.receiver for row in (await queries.list_receivers(bus, complete=True)).receivers]

    @contextlib.asynccontextmanager
    async def reacting(*resources: str) -> AsyncIterator[None]:
        async def get(**_: Any) -> list[rows.ResourceRow]:
            return list(map(resource, resources))

        async with await net.connect("bootstrap") as bus:
            kept = reactions.ResourceReceivers(bus, rules, lambda *report: reports.append(report))
            kept._fleet = types.SimpleNamespace(get=get)  # type: ignore[assignment]
            running = asyncio.create_task(kept.run())
            yield
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async with (
        await net.connect("n1") as own,
        await net.connect("bootstraps") as other,
        notifier.Notifier(own, notify_settings.NotifySettings(), kernels=kernels_numpy) as serving,
        notify.NotifyClient(other) as receivers,
    ):
        await serving.serving()
        await receivers.define(SERVER)
        await receivers.define(COMMAND)
        await receivers.advertise("gone-1", "Server", {"application": "shop"}, policy="command", durable=True)
        async with reacting("gone-1", "gone-2", "stays"):
            await eventually(lambda: reports[-1:] == [(3, "")], timeout_s=60)
        assert len(await names(other)) == 4
        reports.clear()
        async with reacting("stays", "new"):
            await eventually(lambda: reports[-1:] == [(2, "")], timeout_s=60)
        assert await names(other) == ["bootstrap/new", "bootstrap/stays", "bootstraps/gone-1"]


@pytest.mark.virtual_time
async def test_receivers_leave_when_there_are_no_rules_any_more(tmp_path: Path, monkeypatch):
    async def get(*_: Any, **__: Any) -> list[rows.ResourceRow]:
        return [resource("web")]

    monkeypatch.setattr(manage.ManageClient, "get", get)
    net = network.SimulatedNetwork(seed=1)
    rules = tmp_path / "reactions.yaml"
    rules.write_text(REACTIONS)
    async with (
        await net.connect("n1") as own,
        await net.connect("ann") as other,
        notifier.Notifier(own, notify_settings.NotifySettings(), kernels=kernels_numpy) as serving,
        notify.NotifyClient(other) as receivers,
    ):
        await serving.serving()
        for model in (SERVER, COMMAND):
            await receivers.define(model)
        for path, left in ((str(rules), ["bootstrap/web"]), ("", [])):
            settings, supervisor = (
                loop_settings.ReactionSettings(rules=path),
                tasks.TaskSupervisor("reactions"),
            )
            assert loop.reactions_are_due(settings, tmp_path)
            part = loop.ReactionComponent(settings)
            async with await net.connect("bootstrap") as bus:
                folder = types.SimpleNamespace(root=tmp_path)
                context: Any = types.SimpleNamespace(bus=bus, folder=folder, tasks=supervisor)
                await part.start(context)

                def is_ready(part: loop.ReactionComponent = part) -> bool:
                    return not part.health().reason

                await eventually(is_ready, timeout_s=60)
                await supervisor.close()
            listed = (await queries.list_receivers(other, complete=True)).receivers
            assert [row.receiver for row in listed] == left
    assert not loop.reactions_are_due(loop_settings.ReactionSettings(), tmp_path)


@pytest.mark.virtual_time
async def test_a_rule_that_names_an_attribute_no_resource_has_does_not_stop_the_others(monkeypatch):
    rules = [
        reaction_rules.ReactionSpec(where=where, model="Server", policy="command")
        for where in ("tier = 1", "TRUE")
    ]
    fleet: dict[str, list[rows.ResourceRow]] = {
        "tier = 1": [resource("front"), resource("gone")],
        "TRUE": [resource("web")],
    }

    async def get(*, where: str) -> list[rows.ResourceRow]:
        if not fleet[where]:
            raise errors.ParseError("no resource has an attribute tier", text=where, position=0)
        return fleet[where]

    async def names() -> list[str]:
        return ["front", "web", "new"]

    async def advertise(name: str, *_: Any, **__: Any) -> Any:
        return types.SimpleNamespace(name=name)

    async def leave() -> None: ...

    async def obey(*_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(reactions, "execute_commands", obey)
    receivers: Any = types.SimpleNamespace(
        advertise=advertise, sender=lambda name: types.SimpleNamespace(name=name, leave=leave)
    )
    kept = reactions.ResourceReceivers(None, rules)  # type: ignore[arg-type]
    kept._fleet = types.SimpleNamespace(get=get, names=names)  # type: ignore[assignment]
    kept._earlier_left = True
    assert await kept._update(receivers) == kept._rule_problem == ""
    assert set(kept._joined) == {"front", "gone", "web"}
    fleet |= {"tier = 1": [], "TRUE": [resource("web"), resource("new")]}
    kept._earlier_left = False
    await kept._update(receivers)
    assert set(kept._joined) == {"front", "web", "new"}
    assert kept._rule_problem.startswith("reaction 1: no resource has an attribute tier")
    assert not kept._earlier_left, "it is not known yet which of them are due"
    await kept._supervisor.close()


@pytest.mark.virtual_time
async def test_an_operation_that_the_rule_does_not_list_is_not_requested():
    manager = FakeManager("done")
    acknowledged = await obeyed(manager, command("delete", 7), command("restart", 8))
    assert manager.asked[0][0] == "restart"
    assert 7 in acknowledged


def test_reactions_are_read_as_a_whole_and_say_what_is_wrong():
    (rule,) = reaction_rules.load(REACTIONS)
    assert reaction_rules.requested_operation(rule, {"operation": "restart"}) == "restart"
    assert reaction_rules.requested_operation(rule, {"operation": "delete"}) is None
    assert reaction_rules.requested_operation(rule, {}) is None
    fixed = reaction_rules.ReactionSpec(where="TRUE", model="M", policy="p", operation="drain")
    assert reaction_rules.requested_operation(fixed, {"operation": "restart"}) == "drain"
    web, db = resource("web"), resource("db")
    receivers = reaction_rules.receivers((rule, fixed), [[web], [web, db]])
    assert receivers["web"] == reaction_rules.ResourceReceiver(rule, {"application": "shop"})
    assert receivers["db"].rule is fixed
    for text, problem in (
        ("reactions: [{where: '1 +', model: M, policy: p}]", "reaction 1: where"),
        ("reactions: [{where: 'TRUE', model: M}]", "policy"),
        ("reactions: [{where: 'TRUE', model: M, policy: p, wait: 1}]", "unknown field"),
        ("reactions: [{where: 'TRUE', model: M, policy: p, operation: a, operations: [b]}]", "omit"),
        ("rules: []", "unknown field"),
    ):
        with pytest.raises(errors.InvalidInput, match=problem):
            reaction_rules.load(text)


REACTIONS = """
reactions:
  - where: group = 'shop'
    model: Server
    state: {application: "{group}"}
    policy: "command AND sender: (_process = 'responder')"
    operations: [restart]
"""
SERVER = models.Model("Server", {"application": types_.STRING})
COMMAND = models.Model("command", {"operation": types_.STRING}, models.ModelKind.EVENT)


@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_a_managed_resource_obeys_the_event_that_an_alert_leads_to(tmp_path: Path):
    """Alert, response, event, reaction, operation: all by settings."""
    (tmp_path / "responses.yaml").write_text(
        "responses: [{alert: infected, event: command, content: {operation: restart}, "
        "to: \"application = 'shop'\"}]"
    )
    (tmp_path / "reactions.yaml").write_text(REACTIONS)
    settings = loader.load(
        app_settings.Settings,
        flags={
            "domain.data_dir": str(tmp_path / "data"),
            "bus.port": 0,
            "web.enabled": False,
            "message.enabled": False,
            "inform.enabled": False,
            "manage.managers": 1,
            "manage.registries": 1,
            "responder.rules": str(tmp_path / "responses.yaml"),
            "reactions.rules": str(tmp_path / "reactions.yaml"),
        },
    )
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            domain.Domain(settings, components=factories.components(settings))
        )
        operator = await stack.enter_async_context(await running.connect("ann", roles.Role.OPERATOR))
        receivers = await stack.enter_async_context(notify.NotifyClient(operator))
        part = running.component(loop.ReactionComponent)
        fleet = manage.ManageClient(operator)
        entry = {"type": "memory", "agent": "local", "group": "shop"}
        await fleet.apply(msgspec.json.encode({"resources": [{"name": "web", **entry}]}).decode(), wait_s=60)
        # The model is missing: it says so, and continues when it is defined.
        await eventually(lambda: "Server" in part.health().reason, timeout_s=30)
        for model in (SERVER, COMMAND):
            await receivers.define(model)
        await eventually(lambda: part.health().facts["reaction_receivers"] == 1, timeout_s=30)
        listed = (await queries.list_receivers(running.bus, complete=True)).receivers  # it may ask this
        assert [(row.receiver, row.state) for row in listed] == [("bootstrap/web", {"application": "shop"})]

        # An event of another sender is not accepted, whatever it requests.
        await receivers.sender("ann").send("command", {"operation": "restart"}, durable=True)
        async with await running.connect("pipeline", roles.Role.PIPELINE) as bus:
            stream = await bus.stream(protocol.streams()[1])
            await stream.publish("muster.pipeline.from.pipeline.alert.infected", messages.encode(alert(1)))

        async def restarted() -> list[messages.Decision]:
            return [entry for entry in await fleet.decisions() if entry.what == "exec"]

        (entry_,) = await eventually(restarted, timeout_s=30)
        assert (entry_.target, entry_.outcome) == ("web", messages.DecisionOutcome.DONE)
        assert entry_.on_behalf_of == "responder/responder"

        await fleet.delete("web")
        await fleet.wait_gone("web")
        await eventually(lambda: part.health().facts["reaction_receivers"] == 0, timeout_s=30)


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
        settings = loader.load(app_settings.Settings, flags={**flags, **more})
        return domain.Domain(settings, components=factories.components(settings))

    async def publish(running: domain.Domain, *alerts: messages.Alert) -> None:
        async with await running.connect("pipeline", roles.Role.PIPELINE) as bus:
            stream = await bus.stream(protocol.streams()[1])
            for item in alerts:
                await stream.publish("muster.pipeline.from.pipeline.alert.infected", messages.encode(item))

    async with domain_of() as running:
        await publish(running, alert(1), alert(2))

    enabled = {"responder.rules": str(tmp_path / "responses.yaml")}
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(domain_of(**enabled))
        part = running.component(loop.ResponderComponent)
        receivers = await stack.enter_async_context(
            notify.NotifyClient(
                await stack.enter_async_context(await running.connect("ear", roles.Role.USER))
            )
        )
        await receivers.define(NEWS)
        await receivers.define(LISTENER)
        await receivers.advertise("ear", "Listener", {}, policy="news")

        position = positions.StoredPosition(running.folder.root, part.name)

        async def begun() -> bool:
            return await position.load() is not None

        await eventually(begun)
        assert part.health().facts["sent"] == 0
        await publish(running, alert(3, age_s=30 * 86400), alert(4))
        await eventually(lambda: part.health().facts["sent"] == 1)
        assert (await position.load() or 0) >= 3
        assert running.metrics.value("muster_responses_total", outcome="too-old") == 1

        await publish(running, alert(5, rule="unknown"))
        await eventually(lambda: part.health().facts["refused"] == 1)
        assert running.metrics.value("muster_responses_total", outcome="refused") == 1
