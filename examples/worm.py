"""Defending web servers against a worm: the scenario of the paper, whole, on one machine.

    python examples/worm.py

Web servers advertise what they run and how loaded they are, and accept alerts from the controller of their
region and commands from Intellimune's national one.  Which region a controller commands, and how far it is
trusted, is granted by a trust manager; it cannot say so itself.  One alert and one command go out, and
exactly the right servers react.  Then three impostors try, and nothing happens.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.app import domain
from muster.app import settings as app_settings
from muster.app.components import notifier as notify_part
from muster.bus import api
from muster.core import errors, messages
from muster.core.settings import loader
from muster.notify import client, protocol
from muster.notify import documents as notify_documents
from muster.trust import documents, grants, nkeys
from muster.trust.permissions import roles

MODELS = """
WebServer = {
  String application; String application_version; String serviceIPAddress; int servicePort;
  DomainedSet{docs, cgi, xml} services; float load
}
Controller = { String entity; String _command_region; int _trust_level }
event alert = { int threat_level }
event command = { String action }
"""
POLICY = """
{ (alert AND (threat_level >= 4)) AND
  (sender: (_command_region == "northwest" AND _trust_level >= 2)) } OR
{ (command AND (sender: (entity == "Intellimune" AND _command_region == "national"))) }
"""
HOUR_S = 3600.0


@dataclass
class Outcome:
    """What happened: event id -> the servers that it reached."""

    reached: dict[str, set[str]] = field(default_factory=lambda: collections.defaultdict(set))
    alert: str = ""
    command: str = ""
    forged: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    meant_alert: set[str] = field(default_factory=set)
    meant_command: set[str] = field(default_factory=set)


def farm(count: int) -> dict[str, dict[str, object]]:
    """Half of the servers run IIS, every third one is busy."""
    return {
        f"web-{number}": {
            "application": "IIS" if number % 2 else "Apache",
            "application_version": "2.4.0",
            "serviceIPAddress": f"10.0.{number // 250}.{number % 250}",
            "servicePort": 8080,
            "services": frozenset({"docs", "cgi"} if number % 4 else {"docs"}),
            "load": 0.9 if number % 3 == 0 else 0.3,
        }
        for number in range(count)
    }


async def run(folder: pathlib.Path, say: Callable[[str], None], *, servers: int = 40) -> Outcome:
    outcome = Outcome()
    settings = loader.load(app_settings.Settings, flags={"domain.data_dir": str(folder)})
    running = domain.Domain(settings, components=[notify_part.NotifierComponent(settings.notify)])
    async with running, contextlib.AsyncExitStack() as stack:

        async def join(
            identity: str, on_event: client.OnEvent | None = None
        ) -> tuple[client.NotifyClient, api.Bus]:
            bus = await running.connect(identity, roles.Role.USER)
            stack.push_async_callback(bus.close)
            return await stack.enter_async_context(client.NotifyClient(bus, on_event=on_event)), bus

        def react(names: Sequence[str], event: client.ReceivedEvent) -> None:
            outcome.reached[event.id].update(names)
            received.set()

        received = asyncio.Event()

        web, _ = await join("macrocorp", react)
        for model in notify_documents.read(MODELS.encode()).models:
            await web.define(model)
        states = farm(servers)
        await asyncio.gather(
            *(web.advertise(name, "WebServer", state, policy=POLICY) for name, state in states.items())  # type: ignore[arg-type]
        )
        say(f"{servers} web servers advertise their state")

        # The root appoints a trust manager, who may grant regions, and trust up to level 5, and nothing else.
        root = await asyncio.to_thread(running.trust.root_authority)
        key = nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)
        now = time.time()
        mandates = root.appoint(
            key.public,
            "trust-manager",
            tier=3,
            may_grant={
                "_command_region": documents.ValueIn(values=("northwest", "southeast", "national")),
                "_trust_level": documents.ValueRange(low=1, high=5),
            },
            now=now,
            lifetime_s=HOUR_S,
        )
        manager = grants.Authority(key, mandates)

        regional, _ = await join("northwest-control")
        await regional.present(
            manager.grant(
                "northwest-control",
                {"_command_region": "northwest", "_trust_level": 4},
                tier=2,
                now=now,
                lifetime_s=HOUR_S,
            )
        )
        national, _ = await join("intellimune")
        await national.present(
            manager.grant(
                "intellimune",
                {"_command_region": "national", "_trust_level": 5},
                tier=3,
                now=now,
                lifetime_s=HOUR_S,
            )
        )
        northwest = await regional.advertise("control", "Controller", {"entity": "Emergency Response"})
        intellimune = await national.advertise("control", "Controller", {"entity": "Intellimune"})

        outcome.meant_alert = {name for name, state in states.items() if state["application"] == "IIS"}
        outcome.alert = await northwest.send("alert", {"threat_level": 4}, to="application = 'IIS'")
        await northwest.send("alert", {"threat_level": 3}, to="application = 'IIS'")  # not grave enough
        # A server's load changes while the worm spreads; the command goes by what it is now.
        await web.update(["web-1"], load=[0.95])
        busy = "services CONTAINS 'cgi' AND load > 0.8"
        outcome.meant_command = {
            name
            for name, state in states.items()
            if "cgi" in state["services"] and (state["load"] == 0.9 or name == "web-1")  # type: ignore[operator]
        }
        outcome.command = await intellimune.send("command", {"action": "disable cgi"}, to=busy)
        # A regional controller may not command, nor a national one of another company raise alarms here.
        outcome.forged.append(await northwest.send("command", {"action": "halt"}))
        outcome.forged.append(await intellimune.send("alert", {"threat_level": 9}))

        # Impostors.
        mallory, bus = await join("mallory")
        for attempt in (
            lambda: mallory.advertise("control", "Controller", {"entity": "Intellimune", "_trust_level": 9}),
            lambda: mallory.present(_self_signed("mallory", now)),
            lambda: mallory.present((_theirs(manager, now)[0], *_self_signed("mallory", now)[1:])),
        ):
            try:
                await attempt()
            except errors.MusterError as error:
                outcome.refused.append(error.code)
                say(f"refused: {error.message}")
        liar = await mallory.advertise("control", "Controller", {"entity": "Intellimune"})
        outcome.forged.append(await liar.send("command", {"action": "halt"}))
        await mallory.present(_theirs(manager, now))  # a valid grant of another identity
        outcome.forged.append(await liar.send("command", {"action": "halt"}))
        # In the regional controller's name: the broker lets no client publish under another identity.
        forged = protocol.SendEvent(id="forged", sender="control", type="alert", content={"threat_level": 9})
        subject = (
            f"muster.notify.from.northwest-control.event.{protocol.shard_of('northwest-control/control')}"
        )
        with contextlib.suppress(errors.MusterError):
            await bus.request(subject, messages.encode(forged), timeout_s=0.5)
        outcome.forged.append("forged")

        # An order after all of it: when it has come, everything sent before has come or never will.
        last = await intellimune.send("command", {"action": "all clear"})
        while len(outcome.reached[last]) < servers:
            received.clear()
            await asyncio.wait_for(received.wait(), 10)
    say(f"the alert reached {len(outcome.reached[outcome.alert])} servers, all of them IIS")
    say(f"the command reached {len(outcome.reached[outcome.command])}: those with CGI that are busy")
    say(f"{len(outcome.forged)} forged or unqualified events reached no receiver")
    return outcome


def _self_signed(holder: str, now: float) -> tuple[str, ...]:
    """Signed by a root that is not trusted."""
    return grants.Authority(nkeys.KeyPair.create(nkeys.KeyKind.ACCOUNT)).grant(
        holder, {"_command_region": "national", "_trust_level": 9}, tier=9, now=now, lifetime_s=HOUR_S
    )


def _theirs(manager: grants.Authority, now: float) -> tuple[str, ...]:
    return manager.grant("northwest-control", {"_trust_level": 4}, tier=2, now=now, lifetime_s=HOUR_S)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        asyncio.run(run(pathlib.Path(temporary), print))
