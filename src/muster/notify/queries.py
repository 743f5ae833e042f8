"""Queries about receivers, models and grants (the notifiers' side: `muster.notify.notifier.query_handler`).

Each notifier answers for the receivers that it holds, so most queries go to all notifiers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from muster.bus import api
from muster.bus.rpc import client, error_replies
from muster.core import errors, messages, subjects
from muster.notify import protocol, rows
from muster.trust import grants

PART = protocol.PART
ANSWER_S = 5.0  # maximum wait for replies
SOON_S = 1.0

T = TypeVar("T")


async def _query_all(
    bus: api.Bus, operation: str, query: protocol.NotifyQuery, timeout_s: float, *, complete: bool = False
) -> list[protocol.NotifyQueryResult]:
    """Return the replies of all notifiers, when every shard is covered or the time is up.

    ``complete``: raise `errors.Unavailable` if a shard is not covered. It does not use `rpc.client`, which
    takes one reply.
    """
    subject = subjects.from_identity(PART, bus.identity, "read", operation)
    enough: int | None = (await _query_any(bus, "notifiers", protocol.NotifyQuery())).count
    while True:
        replies = await bus.gather(subject, messages.encode(query), enough=enough, timeout_s=timeout_s)
        results = [messages.decode(reply.data, protocol.NotifyQueryResult) for reply in replies]
        answered_shards = {shard for result in results for shard in result.shards}
        if enough is None or len(answered_shards) == protocol.SHARDS:
            break
        # Shards are moving, or a notifier has just started: replies that arrive soon still count.
        enough, timeout_s = None, min(timeout_s, SOON_S)
    for result in results:
        if result.fault is not None:
            raise error_replies.from_error_reply(result.fault)
    if not results:
        raise _no_notifier()
    if complete and len(answered_shards) < protocol.SHARDS:
        raise errors.Unavailable("some shards of the receivers have no notifier now")
    return results


def _no_notifier() -> errors.Unavailable:
    return errors.Unavailable("no notifier replies", hint="is the domain up? (muster status)")


async def _query_any(bus: api.Bus, operation: str, query: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    subject = subjects.from_identity(PART, bus.identity, "read", operation)
    try:
        reply = await client.exchange(
            bus, subject, messages.encode(query), timeout_s=ANSWER_S, waits=False, absent=_no_notifier()
        )
    except errors.TimedOut as error:
        raise _no_notifier() from error
    result = messages.decode(reply.data, protocol.NotifyQueryResult)
    if result.fault is not None:
        raise error_replies.from_error_reply(result.fault)
    return result


async def list_receivers(
    bus: api.Bus,
    *,
    where: str = "",
    prefix: str = "",
    after: str = "",
    limit: int = 100,
    timeout_s: float = ANSWER_S,
    complete: bool = False,
) -> rows.ReceiverList:
    """Receivers in the order of their names, asked for in pages that fit into messages.

    ``complete``: `errors.Unavailable` while a part of them is not known.
    """
    listed: list[rows.ReceiverRow] = []
    while True:
        room = limit - len(listed)
        query = protocol.NotifyQuery(expression=where, receiver=prefix, after=after, limit=room)
        results = await _query_all(bus, "receivers", query, timeout_s, complete=complete)
        # A notifier with more may hold receivers between its last one and those of the others.
        ends = [str(result.facts["next"]) for result in results if "next" in result.facts]
        page = sorted(
            (_convert(row, rows.ReceiverRow) for result in results for row in result.receivers), key=_name
        )
        page = [receiver for receiver in page if not ends or _name(receiver) <= min(ends)]
        listed += page[:room]
        more = bool(page) and (bool(ends) or len(page) > room)
        after = _name(listed[-1]) if listed else ""
        if not more or len(listed) >= limit:
            count = sum(result.count for result in results)
            return rows.ReceiverList(count=count, receivers=listed, next=after if more else None)


def _name(receiver: rows.ReceiverRow) -> str:
    return receiver.receiver


def _convert(value: Any, kind: type[T]) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise errors.MusterError(f"the reply of a notifier is malformed: {error}") from error


async def match_receivers(
    bus: api.Bus,
    address: str,
    *,
    event: protocol.SendEvent | None = None,
    sender: str = "",
    limit: int = 100,
    timeout_s: float = ANSWER_S,
) -> rows.ReceiverMatches:
    """The receivers that an address reaches; with an event, those that accept it from this sender."""
    state = await _state_of(bus, sender, timeout_s) if event is not None else {}
    query = protocol.NotifyQuery(expression=address, event=event, sender=sender, state=state, limit=limit)
    results = await _query_all(bus, "who", query, timeout_s)
    names = sorted(str(row["receiver"]) for result in results for row in result.receivers)
    near = [_convert(miss, rows.NearMiss) for result in results for miss in result.facts.get("near", ())]
    count = sum(result.count for result in results)
    return rows.ReceiverMatches(count=count, receivers=names[:limit], near=near)


async def explain(
    bus: api.Bus, event: protocol.SendEvent, *, sender: str, receiver: str, timeout_s: float = ANSWER_S
) -> rows.DeliveryExplanation:
    state = await _state_of(bus, sender, timeout_s)
    query = protocol.NotifyQuery(event=event, sender=sender, state=state, receiver=receiver)
    for result in await _query_all(bus, "explain", query, timeout_s):
        if result.count:
            return _convert(result.facts, rows.DeliveryExplanation)
    raise errors.NotFound(
        f"there is no receiver {receiver[:160]}", hint="`muster notify receivers` lists them"
    )


async def _state_of(bus: api.Bus, receiver: str, timeout_s: float) -> protocol.Values:
    """Return the state of a receiver; empty if it only sends."""
    for result in await _query_all(bus, "sender", protocol.NotifyQuery(receiver=receiver), timeout_s):
        if result.count:
            return msgspec.convert(result.facts["state"], protocol.Values)
    return {}


async def _pages(bus: api.Bus, operation: str, kind: type[T]) -> list[T]:
    items: list[T] = []
    query = protocol.NotifyQuery()
    while True:
        result = await _query_any(bus, operation, query)
        items += [_convert(item, kind) for item in result.receivers]
        if "next" not in result.facts:
            return items
        query = protocol.NotifyQuery(receiver=result.facts["next"])


async def check(bus: api.Bus, policy: str) -> rows.PolicyCheck:
    """Check a policy against the domain's models and compute its cost; raises the error in it."""
    result = await _query_any(bus, "check", protocol.NotifyQuery(expression=policy))
    return _convert(result.facts, rows.PolicyCheck)


async def list_models(bus: api.Bus) -> list[rows.ModelRow]:
    """The models of receivers, then those of events."""
    return sorted(await _pages(bus, "models", rows.ModelRow), key=lambda model: model.of, reverse=True)


async def next_revocations(
    bus: api.Bus, authority: grants.Authority, serials: Iterable[str], *, now: float
) -> tuple[int, str]:
    """Return the authority's next list of revocations and its number: the present list with ``serials``,
    without those of grants that are over."""
    issuer = authority.key.public
    facts = (await _query_any(bus, "revoked", protocol.NotifyQuery(expression=issuer))).facts
    ends = {grant.serial: grant.expires_at for grant in await list_grants(bus)} | facts.get("ends", {})
    revoked, number = {*facts["serials"], *serials}, facts["number"] + 1
    return number, authority.revoke(revoked, number=number, now=now, ends=ends)


async def list_grants(bus: api.Bus) -> list[rows.GrantRow]:
    """All grants, and whether each is in force."""
    listed = await _pages(bus, "grants", rows.GrantRow)
    return sorted(listed, key=lambda grant: (grant.holder, grant.expires_at))
