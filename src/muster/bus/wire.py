"""Questions and their answers over one connection.

One wildcard subscription, made when somebody asks first, receives all answers; each question has a token of
its own there.  Whoever asks is told by an error when the broker forbids the question and when the connection
is closed; a question that nobody hears is answered at once, by the broker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from muster.bus import counting, line
from muster.core import errors

_NO_RESPONDERS = b"NATS/1.0 503"


class NobodyListens(errors.Unavailable):
    """The broker answered in place of a subscriber: there is none."""


class Answer:
    """What came back to a request, before anybody looked into it."""

    __slots__ = ("data", "raw_headers", "reply", "subject")

    def __init__(self, subject: bytes, reply: bytes, data: bytes, raw_headers: bytes | None) -> None:
        self.subject = subject
        self.reply = reply
        self.data = data
        self.raw_headers = raw_headers


class _Call:
    """Somebody waiting for what arrives under one token of our inbox."""

    __slots__ = ("fail", "subjects", "take")

    def __init__(
        self,
        subjects: Sequence[str],
        take: Callable[[Answer], None],
        fail: Callable[[errors.MusterError], None],
    ) -> None:
        self.subjects = subjects  # what was asked there: a refusal of the broker names it
        self.take = take
        self.fail = fail


class _Question:
    """The same for one answer, without a function for each of its ends."""

    __slots__ = ("future", "subjects", "timeout_s")

    def __init__(self, subject: str, timeout_s: float, loop: asyncio.AbstractEventLoop) -> None:
        self.subjects = (subject,)
        self.timeout_s = timeout_s
        self.future: asyncio.Future[Answer] = loop.create_future()

    def take(self, answer: Answer) -> None:
        if not self.future.done():
            self.future.set_result(answer)

    def fail(self, error: errors.MusterError) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def expire(self) -> None:
        self.fail(errors.TimedOut(f"no answer from {self.subjects[0]!r} within {self.timeout_s:g} s"))


class Wire(line.Line):
    """A connection that can ask."""

    def __init__(
        self,
        inbox: str,
        on_change: Callable[[str], None],
        on_refused: Callable[[str], None],
        counts: counting.Counts,
    ) -> None:
        super().__init__(inbox, on_change, on_refused, counts)
        self._mux_prefix = f"{self.fresh_inbox()}."
        self._mux_start = len(self._mux_prefix)
        self._mux_started: asyncio.Future[bool] | None = None
        self._tokens = itertools.count(1)
        self._calls: dict[bytes, _Call | _Question] = {}

    async def _closed_for_good(self) -> None:
        await super()._closed_for_good()
        for call in list(self._calls.values()):
            call.fail(self.why_closed())

    def _told_those_who_asked(self, subject: str) -> bool:
        asked = [
            call for call in self._calls.values() if any(subject == one.lower() for one in call.subjects)
        ]
        for call in asked:
            call.fail(errors.Forbidden(f"this identity may not publish to {subject!r}"))
        return bool(asked)

    async def _start_mux(self) -> None:
        """One wildcard subscription receives all answers; shared by all who ask first at once."""
        started = self._mux_started = asyncio.get_running_loop().create_future()
        try:
            await self.listen(self._mux_prefix + "*", "", self._answered, timeout_s=10.0)
        except errors.MusterError as error:
            self._mux_started = None
            started.set_exception(error)
            started.exception()
            raise
        except BaseException:  # this asker was given up, which is no news for the others
            self._mux_started = None
            started.set_result(False)
            raise
        started.set_result(True)

    def _answered(self, subject: bytes, reply: bytes, data: bytes, headers: bytes | None) -> None:
        call = self._calls.get(subject[self._mux_start :])
        if call is not None:
            call.take(Answer(subject, reply, data, headers))

    @property
    def is_ready(self) -> bool:
        """Answers can be received."""
        return self._mux_started is not None and self._mux_started.done()

    async def ready(self) -> None:
        """Answers can be received when this returns."""
        while (started := self._mux_started) is not None:
            if started.done() or await asyncio.shield(started):
                return
        await self._start_mux()

    def expect(
        self,
        subjects: Sequence[str],
        take: Callable[[Answer], None],
        fail: Callable[[errors.MusterError], None],
    ) -> tuple[str, Callable[[], object]]:
        """A fresh reply subject whose messages go to ``take``, and the function that ends it.

        ``fail`` hears of it if the broker forbids one of ``subjects``, and when the connection is closed.
        Call `ready` before.
        """
        token = b"%x" % next(self._tokens)
        calls = self._calls
        calls[token] = _Call(subjects, take, fail)
        return self._mux_prefix + token.decode(), lambda: calls.pop(token, None)

    async def ask(
        self, subject: str, data: bytes, raw_headers: bytes | None = None, *, timeout_s: float
    ) -> Answer:
        """Send a request and wait for one answer; `errors.Unavailable` at once if nobody listens.

        Without a connection nothing is sent: what was given up must not be done when one is back.
        """
        if not self.is_connected:
            await self.connected(timeout_s)
        if not self.is_ready:
            await self.ready()
        loop = asyncio.get_running_loop()
        question = _Question(subject, timeout_s, loop)
        token = b"%x" % next(self._tokens)
        self._calls[token] = question
        alarm = loop.call_later(timeout_s, question.expire)
        try:
            if self.send(subject, data, self._mux_prefix + token.decode(), raw_headers):
                await self.ease()
            answer = await question.future
        finally:
            alarm.cancel()
            del self._calls[token]
        if nobody_listens(answer):
            raise NobodyListens(f"nobody listens on {subject!r}")
        return answer


def nobody_listens(answer: Answer) -> bool:
    """The broker's own answer to a request for which there is no subscription."""
    return (
        not answer.data and answer.raw_headers is not None and answer.raw_headers.startswith(_NO_RESPONDERS)
    )
