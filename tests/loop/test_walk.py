"""One pass through the complete loop, in one real domain.

A sensor reports this machine; a channel holds and forwards; Spark rolls up and raises an alert; the responder
turns it into a command, qualified by a grant; the notifier delivers it only to the receiver whose state it
addresses and whose policy accepts it; the resource's manager has its agent carry it out; a context
says what is where now, and a message that it was done.
Everything deeper is tested where it lives; this test says that the parts fit together.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import factories
from muster.core import errors, messages
from muster.core.settings import loader
from muster.inform import client as inform
from muster.manage import client as manage
from muster.manage.agent import agent
from muster.manage.manager import manager
from muster.manage.registry import endpoint
from muster.message import destinations
from muster.message.client import api as message
from muster.notify import client as notify
from muster.notify import models
from muster.pipeline import client as pipeline
from muster.predicates import types
from muster.testing.eventually import eventually
from muster.trust.permissions import roles

RULES = """
rules:
  - name: fleet-seen
    scope: system
    when: machines >= 1
    severity: info
    summary: "the fleet has a machine"
"""

RESPONSES = """
responses:
  - alert: fleet-seen
    event: command
    content: {operation: restart}
    to: "application = 'web'"
"""

REACTIONS = """
reactions:
  - where: type = 'process'
    model: Server
    state: {application: "{name}"}
    policy: "command AND sender: (_trust_level >= 2)"
"""

MANIFEST = """
resources:
  - {name: web, type: process, agent: host-1, config: {command: [sleep, "1000"]}}
  - {name: db, type: process, agent: host-1, config: {command: [sleep, "1000"]}}
"""

SERVER = models.Model("Server", {"application": types.STRING})
CONTROLLER = models.Model("Controller", {"_trust_level": types.INT})
COMMAND = models.Model("command", {"operation": types.STRING}, models.ModelKind.EVENT)


def load_settings(folder: Path) -> app_settings.Settings:
    files = {"rules.yaml": RULES, "responses.yaml": RESPONSES, "reactions.yaml": REACTIONS}
    for name, content in files.items():
        (folder / name).write_text(content)
    return loader.load(
        app_settings.Settings,
        flags={
            "domain.data_dir": str(folder / "data"),
            "bus.port": 0,
            "manage.enabled": False,  # it has a registry of its own here, and would act in turn with ours
            "channel.enabled": True,
            "channel.hold_s": "200ms",
            "sensor.enabled": True,
            "sensor.name": "web-1",
            "sensor.group": "web",
            "sensor.period_s": "500ms",
            "sensor.http_port": 0,
            "sensor.statsd_port": 0,
            "pipeline.enabled": True,
            "pipeline.master": "local[1]",
            "pipeline.trigger_s": "1s",
            "pipeline.window_s": "1s",
            "pipeline.delay_s": "1s",
            "pipeline.rules": str(folder / "rules.yaml"),
            "responder.rules": str(folder / "responses.yaml"),
            "reactions.rules": str(folder / "reactions.yaml"),
        },
    )


@pytest.mark.slow  # test_outbreak.py and docs/guides/loop.md go around the loop too
@pytest.mark.timeout(300)
@pytest.mark.may_block(reason="a domain's first start reads files")
async def test_once_around_the_loop(tmp_path: Path):
    chosen = load_settings(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            domain.Domain(chosen, components=factories.components(chosen))
        )

        async def connect(identity: str, role: roles.Role):
            return await stack.enter_async_context(await running.connect(identity, role))

        # Management: a registry, a manager, an agent with two real processes.
        await stack.enter_async_context(
            endpoint.RegistryEndpoint(await connect("registry-1", roles.Role.REGISTRY))
        )
        await stack.enter_async_context(
            manager.Manager(await connect("manager-1", roles.Role.MANAGER), tick_s=0.05)
        )
        host_bus = await connect("host-1", roles.Role.AGENT)
        host = await stack.enter_async_context(agent.Agent(host_bus, tmp_path / "host", beat_s=0.2))
        admin = await connect("admin", roles.Role.OPERATOR)
        fleet = manage.ManageClient(admin)
        await fleet.apply(MANIFEST)
        for resource in ("web", "db"):
            await fleet.wait(resource, "up")
        pids = {name: host.hosted[name].observed.properties["pid"] for name in ("web", "db")}

        # Notification: both resources are receivers that accept commands from the trusted only.
        receivers = await stack.enter_async_context(notify.NotifyClient(admin))
        for model in (SERVER, CONTROLLER, COMMAND):
            await receivers.define(model)
        authority = running.trust.root_authority()
        await receivers.present(
            authority.grant("responder", {"_trust_level": 3}, tier=1, now=time.time(), lifetime_s=3600)
        )

        # A context has the address of the server, and a queue receives the outcomes.
        contexts = inform.InformClient(admin)
        placed = await contexts.put("servers/web", b"host-1", attributes={"pid": pids["web"]})
        shop = message.Connection(await connect("shop", roles.Role.USER), client_id="shop")
        session = (await stack.enter_async_context(shop)).session()
        done = destinations.queue("done")

        # Monitoring and the pipeline raise the alert by themselves.
        alerts = pipeline.PipelineClient(admin)

        async def firing() -> messages.Alert | None:
            try:
                raised = await alerts.alerts()
            except errors.Unavailable:  # Spark takes its time to start
                return None
            return next((item for item in raised if item.state is messages.AlertState.FIRING), None)

        alert = await eventually(firing, timeout_s=240)
        assert alert is not None
        assert (alert.rule, alert.about) == ("fleet-seen", "system")

        # And the managed action follows: web was restarted, db was not meant.
        def restarted() -> int | None:
            pid = host.hosted["web"].observed.properties.get("pid")
            return pid if pid != pids["web"] else None

        now = await eventually(restarted, timeout_s=60)
        assert now is not None
        await fleet.wait("web", "up")
        assert host.hosted["db"].observed.properties["pid"] == pids["db"]
        await contexts.put("servers/web", b"host-1", attributes={"pid": now}, expected_version=placed.version)
        (context,) = (await contexts.find(f"pid = {now}")).contexts
        assert context.key == "servers/web"
        await session.producer(done).send("web was restarted")
        async with await session.consumer(done) as words:
            received = await words.receive(timeout_s=30)
            assert received is not None
            assert received.body() == "web was restarted"
        system = await eventually(alerts.system, timeout_s=60)
        assert system is not None
        assert system.machines == 1
        await fleet.delete("web", "db")
        await fleet.wait_gone("web", "db")
