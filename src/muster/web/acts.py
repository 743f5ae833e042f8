"""All that is done: who may, under whose identity, and the line of the audit it leaves.

Every act passes `Desk.do`, from a page and from REST alike: the person's role is checked, the act goes over
the bus under the person's own identity (so that the services' own checks and records name the person too),
and what became of it is written to the domain's audit before the answer goes out.  What was refused is
written as well.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from muster.bus import api
from muster.core import errors, log, messages, subjects
from muster.trust import roles
from muster.web import sessions, source

T = TypeVar("T")
PART = "web"
events = log.Events("web")

#: Words of the audit: each is a token of its subject.
Act = Callable[[api.Bus], Awaitable[T]]


class Desk:
    def __init__(self, known: source.Source) -> None:
        self._source = known
        self._records: set[asyncio.Task[None]] = set()

    async def do(
        self,
        session: sessions.Session,
        what: str,
        target: str,
        act: Act[T],
        *,
        touches: str = "",
        needs: sessions.Role = sessions.Role.OPERATOR,
    ) -> T:
        """Carry out the act if this person may, and record its outcome, also when it is cancelled."""
        outcome, why, sent = messages.Outcome.IN_DOUBT, "cancelled before it was answered", False
        try:
            require(session, needs, what)
            bus = await self._source.link.as_person(session.name, roles.Role.OPERATOR)
            sent = True
            found = await act(bus)
            outcome, why = messages.Outcome.DONE, ""
        except errors.MusterError as error:
            outcome, why = messages.Outcome.of(error), error.message
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            raise
        finally:
            if outcome is messages.Outcome.IN_DOUBT and not sent:
                outcome = messages.Outcome.FAILED
            if touches and sent:
                self._source.cache.touch(touches)
            await self._finish(self.record(session.name, what, target, why, outcome, door=session.kind))
        return found

    async def _finish(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for ``work``, which goes on if the caller is cancelled."""
        task = asyncio.create_task(work, name="web audit record")
        self._records.add(task)
        task.add_done_callback(self._records.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Wait for the records that are still being stored."""
        await asyncio.gather(*self._records, return_exceptions=True)

    async def record(
        self, who: str, what: str, target: str, why: str, outcome: messages.Outcome, *, door: str
    ) -> None:
        """One line of the audit; an act is not undone because its record could not be stored."""
        decision = messages.Decision(
            id=secrets.token_hex(8),
            who=who[:256] or "-",
            what=what,
            target=target[:256] or "-",
            why=why[:4096] or f"{who} asked",
            at_ms=int(time.time() * 1000),
            outcome=outcome,
            details={"door": "rest" if door == sessions.Kind.TOKEN else "web"},
        )
        subject = subjects.logged(PART, "decision", what)
        try:
            stream = await _audit(self._source.link.bus)
            await stream.publish(subject, messages.encode(decision))
        except errors.MusterError as error:
            events.error("not-recorded", what=what, target=target, by=who, error=error)


async def _audit(bus: api.Bus) -> api.Stream:
    """The domain's audit; where no other part has made it yet, it is made."""
    try:
        return await bus.open_stream(messages.DECISIONS_STREAM)
    except errors.NotFound:
        return await bus.stream(
            api.StreamSettings(
                name=messages.DECISIONS_STREAM,
                subjects=(messages.DECISIONS_SUBJECTS,),
                max_bytes=256 << 20,
                max_age_s=365 * 86400.0,
            )
        )


def require(session: sessions.Session, needed: sessions.Role, what: str) -> None:
    if not session.role.covers(needed):
        raise errors.Forbidden(
            f"{session.name} has the role {session.role.value}, and may not {what}",
            hint=f"it takes the role {needed.value}",
        )
