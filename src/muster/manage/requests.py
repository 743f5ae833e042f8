"""Questions and answers in JSON: ``{"result": …}`` or ``{"error": {"code", "kind", "message", "hint"}}``; the
kind is the code of the nearest error of `core.errors`, which every asker has.

An answer goes to the requester's reply space and nowhere else: the broker does not check reply subjects.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec

from muster.bus import api
from muster.core import errors, log, subjects

events = log.Events("manage")

RETRY_S = 0.2
ASKED = "Muster-Asked"  # a header: under this name the same request is known again


async def ask(
    bus: api.Bus,
    subject: str,
    *,
    patience_s: float = 30.0,
    try_s: float | None = None,
    named: bool = False,
    waits: bool = True,
    **arguments: Any,
) -> Any:
    """The answer; raises what was refused. While nobody acts (a take-over) it asks again.

    ``try_s``: what was not answered in so long is asked again; for what may be done twice, or is asked of one
    who knows what is ``named`` again.  Without ``waits`` it is told at once that nobody listens.
    """
    data, headers = msgspec.json.encode(arguments), name() if named else None
    loop = asyncio.get_running_loop()
    deadline = loop.time() + patience_s
    message: api.Message | None = None
    while message is None:
        try:
            left_s = max(0.1, deadline - loop.time())
            timeout_s = min(left_s, try_s or left_s)
            message = await bus.request(subject, data, headers=headers, timeout_s=timeout_s)
        except errors.TimedOut:
            if loop.time() < deadline:
                continue
            raise errors.TimedOut(f"no answer in {patience_s:g} s; it may have been done") from None
        except errors.Unavailable as error:
            if not waits:
                raise
            if loop.time() + RETRY_S > deadline:
                raise errors.Unavailable(
                    "no registry acts on this bus", hint="is management enabled in the domain's settings?"
                ) from error
            await asyncio.sleep(RETRY_S)
    return result_of(message)


def name() -> dict[str, str]:
    return {ASKED: secrets.token_hex(8)}


def result_of(message: api.Message) -> Any:
    """What was answered; raises what was refused."""
    answer = msgspec.json.decode(message.data)
    if "error" in answer:
        raise error_of(answer["error"])
    return answer["result"]


Verb = Callable[..., Awaitable[Any]]


async def answer(
    message: api.Message, verb: Callable[[dict[str, Any]], Awaitable[Any]], *, typed: bool = False
) -> None:
    """Carry out one request and answer it, whatever happens. ``typed``: ``verb`` reads the message itself."""
    if not subjects.may_reply(message.subject, message.reply):
        return
    said: dict[str, Any]
    try:
        try:
            raw = b"{}" if typed else message.data or b"{}"
            arguments = msgspec.json.decode(raw, type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise errors.InvalidInput(f"the request is not a JSON object: {error}") from error
        said = {"result": await verb(arguments)}
    except errors.MusterError as error:
        said = {"error": told(error)}
    except Exception as error:  # noqa: BLE001  (a bug of ours must not leave the asker waiting)
        events.error("verb-failed", subject=message.subject, error=error)
        said = {"error": told(errors.InvariantBroken(f"{type(error).__name__}: {error}"))}
    try:
        await message.respond(msgspec.json.encode(said))
    except errors.LimitExceeded as error:
        await message.respond(msgspec.json.encode({"error": told(error)}))


def told(error: errors.MusterError) -> dict[str, Any]:
    kind = next(one for one in type(error).__mro__ if one.__module__ == errors.__name__)
    return {
        "code": error.code,
        "kind": getattr(kind, "code", ""),
        "message": error.message,
        "hint": error.hint,
    }


def error_of(
    said: dict[str, Any], otherwise: type[errors.MusterError] = errors.MusterError
) -> errors.MusterError:
    """The error that was told, or, where its class is not loaded here or needs more facts than travelled, the
    next more general under its code; ``otherwise`` where nothing is known of it."""
    codes = (said["code"], said.get("kind"))
    kind = next((one for code in codes for one in _kinds(errors.MusterError) if one.code == code), otherwise)
    for one in kind.__mro__:
        with contextlib.suppress(TypeError):
            if issubclass(one, errors.MusterError):
                error = one(said["message"], hint=said.get("hint"))
                error.code = said["code"] or error.code
                return error
    return otherwise(said["message"], hint=said.get("hint"))


def _kinds(root: type[errors.MusterError]) -> Iterator[type[errors.MusterError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)
