"""Form handlers of the pages: they parse the fields and call the functions of the REST API."""

from __future__ import annotations

import datetime
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pydantic

from muster.core import errors, messages, units
from muster.core.formats import complete
from muster.notify import documents
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.components import texts
from muster.web.rest import access, alerts, base, contexts, notifications, queues, resources

BULK_MAX = 1000
Given = dict[str, str]
Act = Callable[[request_state.RestCall, Given], Awaitable[str]]


async def run_form(call: request_state.RestCall, act: str, fields: Given) -> str:
    """Run a form handler and return a message about the result."""
    handler = ACTS.get(act)
    if handler is None:
        raise errors.NotFound("there is no such operation")
    try:
        return await handler(call, fields)
    except KeyError as error:
        raise errors.InvalidInput(f"the field {error.args[0]!r} is missing") from error


def pairs(text: str) -> dict[str, Any]:
    """Parse ``NAME=VALUE`` pairs, one per line or separated by commas; sets become lists."""
    values: dict[str, Any] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise errors.InvalidInput(f"{line[:80]!r} is not NAME=VALUE", hint="for example level=4")
        read = documents.value(value)
        values[name.strip()] = sorted(read) if isinstance(read, frozenset) else read
    return values


def _form(
    act: Callable[..., Awaitable[object]],
    says: str,
    *names: str,
    body: type[pydantic.BaseModel] | None = None,
) -> Act:
    """A form with these fields, which it passes on as they are."""

    async def handle(call: request_state.RestCall, fields: Given) -> str:
        given = {name: fields[name] for name in names}
        await act(call, **(given if body is None else {"body": base.parsed(body, **given)}))
        return says.format(**given)

    return handle


async def _silence(call: request_state.RestCall, fields: Given) -> str:
    for_s = units.parse_duration_s(fields["for"])
    from_ms = _time_ms(fields["from"]) if fields.get("from", "").strip() else None
    body = base.parsed(
        alerts.SilenceBody,
        covers=fields["covers"],
        for_s=for_s,
        reason=fields.get("reason", ""),
        from_ms=from_ms,
    )
    await alerts.silence(call, body=body)
    begins = f" from {fields['from'].strip()}" if from_ms else ""
    return f"Silenced for {fields['for']}{begins}: {body.covers}"


def _time_ms(text: str) -> int:
    try:
        at = datetime.datetime.fromisoformat(text.strip())
        return int((at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidInput(
            f"{text[:40]!r} is not a time", hint="for example 2030-01-31 22:00, in UTC"
        ) from error


async def _acknowledge_all(call: request_state.RestCall, fields: Given) -> str:
    """Every alert of a rule that is not acknowledged yet."""
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "acknowledge alerts")
    open_ = (messages.AlertState.FIRING, messages.AlertState.SILENCED)
    rule = fields["rule"]
    listed = [alert for alert in await call.source.alerts() if alert.rule == rule and alert.state in open_]
    for alert in listed[:BULK_MAX]:
        await alerts.acknowledge(call, body=base.parsed(alerts.AlertBody, rule=rule, about=alert.about))
    return f"Acknowledged: {len(listed[:BULK_MAX])} of {len(listed)} alerts of {rule}"


async def _execute(call: request_state.RestCall, fields: Given) -> str:
    body = base.parsed(
        resources.ExecuteBody, operation=fields["operation"], arguments=pairs(fields.get("arguments", ""))
    )
    result = await resources.execute(call, fields["name"], body)
    return f"{body.operation} on {fields['name']}: {_shown(result)}"


def _desired(state: str, says: str) -> Act:
    """Change the desired state of a resource, and nothing else."""

    async def handle(call: request_state.RestCall, fields: Given) -> str:
        name = fields["name"]
        known = await resources.resource(call, name)
        body = base.parsed(resources.DesiredStateBody, type=known.value.type, desired=state)
        await resources.put_resource(call, name, body)
        return says.format(name=name)

    return handle


async def _apply(call: request_state.RestCall, fields: Given) -> str:
    result = await resources.apply(call, base.parsed(resources.ManifestBody, manifest=fields["manifest"]))
    return f"Applied: {_shown(result)}"


def _shown(result: object) -> str:
    return msgspec.json.encode(complete.builtins(result)).decode()[:600]


async def _put_context(call: request_state.RestCall, fields: Given) -> str:
    version, expires_at_ms = fields.get("version", ""), fields.get("expires_at_ms", "")
    if not re.fullmatch(r"[0-9]{0,18}", expires_at_ms):
        raise errors.InvalidInput(f"expires_at_ms: {expires_at_ms[:40]!r} is not a time")
    lease_s = max(1.0, int(expires_at_ms) / 1000 - time.time()) if expires_at_ms else 0.0
    body = base.parsed(
        contexts.ContextBody,
        value=fields.get("value", "").replace("\r\n", "\n"),
        attributes=pairs(fields.get("attributes", "")),
        lease_s=lease_s,
    )
    await contexts.put_context(call, fields["key"], body, f'"{version}"' if version else None)
    return f"Written: {fields['key']}"


async def _send(call: request_state.RestCall, fields: Given) -> str:
    event = base.parsed(
        notifications.EventBody, type=fields["type"], content=pairs(fields.get("content", ""))
    )
    body = base.parsed(
        notifications.SendBody,
        address=fields.get("address") or "TRUE",
        event=event,
        durable="durable" in fields,
    )
    await notifications.send(call, body)
    return f"Sent: {event.type} to {body.address}"


async def _send_message(call: request_state.RestCall, fields: Given) -> str:
    body = base.parsed(
        queues.MessageBody, text=fields.get("text", ""), properties=pairs(fields.get("properties", ""))
    )
    sent = await queues.send(call, fields["name"], body)
    return f"Sent to {sent.queue}: {sent.id}"


async def _purge(call: request_state.RestCall, fields: Given) -> str:
    await queues.purge(call, fields["name"], fields.get("selector", ""))
    return f"Purged: {fields['name']}"


async def _move(call: request_state.RestCall, fields: Given) -> str:
    to, selector = fields.get("to") or None, fields.get("selector") or None
    body = base.parsed(queues.MoveBody, to=to, selector=selector, limit=1000)
    result = await queues.move(call, fields["name"], body)
    moved = texts.counted(result.moved, "message")
    return f"Moved from {fields['name']} to {to or 'the original destinations'}: {moved}"


async def _cancel(call: request_state.RestCall, fields: Given) -> str:
    await queues.cancel_scheduled(call, base.number(fields["number"]))
    return f"Cancelled: message {fields['number']}"


async def _set_login(call: request_state.RestCall, fields: Given) -> str:
    body = base.parsed(access.LoginBody, password=fields["password"], role=fields.get("role", "viewer"))
    await access.set_login(call, fields["name"], body)
    return f"{fields['name']} can log in as {body.role.value}"


async def _create_token(call: request_state.RestCall, fields: Given) -> str:
    lifetime = fields.get("lifetime", "").strip()
    body = base.parsed(
        access.TokenBody,
        role=fields.get("role") or None,
        scopes=fields.get("scopes", "").replace(",", " ").split(),
        description=fields.get("description", ""),
        lifetime_s=units.parse_duration_s(lifetime) if lifetime else None,
    )
    made = await access.issue_token(call.web, call.person, body)
    return f"Copy the token now, it is not shown again: {made.token}"


ACTS: dict[str, Act] = {
    "acknowledge": _form(
        alerts.acknowledge, "Acknowledged: {rule} {about}", "rule", "about", body=alerts.AlertBody
    ),
    "acknowledge-all": _acknowledge_all,
    "resolve": _form(alerts.resolve, "Resolved: {rule} {about}", "rule", "about", body=alerts.AlertBody),
    "silence": _silence,
    "unsilence": _form(alerts.unsilence, "Silence {id} ended", "id"),
    "drain": _form(resources.drain, "Draining {name}", "name"),
    "undrain": _form(resources.undrain, "{name} returned to service", "name"),
    "delete": _form(resources.delete_resource, "Deleting {name}", "name"),
    "execute": _execute,
    "start": _desired("up", "Starting {name}"),
    "stop": _desired("down", "Stopping {name}"),
    "pause": _form(resources.pause, "Paused: {id}", "id"),
    "resume": _form(resources.resume, "Continued: {id}", "id"),
    "abort": _form(resources.abort, "Ended: {id}", "id"),
    "undo": _form(resources.undo, "Returning {group} to its previous revision", "group"),
    "apply": _apply,
    "put-context": _put_context,
    "delete-context": _form(contexts.delete_context, "Deleted: {key}", "key"),
    "send": _send,
    "send-message": _send_message,
    "cancel-message": _cancel,
    "purge": _purge,
    "move": _move,
    "set-login": _set_login,
    "remove-login": _form(access.remove_login, "Revoked the login of {name}", "name"),
    "create-token": _create_token,
    "revoke-token": _form(access.revoke_token, "Revoked the token {id}", "id"),
}
