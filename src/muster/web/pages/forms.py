"""Form handlers of the pages: they parse the fields and call the functions of the REST API."""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pydantic

from muster.core import errors, messages, units
from muster.notify import documents
from muster.web import actions, request_state
from muster.web.auth import sessions
from muster.web.components import texts
from muster.web.rest import access, alerts, base, contexts, notifications, queues, resources

BULK_MAX = 1000
RESULT_MAX = 600  # characters of the result of an operation
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
    """Parse ``NAME=VALUE`` pairs, one per line; sets become lists."""
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


def _time_ms(text: str) -> int:
    try:
        at = datetime.datetime.fromisoformat(text.strip())
        return int((at if at.tzinfo else at.replace(tzinfo=datetime.UTC)).timestamp() * 1000)
    except (ValueError, OverflowError) as error:
        raise errors.InvalidInput(
            f"{text[:40]!r} is not a time", hint="for example 2030-01-31 22:00, in UTC"
        ) from error


#: How the fields with these names are read; others are texts.
PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("arguments", "attributes", "content", "properties"), pairs),
    **dict.fromkeys(("for_s", "lifetime_s", "pause_s"), units.parse_duration_s),
    "from_ms": _time_ms,
    "number": base.number,
    "scopes": lambda text: text.replace(",", " ").split(),
}


def _form(
    act: Callable[..., Awaitable[Any]],
    says: str | Callable[[Any, Given], str],
    *names: str,
    body: type[pydantic.BaseModel] | None = None,
    **fixed: Any,
) -> Act:
    """A form that passes on the fields with these ``names``. One that ends with ``?`` may be empty.

    ``body``: gets those of its fields. ``says``: the message, with the fields as they were sent.
    """

    async def handle(call: request_state.RestCall, fields: Given) -> str:
        given = dict(fixed)
        for name in names:
            own = name.removesuffix("?")
            if own == name or fields.get(own, "").strip():
                given[own] = PARSERS.get(own, str)(fields[own])
        if body is not None:
            of_body = {name: given.pop(name) for name in [*given] if name in body.model_fields}
            given["body"] = base.parsed(body, **of_body)
        result = await act(call, **given)
        return says(result, fields) if callable(says) else says.format_map({**fields, "result": result})

    return handle


async def _acknowledge_all(call: request_state.RestCall, fields: Given) -> str:
    """Every alert of a rule that is not acknowledged yet."""
    actions.require_role(call.person, sessions.WebRole.OPERATOR, "acknowledge alerts")
    open_ = (messages.AlertState.FIRING, messages.AlertState.SILENCED)
    rule, count = fields["rule"], 0
    listed = [alert for alert in await call.source.alerts() if alert.rule == rule and alert.state in open_]
    for alert in listed[:BULK_MAX]:
        with contextlib.suppress(errors.NotFound):  # it has just ended
            await alerts.acknowledge(call, body=base.parsed(alerts.AlertBody, rule=rule, about=alert.about))
            count += 1
    return f"Acknowledged: {count} of {len(listed)} alerts of {rule}"


def _silenced(_: Any, fields: Given) -> str:
    begins = f" from {fields['from_ms'].strip()}" if fields.get("from_ms", "").strip() else ""
    return f"Silenced for {fields['for_s']}{begins}: {fields['covers']}"


def _executed(row: Any, fields: Given) -> str:
    result = "" if row.result is None else msgspec.json.encode(row.result).decode()[:RESULT_MAX]
    what = f"{fields['operation']} on {fields['name']}"
    return ": ".join(filter(None, (what, row.outcome, row.reason, result)))


def _desired(state: str, says: str) -> Act:
    """Change the desired state of a resource, and nothing else."""

    async def put(call: request_state.RestCall, name: str) -> None:
        known = await resources.resource(call, name)
        body = base.parsed(resources.DesiredStateBody, type=known.value.type, desired=state)
        await resources.put_resource(call, name, body)

    return _form(put, says, "name")


def _applied(result: Any, _: Given) -> str:
    rollout = [f"rollout {result.rollout}"] if result.rollout else []
    acts = [f"{act} {count:,}" for act, count in result.counts.items() if count]
    return f"Applied: {', '.join(acts + rollout)}" + "".join(f". {note}" for note in result.notes)


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


async def _send(
    call: request_state.RestCall, type: str, address: str, content: dict[str, Any] | None = None
) -> None:
    event = base.parsed(notifications.EventBody, type=type, content=content or {})
    await notifications.send(call, base.parsed(notifications.SendBody, address=address, event=event))


def _moved(result: Any, fields: Given) -> str:
    to = fields.get("to") or "the original destinations"
    return f"Moved from {fields['name']} to {to}: {texts.counted(result.moved, 'message')}"


async def _create_token(call: request_state.RestCall, body: access.TokenBody) -> Any:
    return await access.issue_token(call.web, call.person, body)


ACTS: dict[str, Act] = {
    "acknowledge": _form(
        alerts.acknowledge, "Acknowledged: {rule} {about}", "rule", "about", body=alerts.AlertBody
    ),
    "acknowledge-all": _acknowledge_all,
    "resolve": _form(alerts.resolve, "Resolved: {rule} {about}", "rule", "about", body=alerts.AlertBody),
    "silence": _form(
        alerts.silence, _silenced, "covers", "for_s", "from_ms?", "reason?", body=alerts.SilenceBody
    ),
    "unsilence": _form(alerts.unsilence, "Silence {id} ended", "id"),
    "drain": _form(resources.drain, "Draining {name}", "name"),
    "undrain": _form(resources.undrain, "{name} returned to service", "name"),
    "drain-agent": _form(resources.drain_agent, "Draining the machine of {name}", "name"),
    "undrain-agent": _form(resources.undrain_agent, "{name} returned to service", "name"),
    "delete": _form(resources.delete_resource, "Deleting {name}", "name"),
    "execute": _form(
        resources.execute, _executed, "name", "operation", "arguments?", body=resources.ExecuteBody
    ),
    "start": _desired("up", "Starting {name}"),
    "stop": _desired("down", "Stopping {name}"),
    "rollout": _form(
        resources.start_rollout,
        "Started the rollout {result.id}: {operation}",
        *("where", "operation", "arguments?", "batch?", "pause_s?"),
        body=resources.RolloutBody,
    ),
    "pause": _form(resources.pause, "Paused: {id}", "id"),
    "resume": _form(resources.resume, "Continued: {id}", "id"),
    "abort": _form(resources.abort, "Ended: {id}", "id"),
    "undo": _form(resources.undo, "Returning {group} to its previous revision", "group"),
    "apply": _form(resources.apply, _applied, "manifest", body=resources.ManifestBody),
    "put-context": _put_context,
    "delete-context": _form(contexts.delete_context, "Deleted: {key}", "key"),
    "send": _form(_send, "Sent: {type} to {address}", "type", "content?", "address"),
    "send-message": _form(
        queues.send, "Sent to {name}: {result.id}", "name", "text", "properties?", body=queues.MessageBody
    ),
    "cancel-message": _form(queues.cancel_scheduled, "Cancelled: message {number}", "number"),
    "purge": _form(queues.purge, "Purged {name}: {result.purged:,} discarded", "name", "selector?"),
    "move": _form(
        queues.move,
        _moved,
        *("name", "to?", "selector?"),
        body=queues.MoveBody,
        limit=1000,
    ),
    "set-login": _form(
        access.set_login, "{name} can log in as {role}", "name", "password", "role", body=access.LoginBody
    ),
    "remove-login": _form(access.remove_login, "Revoked the login of {name}", "name"),
    "create-token": _form(
        _create_token,
        "Copy the token now, it is not shown again: {result.token}",
        *("role?", "scopes?", "description?", "lifetime_s?"),
        body=access.TokenBody,
    ),
    "revoke-token": _form(access.revoke_token, "Revoked the token {id}", "id"),
}
