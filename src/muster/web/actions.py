"""Operations of people: authorization, identity and activity log.

Pages and REST run every operation with `ActionRunner.run`.  It checks the person's role and uses the bus with
the person's own identity.  Each operation leaves one record in the activity log before the response is sent.
The service that executes the operation writes the record, with the interface and the client address that the
web passes along (`muster.bus.rpc.origin`).  The web writes the record itself if it rejected the operation, if
no service replied, and for operations that no service records.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from muster.bus import api, spans
from muster.bus.rpc import origin, request_audit
from muster.core import errors, leaky_buckets, messages
from muster.core.telemetry import log
from muster.supervision import tasks
from muster.trust.permissions import roles
from muster.web.auth import sessions
from muster.web.data import bus_feed

T = TypeVar("T")
PART = "web"
FAILED_LOGINS = leaky_buckets.BucketBudget(1000, 30.0)  # records of failed logins, for all accounts together
events = log.EventLog("web")

#: The address of the client whose request is being served.
address: contextvars.ContextVar[str] = contextvars.ContextVar("address", default="")

Act = Callable[[api.Bus], Awaitable[T]]


class ActionRunner:
    def __init__(self, feed: bus_feed.BusFeed) -> None:
        self._feed = feed
        self._records = tasks.TaskSupervisor(
            "web", handles=lambda error: isinstance(error, errors.MusterError)
        )
        self._audits: dict[leaky_buckets.BucketBudget, request_audit.RequestAudit] = {}

    async def run(
        self,
        session: sessions.LoginSession,
        what: str,
        target: str,
        act: Act[T],
        *,
        touches: str = "",
        needs: sessions.WebRole = sessions.WebRole.OPERATOR,
        service_audits: bool = True,
        repeated: bool = False,
    ) -> T:
        """Run an operation if the person's role permits it, and record its outcome, also if it is cancelled.

        ``service_audits``: the service that executes the operation records it. ``repeated``: it continues a
        read that was recorded, such as that of a log that is followed; only its failure is recorded.
        """
        outcome, why, sent = messages.DecisionOutcome.IN_DOUBT, "cancelled before the reply", False
        with (
            spans.span(f"web {what}", spans.SpanKind.SERVER, identity=session.name, target=target),
            origin.acting(_interface(session.kind), address.get()) as begun,
        ):
            try:
                require_role(session, needs, what)
                bus = await self._feed.link.as_person(session.name, roles.Role.OPERATOR)
                sent = True
                with self._feed.link.using(bus):
                    result = await act(bus)
                outcome, why = messages.DecisionOutcome.DONE, ""
            except errors.MusterError as error:
                outcome, why = messages.DecisionOutcome.of(error), error.message
                raise
            except Exception as error:
                why = f"{type(error).__name__}: {error}"
                raise
            finally:
                if outcome is messages.DecisionOutcome.IN_DOUBT and not sent:
                    outcome = messages.DecisionOutcome.FAILED
                if touches and sent:
                    self._feed.cache.touch(touches)
                done = outcome is messages.DecisionOutcome.DONE
                if not (service_audits and begun.answered) and not (repeated and done):
                    await self.finish(
                        self.record(session.name, what, target, why, outcome, kind=session.kind)
                    )
        return result

    async def finish(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which continues if the caller is cancelled."""
        return await asyncio.shield(self._records.spawn("activity record", work))

    async def close(self) -> None:
        """Wait for the records that are still being stored."""
        await self._records.wait_idle()
        for audit in self._audits.values():
            await audit.close()

    async def record(
        self,
        who: str,
        what: str,
        target: str,
        why: str,
        outcome: messages.DecisionOutcome,
        *,
        kind: sessions.TokenKind,
        budget: leaky_buckets.BucketBudget = request_audit.REFUSED,
    ) -> None:
        """Store a record. A failure to store it does not undo the operation."""
        try:
            bus = self._feed.link.bus
        except errors.NotConnected as error:
            events.error("not-recorded", what=what, target=target, by=who, error=error)
            return
        audit = self._audits.get(budget)
        if audit is None:
            audit = self._audits[budget] = request_audit.RequestAudit(bus, PART, refused=budget)
        audit.use(bus)
        details = {"interface": _interface(kind)} | ({"address": address.get()} if address.get() else {})
        shared = "-" if budget == FAILED_LOGINS else ""  # the name is unverified
        await audit.record(what, target, why, who=who or "-", outcome=outcome, budget=shared, **details)

    async def failed_login(self, name: str, from_address: str) -> None:
        why = f"wrong name or password, from {from_address}"
        await self.record(
            name,
            "login",
            name,
            why,
            messages.DecisionOutcome.REFUSED,
            kind=sessions.TokenKind.COOKIE,
            budget=FAILED_LOGINS,
        )


def _interface(kind: sessions.TokenKind) -> str:
    return "rest" if kind is sessions.TokenKind.TOKEN else "web"


def require_role(session: sessions.LoginSession, needed: sessions.WebRole, what: str) -> None:
    if not session.role.covers(needed):
        raise errors.Forbidden(
            f"the role {session.role.value} of {session.name} does not permit: {what}",
            hint=f"the role {needed.value} is required",
        )
