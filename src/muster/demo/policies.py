"""The chapter ``policies``: which events a receiver accepts, who may claim what, and why an event arrives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from muster.app import domain
from muster.bus import api
from muster.core import errors
from muster.demo import tour
from muster.notify import client, models, protocol, queries
from muster.predicates import types
from muster.trust.permissions import roles

SERVER = models.Model("Server", {"region": types.STRING, "load": types.FLOAT})
OPERATOR = models.Model("Operator", {"_trust_level": types.INT})
COMMAND = models.Model("command", {"operation": types.STRING}, models.ModelKind.EVENT)
POLICY = "command AND (sender: (_trust_level >= 2))"
SERVERS = {"north-1": ("north", 0.2), "north-2": ("north", 0.9), "south-1": ("south", 0.1)}
ADDRESS = "region = 'north' AND load < 0.5"
ANSWER_S, NOTHING_S = 10.0, 1.0


async def scenes(running: domain.Domain) -> AsyncIterator[tour.Scene]:
    admin = await running.connect("admin", roles.Role.OPERATOR)
    farm = await running.connect("farm", roles.Role.USER)
    ann = await running.connect("ann", roles.Role.USER)
    async with (
        admin,
        farm,
        ann,
        client.NotifyClient(admin) as administration,
        client.NotifyClient(farm) as servers,
        client.NotifyClient(ann) as hers,
    ):
        story = _Story(running, admin, administration, servers, hers)
        yield await story.join()
        yield await story.address()
        yield await story.refused()
        yield await story.explained()
        yield await story.granted()
        yield await story.forged()
        yield await story.revoked()


class _Story:
    def __init__(
        self,
        running: domain.Domain,
        admin: api.Bus,
        administration: client.NotifyClient,
        servers: client.NotifyClient,
        ann: client.NotifyClient,
    ) -> None:
        self._running = running
        self._admin = admin
        self._administration = administration
        self._servers = servers
        self._ann = ann
        self._receivers: dict[str, client.ReceiverHandle] = {}

    async def join(self) -> tour.Scene:
        for model in (SERVER, OPERATOR, COMMAND):
            await self._administration.define(model)
        for name, (region, load) in SERVERS.items():
            self._receivers[name] = await self._servers.advertise(
                name, SERVER.name, {"region": region, "load": load}, policy=POLICY
            )
        return tour.Scene(
            "receivers",
            f"{len(SERVERS)} servers joined. Each has a state (region, load) and a policy, which says what "
            f"it accepts and from whom: {POLICY}",
            {"policy": POLICY},
        )

    async def address(self) -> tour.Scene:
        matches = await queries.match_receivers(self._admin, ADDRESS)
        tour.expect(matches.receivers == ["farm/north-1"], f"{matches.receivers} match")
        return tour.Scene(
            "address",
            f"an event has no list of recipients but an address: {ADDRESS}. "
            f"Now it selects {', '.join(matches.receivers)} of {len(SERVERS)} receivers",
            {"address": ADDRESS, "receivers": matches.receivers},
        )

    async def refused(self) -> tour.Scene:
        reached = await self._send()
        tour.expect(not reached, f"{reached} accepted a command of a sender without a grant")
        return tour.Scene(
            "refused",
            "ann sends the command `restart` there: the address matches, the policy does not. "
            "No server accepted it",
            {"accepted": reached},
        )

    async def explained(self) -> tour.Scene:
        event = protocol.SendEvent(
            id="explain", sender="ann", type="command", content={"operation": "restart"}, address=ADDRESS
        )
        answer = await queries.explain(self._admin, event, sender="ann/ann", receiver="farm/north-1")
        tour.expect(not answer.delivered and answer.address.holds, "the explanation contradicts the delivery")
        return tour.Scene(
            "explained",
            "`muster notify explain` names the clause: address "
            f"{_verdict(answer.address.holds)}, event {_verdict(answer.event.holds)}, sender "
            f"{_verdict(answer.sender.holds)} ({'; '.join(answer.sender.because)})",
            {"because": answer.sender.because},
        )

    async def granted(self) -> tour.Scene:
        root = await asyncio.to_thread(self._running.trust.root_authority)
        now = time.time()
        chain = root.grant("ann", {"_trust_level": 3}, tier=1, now=now, lifetime_s=3600.0)
        await self._ann.present(chain)
        reached = await self._send()
        tour.expect(reached == ["north-1"], f"{reached} accepted the command")
        return tour.Scene(
            "granted",
            "the domain's authority signs a grant: ann has _trust_level 3 for an hour. The same command "
            f"again: {', '.join(reached)} accepted it",
            {"accepted": reached},
        )

    async def forged(self) -> tour.Scene:
        """An attribute that begins with ``_`` cannot be claimed, only granted."""
        try:
            await self._servers.advertise("impostor", OPERATOR.name, {"_trust_level": 9})
        except errors.MusterError as error:
            return tour.Scene(
                "forged",
                f"another process claims _trust_level 9 for itself: {error.message}",
                {"refused": error.message},
            )
        raise errors.InvariantViolation("a restricted attribute was accepted without a grant")

    async def revoked(self) -> tour.Scene:
        root = await asyncio.to_thread(self._running.trust.root_authority)
        serials = [grant.serial for grant in await queries.list_grants(self._admin) if grant.holder == "ann"]
        _, sealed = await queries.next_revocations(self._admin, root, serials, now=time.time())
        await self._administration.revoke(sealed)
        reached = await self._send()
        tour.expect(not reached, f"{reached} accepted a command after the revocation")
        return tour.Scene(
            "revoked",
            "the authority revokes the grant. The same command once more: no server accepted it",
            {"accepted": reached},
        )

    async def _send(self) -> list[str]:
        """The servers that accept the command of ann."""
        await self._ann.sender("ann").send("command", {"operation": "restart"}, to=ADDRESS)
        matching = [name for name, (region, load) in SERVERS.items() if region == "north" and load < 0.5]
        reached = []
        for name in SERVERS:
            try:
                await self._receivers[name].next(timeout_s=NOTHING_S)
                reached.append(name)
            except errors.TimedOut:
                continue
        tour.expect(set(reached) <= set(matching), f"the address does not select {reached}")
        return reached


def _verdict(holds: bool) -> str:
    return "matches" if holds else "does not match"
