"""What forms of the pages do: the same as REST does, by the same functions; here they are named and read."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pydantic

from muster.core import errors, units
from muster.notify import documents
from muster.web import request_state
from muster.web.auth import sessions
from muster.web.rest import alerts, audit, contexts, notifications, queues, resources

Given = dict[str, str]
Act = Callable[[request_state.WebState, sessions.LoginSession, Given], Awaitable[str]]
B = TypeVar("B", bound=pydantic.BaseModel)


async def run_form(
    known: request_state.WebState, person: sessions.LoginSession, act: str, given: Given
) -> str:
    """What was done, in words."""
    found = ACTS.get(act)
    if found is None:
        raise errors.NotFound("there is no such act")
    try:
        return await found(known, person, given)
    except KeyError as error:
        raise errors.InvalidInput(f"the form has no {error.args[0]!r}") from error


def _body(kind: type[B], **values: Any) -> B:
    try:
        return kind(**values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise errors.InvalidInput(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def pairs(text: str) -> dict[str, Any]:
    """``level=4`` on each line, or with commas between; sets become lists."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise errors.InvalidInput(f"{line[:80]!r} is not NAME=VALUE", hint="for example level=4")
        read = documents.value(value)
        found[name.strip()] = sorted(read) if isinstance(read, frozenset) else read
    return found


async def _acknowledge(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    body = _body(alerts.AcknowledgeBody, rule=given["rule"], about=given["about"])
    await alerts.acknowledge(known, person, body)
    return f"Acknowledged: {body.rule} {body.about}"


async def _silence(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    for_s = units.parse_duration_s(given["for"])
    body = _body(alerts.SilenceBody, covers=given["covers"], for_s=for_s, reason=given.get("reason", ""))
    await alerts.silence(known, person, body)
    return f"Silenced for {given['for']}: {body.covers}"


async def _unsilence(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await alerts.unsilence(known, person, given["id"])
    return f"The silence {given['id']} is over"


async def _drain(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await resources.drain(known, person, given["name"])
    return f"{given['name']} finishes what it has, and stops"


async def _undrain(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await resources.undrain(known, person, given["name"])
    return f"{given['name']} is to work again"


async def _delete(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await resources.delete_resource(known, person, given["name"], None)
    return f"{given['name']} is being taken down"


async def _execute(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    body = _body(
        resources.ExecuteBody, operation=given["operation"], arguments=pairs(given.get("arguments", ""))
    )
    told = await resources.execute(known, person, given["name"], body)
    return f"{body.operation} on {given['name']}: {bytes(told.body).decode()[:600]}"


async def _apply(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    told = await resources.apply(known, person, _body(resources.ManifestBody, manifest=given["manifest"]))
    return f"Applied: {bytes(told.body).decode()[:600]}"


async def _put_context(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    version, expires_at_ms = given.get("version", ""), given.get("expires_at_ms", "")
    lease_s = max(1.0, int(expires_at_ms) / 1000 - time.time()) if expires_at_ms.isdecimal() else 0.0
    body = _body(
        contexts.ContextBody,
        value=given.get("value", "").replace("\r\n", "\n"),
        attributes=pairs(given.get("attributes", "")),
        lease_s=lease_s,
    )
    await contexts.put_context(known, person, given["key"], body, f'"{version}"' if version else None)
    return f"Written: {given['key']}"


async def _delete_context(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await contexts.delete_context(known, person, given["key"], None)
    return f"Deleted: {given['key']}"


async def _send(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    event = _body(notifications.EventBody, type=given["type"], content=pairs(given.get("content", "")))
    body = _body(
        notifications.SendBody,
        address=given.get("address") or "TRUE",
        event=event,
        durable="durable" in given,
    )
    await notifications.send(known, person, body)
    return f"Sent: {event.type} to {body.address}"


async def _purge(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await queues.purge(known, person, given["name"], given.get("selector", ""))
    return f"Emptied: {given['name']}"


async def _move(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    body = _body(queues.MoveBody, to=given.get("to") or None, limit=1000)
    await queues.move(known, person, given["name"], body)
    return f"Moved what waited in {given['name']} to {body.to or 'where it came from'}"


async def _set_login(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    body = _body(audit.LoginBody, password=given["password"], role=given.get("role", "viewer"))
    await audit.set_login(known, person, given["name"], body)
    return f"{given['name']} can log in as {body.role.value}"


async def _remove_login(known: request_state.WebState, person: sessions.LoginSession, given: Given) -> str:
    await audit.remove_login(known, person, given["name"])
    return f"{given['name']} can no longer log in"


ACTS: dict[str, Act] = {
    "acknowledge": _acknowledge,
    "silence": _silence,
    "unsilence": _unsilence,
    "drain": _drain,
    "undrain": _undrain,
    "delete": _delete,
    "execute": _execute,
    "apply": _apply,
    "put-context": _put_context,
    "delete-context": _delete_context,
    "send": _send,
    "purge": _purge,
    "move": _move,
    "set-login": _set_login,
    "remove-login": _remove_login,
}
