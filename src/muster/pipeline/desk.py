"""The desk: answers questions about the fleet and the job, and does what operators ask."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from typing import Annotated, Any

import msgspec

from muster.bus import api
from muster.core import errors, log, messages, subjects
from muster.pipeline import alerts, outcomes, protocol

SILENCE_S_MAX = 10 * 365 * 86400.0


class Desk:
    """``batches``: the progress of the last ones, newest last; ``stop`` ends the service."""

    def __init__(
        self,
        known: outcomes.Outcomes,
        operators: tuple[str, ...],
        *,
        progress: Callable[[], protocol.Progress],
        batches: Callable[[], list[protocol.Progress]],
        stop: Callable[[], None],
    ) -> None:
        self._outcomes = known
        self._operators = operators
        self._progress = progress
        self._batches = batches
        self._stop = stop
        self._log = log.Events("pipeline")

    async def answer(self, message: api.Message) -> None:
        sender = subjects.sender_of(message.subject)
        if not subjects.may_reply(message.subject, message.reply):
            return
        try:
            answer: dict[str, Any] = {"result": await self._serve(sender, message)}
        except errors.MusterError as error:
            answer = {"error": {"code": error.code, "message": error.message, "hint": error.hint}}
        await message.respond(msgspec.json.encode(answer))

    async def _serve(self, sender: str, message: api.Message) -> Any:
        kind, _, verb = message.subject.removeprefix(subjects.said_by(protocol.PART, sender, "")).partition(
            "."
        )
        try:
            given = msgspec.json.decode(message.data or b"{}", type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise errors.InvalidInput(f"the question is not a JSON object: {error}") from error
        if kind == "read":
            return self._read(verb, given)
        if "*" not in self._operators and sender not in self._operators:
            raise errors.Forbidden(
                f"{sender} may not {verb}", hint="pipeline.operators in the settings lists who may"
            )
        self._log.info("asked", by=sender, verb=verb)
        return await self._do(sender, verb, given)

    def _read(self, verb: str, given: dict[str, Any]) -> Any:
        match verb:
            case "status":
                return self._progress()
            case "batches":
                return self._batches()
            case "alerts":
                return self._outcomes.book.alerts()
            case "silences":
                return self._outcomes.book.silences()
            case "latest":
                return self._outcomes.latest.get((str(given.get("level")), str(given.get("name", ""))))
        raise errors.NotFound(f"nothing called {verb!r} can be read here")

    async def _do(self, sender: str, verb: str, given: dict[str, Any]) -> Any:
        now_ms = int(time.time() * 1000)
        match verb:
            case "stop":
                self._stop()
                return None
            case "acknowledge":
                asked = _asked(given, _Acknowledge)
                outcome = self._outcomes.book.acknowledge(asked.rule, asked.about, sender, now_ms)
                made: Any = None
            case "silence":
                wish = _asked(given, _Silence)
                # From now on: the stream's clock is behind while the pipeline catches up.
                begin_ms = min(now_ms, self._outcomes.clock_ms or now_ms)
                end_ms = (now_ms if wish.from_ms is None else wish.from_ms) + int(wish.for_s * 1000)
                made = alerts.Silence(
                    id=uuid.uuid4().hex[:8],
                    covers=wish.covers,
                    from_ms=begin_ms if wish.from_ms is None else wish.from_ms,
                    until_ms=end_ms,
                    by=sender,
                    reason=wish.reason,
                )
                outcome = self._outcomes.book.silence(made, now_ms)
            case "unsilence":
                outcome, made = self._outcomes.book.unsilence(_asked(given, _Unsilence).id), None
            case _:
                raise errors.NotFound(f"there is no request {verb!r}")
        await self._outcomes.obey(outcome)
        await asyncio.to_thread(self._outcomes.save)
        return made


class _Acknowledge(msgspec.Struct, forbid_unknown_fields=True):
    rule: str
    about: str


class _Silence(msgspec.Struct, forbid_unknown_fields=True):
    covers: str
    for_s: Annotated[float, msgspec.Meta(gt=0, le=SILENCE_S_MAX)]
    from_ms: messages.TimeMs | None = None
    reason: str = ""


class _Unsilence(msgspec.Struct, forbid_unknown_fields=True):
    id: str


def _asked(given: dict[str, Any], kind: type[Any]) -> Any:
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise errors.InvalidInput(str(error)) from error
