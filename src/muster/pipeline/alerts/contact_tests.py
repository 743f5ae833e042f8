"""Test notifications: whether a contact can be reached, and what it replies.

A webhook receives an alert that fires and its end, as for every alert, so that no service behind it keeps an
incident open; a mail is sent once. Unlike notifications of alerts, they are not repeated when they fail.
"""

from __future__ import annotations

import asyncio
import smtplib
from collections.abc import Awaitable, Callable, Mapping

from muster.core import errors, messages
from muster.pipeline import settings as settings_
from muster.pipeline.alerts import notifications, tracker

RULE = "muster-test"
TIMEOUT_S = 3 * notifications.TIMEOUT_S + 5  # both requests of a webhook and a mail


async def run(
    name: str,
    contacts: Mapping[str, notifications.AlertContact],
    settings: settings_.PipelineSettings,
    *,
    by: str,
    now_ms: int,
) -> list[tracker.DeliveryResult]:
    """A result for the webhook and for the mail of the contact; `errors.NotFound` if there is none."""
    contact = contacts.get(name)
    if contact is None:
        known = ", ".join(sorted(contacts)) or "none"
        raise errors.NotFound(
            f"no contact {name!r}", hint=f"contacts in the file of the setting pipeline.rules: {known}"
        )
    firing, resolved = (
        notification(name, state, by, now_ms)
        for state in (messages.AlertState.FIRING, messages.AlertState.RESOLVED)
    )

    async def post() -> int:
        status = await notifications.post(name, contact, firing)
        await notifications.post(name, contact, resolved)
        return status

    async def mail() -> None:
        await asyncio.to_thread(notifications.mail, contact.mail, firing, settings)

    results = []
    if contact.webhook:
        results.append(await _result("webhook", post))
    if contact.mail:
        results.append(await _result("mail", mail))
    if not results:
        raise errors.InvalidInput(f"the contact {name!r} has neither a webhook nor a mail address")
    return results


def notification(contact: str, state: messages.AlertState, by: str, now_ms: int) -> tracker.AlertNotification:
    alert = messages.Alert(
        rule=RULE,
        about=f"test:{contact}"[:256],
        severity=messages.Severity.INFO,
        state=state,
        since_ms=now_ms,
        at_ms=now_ms,
        reason=f"TEST: {by} tests the contact {contact[:200]}; nothing is wrong",
        labels={"test": "true"},
    )
    return tracker.AlertNotification(alert, (contact,))


async def _result(transport: str, send: Callable[[], Awaitable[int | None]]) -> tracker.DeliveryResult:
    try:
        status = await send()
    except notifications.WebhookRefused as error:
        return tracker.DeliveryResult(transport, "failed", status=error.status, reason=error.message)
    except errors.MusterError as error:
        return tracker.DeliveryResult(transport, "failed", reason=error.message)
    except (OSError, smtplib.SMTPException) as error:
        return tracker.DeliveryResult(transport, "failed", reason=str(error) or type(error).__name__)
    return tracker.DeliveryResult(transport, "sent", status=status)
