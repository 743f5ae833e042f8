"""Changing a running domain: requests to its process over the bus, from those who run it.

    muster.bus.from.<identity>.brokers.<verb>      verbs: list, start, stop, link, unlink, alerts

The identity in the subject is the asker's own, as the broker saw to it; whether it may is looked up in the
keyring: only the role ``operator`` is obeyed.  Requests and answers are JSON, an answer ``{"result": …}`` or
``{"error": {"code", "message", "hint"}}``; it goes to the requester's reply space and nowhere else.

What is done may have the broker read its configuration again, and then it forgets who may answer whom: an
answer that is due is lost.  So one asks again under the same name, and it is answered and not done again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from muster.app import context as context_
from muster.app import team
from muster.bus import api, wire
from muster.core import errors, subjects
from muster.manage import requests
from muster.trust import roles

PART = "bus"
KIND = "brokers"
LOOKS = ("list", "links", "alerts")  # verbs that change nothing
TIMEOUT_S = 60.0  # a broker with storage may have to empty itself first
AGAIN_S = 3.0
TOLD_MAX = 100  # answers remembered

Verb = Callable[..., Awaitable[Any]]


async def ask(bus: api.Bus, verb: str, **arguments: Any) -> Any:
    """What the domain answers; raises what it refused with."""
    subject = subjects.said_by(PART, bus.identity, KIND, verb)
    try:
        return await requests.ask(
            bus, subject, patience_s=TIMEOUT_S, try_s=AGAIN_S, named=True, waits=False, **arguments
        )
    except wire.NobodyListens as error:
        raise errors.Unavailable(
            "no domain's process listens on this bus", hint="is it `muster up` that runs these brokers?"
        ) from error


class Control:
    """The part that obeys."""

    name = "control"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, verbs: dict[str, Verb]) -> None:
        self._verbs = verbs
        self._told: dict[tuple[str, str], bytes] = {}  # answers, by who asked and under which name
        self._context: context_.Context
        self._subscription: api.Subscription | None = None

    async def start(self, context: context_.Context) -> None:
        self._context = context
        self._subscription = await context.bus.subscribe(
            subjects.said_by(PART, "*", KIND, "*"), handler=self._answer
        )

    async def stop(self) -> None:
        if self._subscription is not None:
            await self._subscription.close()

    def health(self) -> team.Health:
        return team.Health()

    async def _answer(self, message: api.Message) -> None:
        sender = subjects.sender_of(message.subject)
        if not subjects.may_reply(message.subject, message.reply):
            return
        key = (sender, message.headers.get(requests.ASKED, ""))
        data = self._told.get(key)
        if data is None:
            data = msgspec.json.encode(await self._done(sender, message))
        if key[1]:
            self._told[key] = data
            if len(self._told) > TOLD_MAX:
                del self._told[next(iter(self._told))]
        await message.respond(data)

    async def _done(self, sender: str, message: api.Message) -> dict[str, Any]:
        try:
            return {"result": await self._obey(sender, message)}
        except errors.MusterError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  (a bug of ours must not leave the asker waiting)
            self._context.log.error("verb-failed", subject=message.subject, error=error)
            failure = errors.InvariantBroken(f"{type(error).__name__}: {error}")
        return {"error": requests.told(failure)}

    async def _obey(self, sender: str, message: api.Message) -> Any:
        record = await asyncio.to_thread(self._context.trust.show, sender)
        name = message.subject.rpartition(".")[2]
        looks = record.role == roles.Role.WEB and name in LOOKS
        if record.role != roles.Role.OPERATOR and not looks:
            raise errors.Forbidden(f"{sender} has the role {record.role}; only an operator changes brokers")
        verb = self._verbs.get(name)
        if verb is None:
            raise errors.NotFound(f"no verb {name!r}: there are {', '.join(self._verbs)}")
        try:
            arguments = msgspec.json.decode(message.data or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise errors.InvalidInput(f"the request is not a JSON object: {error}") from error
        if name not in LOOKS:
            self._context.log.info("asked", by=sender, verb=name, arguments=arguments)
        try:
            return await verb(**arguments)  # one at a time, as handlers of a subscription are called
        except TypeError as error:
            raise errors.InvalidInput(f"{name}: {error}") from error
