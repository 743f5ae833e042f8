"""Requests and replies over one connection.

Two wildcard subscriptions, made with the first request, receive all replies: those of other processes and
those of the broker (JetStream, publish acknowledgements). Each request has its own reply subject, derived
from its responder (`muster.core.subjects`), and only a message on exactly that subject is its reply: the
permission to reply as A does not cover a request to B. A request fails when the broker forbids it and when
the connection is closed, then with an unknown outcome (`errors.TimedOut`); if there is no subscriber the
broker replies at once. A request that may be repeated (`api.Repetition`) keeps its reply subject, so a late
reply to an earlier attempt counts as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from muster.bus import api
from muster.bus.client import parser, request_timers
from muster.core import errors, subjects

if TYPE_CHECKING:
    from muster.bus.client import connection

_NO_RESPONDERS = b"NATS/1.0 503"


class NoResponders(errors.Unavailable):
    """The broker replied because there is no subscriber."""


class InboxReply:
    """The reply to a request, not decoded."""

    __slots__ = ("data", "raw_headers", "reply", "subject")

    def __init__(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.raw_headers = raw_headers


class _Call:
    """A caller that waits for what arrives on one reply subject."""

    __slots__ = ("fail", "subjects", "take")

    def __init__(
        self,
        requested: Sequence[str],
        take: Callable[[InboxReply], None],
        fail: Callable[[errors.MusterError], None],
    ) -> None:
        self.subjects = requested  # subjects of the request: a rejection of the broker names one of them
        self.take = take
        self.fail = fail


class _Question:
    """A request for one reply, without closures."""

    __slots__ = ("attempts", "deadline_s", "future", "interval_s", "repetition", "subjects", "timeout_s")

    def __init__(self, subject: str, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.subjects: tuple[str, ...] = (subject,)
        self.timeout_s = timeout_s
        self.deadline_s = loop.time() + timeout_s
        self.interval_s = timeout_s  # until the next repetition, or the deadline
        self.future: asyncio.Future[InboxReply] = loop.create_future()
        self.attempts = 1
        self.repetition: tuple[str, bytes, str, bytes | None] | None = None  # the arguments of `send`

    def take(self, answer: InboxReply) -> None:
        if self.attempts > 1 and is_no_responders(answer):
            return  # another attempt may be under way
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: errors.MusterError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(errors.TimedOut(f"no reply from {self.subjects[0]!r} within {self.timeout_s:g} s"))


class RequestInbox:
    """The requests of one connection, and what arrives in reply."""

    def __init__(self, over: connection.NatsConnection, identity: str) -> None:
        self._wire = over
        self._requester = f"{identity}.{secrets.token_hex(16)}"  # and the session
        self._inboxes: list[parser.WireSubscription] = []  # for all replies
        self._tokens = itertools.count(1)
        self._calls: dict[bytes, _Call | _Question] = {}
        self._timers = request_timers.RequestTimers(self._late)
        over.on_state_change.add(self._state_changed)

    def _state_changed(self) -> None:
        for call in list(self._calls.values()):
            if self._wire.is_closed:
                call.fail(
                    errors.TimedOut(
                        f"{self._wire.why_closed()}; a request without a reply may have been executed"
                    )
                )
            elif isinstance(call, _Question):
                self._repeat(call)

    def fail(self, subject: str) -> bool:
        """The broker rejected a publish or a subscription to ``subject``: whether requests waited for it,
        which fail now."""
        is_inbox = any(inbox.subject == subject for inbox in self._inboxes)
        calls = [call for call in self._calls.values() if is_inbox or subject in call.subjects]
        for call in calls:
            call.fail(
                _forbidden_inbox()
                if is_inbox
                else errors.Forbidden(f"this identity may not publish to {subject!r}")
            )
        return bool(calls)

    def _answered(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        call = self._calls.get(subject)
        if call is not None:
            call.take(InboxReply(subject, reply, data, headers))

    def expect(
        self,
        requested: Sequence[str],
        take: Callable[[InboxReply], None],
        fail: Callable[[errors.MusterError], None],
        *,
        stored: bool = False,
    ) -> tuple[str, Callable[[], object]]:
        """A new reply subject whose messages go to ``take``, and the function that removes it.

        ``stored``: the broker replies, when a stream has stored the message.  ``fail`` is called if the
        broker forbids one of the ``requested`` subjects, and when the connection is closed.
        """
        reply = self._reply_subject("" if stored else subjects.responder(requested[0]))
        key = reply.encode()
        calls = self._calls
        calls[key] = _Call(requested, take, fail)
        return reply, lambda: calls.pop(key, None)

    def _reply_subject(self, responder: str) -> str:
        if not self._inboxes:  # the broker has them before the first request
            for prefix in (subjects.INBOX_PREFIX, f"{subjects.REPLY_PREFIX}.*"):
                subject = f"{prefix}.{self._requester}.*"
                self._inboxes.append(self._wire.subscribe_soon(subject, "", self._answered))
        if any(inbox.is_refused for inbox in self._inboxes):
            raise _forbidden_inbox()
        # Every role with topics may publish replies to requests on topics: they must not be guessed from
        # others.
        guarded = responder == subjects.APP
        token = secrets.token_hex(16) if guarded else f"{next(self._tokens):x}"
        return subjects.reply_subject(responder, self._requester, token)

    async def exchange(
        self,
        subject: str,
        data: bytes,
        raw_headers: bytes | None = None,
        *,
        timeout_s: float,
        stored: bool = False,
        repeat: api.Repetition | None = None,
    ) -> InboxReply:
        """Send a request and wait for one reply; `errors.Unavailable` at once if there is no subscriber.

        ``stored``: as with `expect`. Without a connection nothing is sent: an abandoned request must not be
        executed after a reconnection. ``repeat``: when to send it again.
        """
        loop = asyncio.get_running_loop()
        question = _Question(subject, timeout_s, loop)
        if not self._wire.is_connected:
            await self._wire.connected(timeout_s)
            question.interval_s = question.deadline_s - loop.time()
        reply = self._reply_subject("" if stored else subjects.responder(subject))
        key = reply.encode()
        self._calls[key] = question
        if repeat is not None:
            again = repeat.subject or subject
            if again != subject:
                question.subjects = (subject, again)
            question.repetition = again, data if repeat.data is None else repeat.data, reply, raw_headers
            question.interval_s = min(question.interval_s, repeat.after_s)
        self._timers.start(question, question.interval_s)
        try:
            if self._wire.send(subject, data, reply, raw_headers):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(question.deadline_s):
                        await self._wire.ease()
            answer = await question.future
        finally:
            question.future.cancel()  # its timer may just have expired
            self._timers.stop(question, question.interval_s)
            del self._calls[key]
        if is_no_responders(answer):
            raise NoResponders(f"no subscriber on {subject!r}")
        return answer

    def _late(self, question: _Question) -> None:
        """Its time until the next repetition, or until its deadline, is over."""
        if question.future.done():
            return
        left_s = question.deadline_s - asyncio.get_running_loop().time()
        if question.repetition is None or left_s <= 0:
            question.expire()
            return
        self._repeat(question)
        question.interval_s = min(left_s, api.REPEAT_S_MAX, 2 * question.interval_s)
        self._timers.start(question, question.interval_s)

    def _repeat(self, question: _Question) -> None:
        if question.repetition is not None and self._wire.is_connected and not question.future.done():
            question.attempts += 1
            with contextlib.suppress(errors.LimitExceeded):  # of another broker: no repetition arrives
                self._wire.send(*question.repetition)


def _forbidden_inbox() -> errors.Forbidden:
    return errors.Forbidden("this identity may not receive replies: a subscription to its inbox was refused")


def is_no_responders(answer: InboxReply) -> bool:
    """Whether this is the broker's reply to a request without a subscriber."""
    return (
        not answer.data and answer.raw_headers is not None and answer.raw_headers.startswith(_NO_RESPONDERS)
    )
