"""Changing a running domain: requests to its process over the bus, from those who run it.

    muster.bus.from.<identity>.brokers.<verb>      verbs: list, start, stop, link, unlink

The identity in the subject is the asker's own, as the broker saw to it; whether it may is looked up in the
keyring: only the role ``operator`` is obeyed.  Requests and answers are JSON, an answer ``{"result": …}`` or
``{"error": {"code", "message", "hint"}}``; it goes to the asker's own inbox and nowhere else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec

from muster.app import context as context_
from muster.app import team
from muster.bus import api
from muster.core import errors, subjects
from muster.trust import roles

PART = "bus"
KIND = "brokers"
LOOKS = ("list", "links")  # verbs that change nothing
TIMEOUT_S = 60.0  # a broker with storage may have to empty itself first

Verb = Callable[..., Awaitable[Any]]


async def ask(bus: api.Bus, verb: str, **arguments: Any) -> Any:
    """What the domain answers; raises what it refused with."""
    subject = subjects.said_by(PART, bus.identity, KIND, verb)
    try:
        message = await bus.request(subject, msgspec.json.encode(arguments), timeout_s=TIMEOUT_S)
    except errors.TimedOut:
        raise
    except errors.Unavailable as error:
        raise errors.Unavailable(
            "no domain's process listens on this bus", hint="is it `muster up` that runs these brokers?"
        ) from error
    answer = msgspec.json.decode(message.data)
    if "error" in answer:
        raise _error(answer["error"])
    return answer["result"]


class Control:
    """The part that obeys."""

    name = "control"
    depends_on: Sequence[str] = ()
    vital = False

    def __init__(self, verbs: dict[str, Verb]) -> None:
        self._verbs = verbs
        self._one_at_a_time = asyncio.Lock()
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
        if message.reply is None or not message.reply.startswith(f"{subjects.inbox(sender)}."):
            return
        try:
            answer = {"result": await self._obey(sender, message)}
        except errors.MusterError as error:
            answer = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
        except Exception as error:  # noqa: BLE001  (a bug of ours must not leave the asker waiting)
            self._context.log.error("verb-failed", subject=message.subject, error=error)
            broken = errors.InvariantBroken(f"{type(error).__name__}: {error}")
            answer = {"error": {"code": broken.code, "message": broken.message, "hint": broken.hint}}
        await message.respond(msgspec.json.encode(answer))

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
        async with self._one_at_a_time:
            if name not in LOOKS:
                self._context.log.info("asked", by=sender, verb=name, arguments=arguments)
            try:
                return await verb(**arguments)
            except TypeError as error:
                raise errors.InvalidInput(f"{name}: {error}") from error


def _error(told: dict[str, Any]) -> errors.MusterError:
    kind = next(
        (kind for kind in _kinds(errors.MusterError) if kind.code == told["code"]), errors.MusterError
    )
    try:
        return kind(told["message"], hint=told["hint"])
    except TypeError:  # one that needs more facts than travelled
        return errors.MusterError(told["message"], hint=told["hint"])


def _kinds(root: type[errors.MusterError]) -> Iterator[type[errors.MusterError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)
