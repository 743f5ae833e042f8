"""What people ask about receivers, models and grants; the notifiers answer
(`muster.notify.notifier.query_handler`).

Each notifier answers for the receivers that it holds, so most questions go to all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from muster.bus import api
from muster.bus.rpc import client as rpc
from muster.bus.rpc import error_replies
from muster.core import errors, messages, subjects
from muster.notify import protocol

PART = protocol.PART
ANSWER_S = 5.0  # for answers; most have come long before
SOON_S = 1.0


async def _everybody(
    bus: api.Bus, question: str, ask: protocol.NotifyQuery, timeout_s: float
) -> list[protocol.NotifyQueryResult]:
    """All notifiers' answers: until every shard has been spoken for, or time is up.

    Not `rpc.client`, which takes one answer.
    """
    subject = subjects.from_identity(PART, bus.identity, "read", question)
    enough: int | None = (await _anybody(bus, "notifiers", protocol.NotifyQuery())).count
    while True:
        replies = await bus.gather(subject, messages.encode(ask), enough=enough, timeout_s=timeout_s)
        results = [messages.decode(reply.data, protocol.NotifyQueryResult) for reply in replies]
        spoken_for = {shard for result in results for shard in result.shards}
        if enough is None or len(spoken_for) == protocol.SHARDS:
            break
        # Shards are moving, or a notifier has just started: replies that arrive soon still count.
        enough, timeout_s = None, min(timeout_s, SOON_S)
    for result in results:
        if result.fault is not None:
            raise error_replies.from_error_reply(result.fault)
    if not results:
        raise _nobody()
    return results


def _nobody() -> errors.Unavailable:
    return errors.Unavailable("no notifier answers", hint="is the domain up? (muster status)")


async def _anybody(bus: api.Bus, question: str, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    subject = subjects.from_identity(PART, bus.identity, "read", question)
    try:
        reply = await rpc.exchange(
            bus, subject, messages.encode(ask), timeout_s=ANSWER_S, waits=False, absent=_nobody()
        )
    except errors.TimedOut as error:
        raise _nobody() from error
    result = messages.decode(reply.data, protocol.NotifyQueryResult)
    if result.fault is not None:
        raise error_replies.from_error_reply(result.fault)
    return result


@dataclass(frozen=True, slots=True)
class ReceiverList:
    count: int  # of all that fit, whatever is listed
    receivers: list[dict[str, Any]]
    near: list[dict[str, Any]]
    next: str | None = None  # the name after which to go on; None: all are listed


async def list_receivers(
    bus: api.Bus,
    *,
    where: str = "",
    prefix: str = "",
    after: str = "",
    limit: int = 100,
    timeout_s: float = ANSWER_S,
) -> ReceiverList:
    """Receivers in the order of their names, asked for in pages that fit into messages."""
    listed: list[dict[str, Any]] = []
    while True:
        room = limit - len(listed)
        ask = protocol.NotifyQuery(expression=where, receiver=prefix, after=after, limit=room)
        results = await _everybody(bus, "receivers", ask, timeout_s)
        # A notifier that has more may hold receivers between its last and another's.
        ends = [str(result.facts["next"]) for result in results if "next" in result.facts]
        page = sorted((receiver for result in results for receiver in result.receivers), key=_name)
        page = [receiver for receiver in page if not ends or _name(receiver) <= min(ends)]
        listed += page[:room]
        more = bool(page) and (bool(ends) or len(page) > room)
        after = _name(listed[-1]) if listed else ""
        if not more or len(listed) >= limit:
            return ReceiverList(sum(result.count for result in results), listed, [], after if more else None)


def _name(receiver: dict[str, Any]) -> str:
    return str(receiver["receiver"])


async def match_receivers(
    bus: api.Bus,
    address: str,
    *,
    event: protocol.SendEvent | None = None,
    sender: str = "",
    limit: int = 100,
    timeout_s: float = ANSWER_S,
) -> ReceiverList:
    """Who an address would reach; with an event, only those who would accept it from this sender."""
    state = await _state_of(bus, sender, timeout_s) if event is not None else {}
    ask = protocol.NotifyQuery(expression=address, event=event, sender=sender, state=state, limit=limit)
    results = await _everybody(bus, "who", ask, timeout_s)
    listed = sorted((receiver for result in results for receiver in result.receivers), key=_name)
    near = [miss for result in results for miss in result.facts.get("near", ())]
    return ReceiverList(sum(result.count for result in results), listed[:limit], near)


async def explain(
    bus: api.Bus, event: protocol.SendEvent, *, sender: str, receiver: str, timeout_s: float = ANSWER_S
) -> dict[str, Any]:
    state = await _state_of(bus, sender, timeout_s)
    ask = protocol.NotifyQuery(event=event, sender=sender, state=state, receiver=receiver)
    for result in await _everybody(bus, "explain", ask, timeout_s):
        if result.count:
            return dict(result.facts)
    raise errors.NotFound(
        f"there is no receiver {receiver[:160]}", hint="`muster notify receivers` lists them"
    )


async def _state_of(bus: api.Bus, receiver: str, timeout_s: float) -> protocol.Values:
    """What a receiver says of itself; nothing if it only sends."""
    for result in await _everybody(bus, "sender", protocol.NotifyQuery(receiver=receiver), timeout_s):
        if result.count:
            return msgspec.convert(result.facts["state"], protocol.Values)
    return {}


async def _pages(bus: api.Bus, question: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    ask = protocol.NotifyQuery()
    while True:
        result = await _anybody(bus, question, ask)
        rows += result.receivers
        if "next" not in result.facts:
            return rows
        ask = protocol.NotifyQuery(receiver=result.facts["next"])


async def check(bus: api.Bus, policy: str) -> dict[str, Any]:
    """Typed against the domain's models, with its cost; raises what is wrong with it."""
    return dict((await _anybody(bus, "check", protocol.NotifyQuery(expression=policy))).facts)


async def defined(bus: api.Bus) -> list[dict[str, Any]]:
    """The models there are: those of receivers, then those of events."""
    return sorted(await _pages(bus, "models"), key=lambda model: str(model["of"]), reverse=True)


async def revoked(bus: api.Bus, issuer: str) -> tuple[int, frozenset[str]]:
    """The number of an authority's list of revocations, and what stands in it."""
    facts = (await _anybody(bus, "revoked", protocol.NotifyQuery(expression=issuer))).facts
    return facts["number"], frozenset(facts["serials"])


async def granted(bus: api.Bus) -> list[dict[str, Any]]:
    """The grants there are, with whether each is believed."""
    return sorted(await _pages(bus, "grants"), key=lambda grant: (str(grant["holder"]), grant["expires_at"]))
