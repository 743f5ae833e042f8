"""Queries to a notifier: which receivers exist, which would be reached, why others would not.

A notifier may have a million receivers, and decides for all senders meanwhile. So a query reads the columns
and copies the names of what it selects in one step of some milliseconds, and looks at the names in slices:
it shares the event loop as other requests do, at the cost of its client (`muster.bus.rpc.admission`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus.rpc import error_replies, server
from muster.core import errors, messages
from muster.notify import models, protocol, rows
from muster.notify.matcher import grant_scopes, matcher
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.trust import documents

if TYPE_CHECKING:
    from muster.notify.notifier import notifier as notifier_notifier

NEAR_MISSES = 5
LOOKED_AT = 2000
PAGE_BYTES = 400_000
NAME_BYTES = 16  # minimum size of a receiver in a reply
NAMES_AT_ONCE = 2048  # sorted in a millisecond
ROWS_AT_ONCE = 8
EACH_AT_ONCE = 2  # queries of one client: each holds a copy of the names

_JSON = msgspec.json.Encoder()


class _Codec:
    """Replies as `protocol.NotifyQueryResult`."""

    def __init__(self, notifier: notifier_notifier.Notifier) -> None:
        self._notifier = notifier

    def result(self, value: protocol.NotifyQueryResult) -> bytes:
        return messages.encode(value)

    def error(self, error: errors.MusterError) -> bytes:
        fault = error_replies.to_error_reply(error)
        if isinstance(error, messages.MessageTooLarge):
            fault = msgspec.structs.replace(fault, hint="use a lower limit or a narrower query")
        held = tuple(self._notifier.held)
        return self.result(protocol.NotifyQueryResult(notifier=self._notifier.name, shards=held, fault=fault))


def query_server(notifier: notifier_notifier.Notifier) -> server.RpcServer:
    """Every notifier answers each query for the shards that it holds."""

    def operation(name: str, answer: QueryFunction) -> server.RpcOperation:
        async def answered(_: server.RpcCall, query: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
            held = dict(notifier.held)
            result = await answer(notifier, query)
            # Those held from the beginning to the end: the reply covers all of their receivers.
            shards = tuple(number for number, shard in held.items() if notifier.held.get(number) is shard)
            return msgspec.structs.replace(result, shards=shards)

        return server.RpcOperation(
            f"read.{name}",
            answered,
            decode=lambda data: messages.decode(data, protocol.NotifyQuery),
        )

    operations = [operation(name, answer) for name, answer in QUERIES.items()]
    return server.RpcServer(
        notifier.common.bus,
        protocol.PART,
        operations,
        codec=_Codec(notifier),
        each_at_once=EACH_AT_ONCE,
    )


async def _models(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    known = notifier.known.vocabulary
    models_of = {
        f"{model.kind.value}.{model.name}": model
        for model in (*known.receivers.values(), *known.events.values())
    }
    return await _page(notifier, query, models_of, lambda key: _model(models_of[key]))


async def _grants(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    now, chains = time.time(), notifier.known.chains()
    return await _page(
        notifier, query, chains, lambda serial: notifier.known.describe_grant(serial, chains[serial], now=now)
    )


async def _revoked(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    held = notifier.known.revocations.lists.get(query.expression)
    facts: dict[str, Any] = {"number": 0, "serials": [], "ends": {}}
    if held is not None:
        facts = {"number": held.number, "serials": sorted(held.serials), "ends": held.ends}
    return protocol.NotifyQueryResult(notifier=notifier.name, facts=facts)


async def _notifiers(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1 + len(notifier.members.others()))


async def _counts(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    facts = {"counts": dict(notifier.counts), "shards": sorted(notifier.held)}
    return protocol.NotifyQueryResult(notifier=notifier.name, count=len(notifier.engine), facts=facts)


async def _page(
    notifier: notifier_notifier.Notifier,
    query: protocol.NotifyQuery,
    keys: Iterable[str],
    row: Callable[[str], msgspec.Struct],
) -> protocol.NotifyQueryResult:
    """Return as many rows as fit, in order of their keys, and the key to continue after."""
    listed: list[msgspec.Struct] = []
    size, last = 0, ""
    for key in sorted(key for key in keys if key > query.receiver):
        if size > PAGE_BYTES:
            return protocol.NotifyQueryResult(
                notifier=notifier.name, receivers=tuple(listed), facts={"next": last}
            )
        listed.append(row(key))
        size += len(_JSON.encode(listed[-1]))
        last = key
        await asyncio.sleep(0)
    return protocol.NotifyQueryResult(notifier=notifier.name, receivers=tuple(listed))


def _model(model: models.Model) -> rows.ModelRow:
    attributes = {name: str(declared) for name, declared in model.attributes.items()}
    return rows.ModelRow(name=model.name, of=model.kind.value, attributes=attributes)


def _receiver_row(notifier: notifier_notifier.Notifier, receiver: str) -> rows.ReceiverRow:
    return rows.ReceiverRow(
        receiver=receiver,
        model=notifier.engine.model_of(receiver).name,
        state=protocol.to_wire(notifier.engine.state_of(receiver)),
        policy=notifier.engine.policy_of(receiver),
        delivery="durable" if notifier.engine.is_durable(receiver) else "transient",
    )


class _FirstNames:
    """The first of many names, which come in blocks."""

    def __init__(self, number: int) -> None:
        self.count = 0  # of all
        self._number = number
        self._first: list[str] = []
        self._more: list[str] = []

    def add(self, names: list[str]) -> None:
        self.count += len(names)
        if len(self._first) == self._number:
            names = [name for name in names if name < self._first[-1]]
        self._more += names
        if len(self._more) > NAMES_AT_ONCE:
            self.names()

    def names(self) -> list[str]:
        if self._more:
            self._first, self._more = sorted(self._first + self._more)[: self._number], []
        return self._first


async def _receivers(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    engine, count = notifier.engine, 0
    address = notifier.known.vocabulary.address(query.expression) if query.expression else None
    first = _FirstNames(min(query.limit, PAGE_BYTES // NAME_BYTES))
    prefix, _, part = query.receiver.partition(protocol.ANYWHERE)
    for block in engine.name_blocks(None if address is None else engine.find_addressed(address)):
        chosen = [receiver for receiver in block if receiver.startswith(prefix) and part in receiver]
        count += len(chosen)
        first.add([receiver for receiver in chosen if receiver > query.after] if query.after else chosen)
        await asyncio.sleep(0)
    listed: list[rows.ReceiverRow] = []
    size = number = 0
    for receiver in first.names():
        if size > PAGE_BYTES:
            break
        number += 1
        with contextlib.suppress(errors.NotFound):  # it has left meanwhile
            listed.append(_receiver_row(notifier, receiver))
            size += len(_JSON.encode(listed[-1]))
        if number % ROWS_AT_ONCE == 0:
            await asyncio.sleep(0)
    cut = {"next": first.names()[number - 1]} if number < first.count else {}
    return protocol.NotifyQueryResult(notifier=notifier.name, count=count, receivers=tuple(listed), facts=cut)


def _require_room(query: protocol.NotifyQuery, count: int) -> None:
    """Check the size before the reply is built: building one that is too large would delay other requests."""
    if min(query.limit, count) * NAME_BYTES > messages.MAX_BYTES:
        raise messages.MessageTooLarge(
            f"{min(query.limit, count):,} of {count:,} receivers do not fit into a reply"
        )


async def _who(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    """List receivers that match the address and, with an event, accept it; also near misses."""
    address = notifier.known.vocabulary.address(query.expression)
    engine = notifier.engine
    addressed = engine.find_addressed(address)
    event = _event(notifier, query) if query.event is not None else None
    reached = addressed if event is None else grant_scopes.find(engine, event, address)
    count = sum(len(result.rows) for result in reached)
    _require_room(query, count)
    refused = engine.name_blocks(matcher.without(addressed, reached))
    listed = await _first_names(query.limit, engine.name_blocks(reached))
    near: list[rows.NearMiss] = []
    if event is not None:
        for receiver in await _first_names(NEAR_MISSES, refused):
            with contextlib.suppress(errors.NotFound):  # it has left meanwhile
                effective = grant_scopes.attributes_seen_by(event, receiver, engine.state_of(receiver))
                sides = _policy_sides(engine.policy_of(receiver), effective)
                near.append(
                    rows.NearMiss(receiver=receiver, why=[why for side in sides.values() for why in side])
                )
    for receiver in itertools.islice(itertools.chain.from_iterable(engine.name_blocks()), LOOKED_AT):
        if len(near) >= NEAR_MISSES:
            break
        with contextlib.suppress(errors.NotFound):
            misses = explanation.near_misses(address, engine.state_of(receiver))
            if len(misses) == 1:  # one clause away
                near.append(rows.NearMiss(receiver=receiver, why=[f"address: {misses[0]}"]))
        await asyncio.sleep(0)
    return protocol.NotifyQueryResult(
        notifier=notifier.name,
        count=count,
        receivers=tuple({"receiver": receiver} for receiver in listed),
        facts={"near": near, "addressed": sum(len(result.rows) for result in addressed)},
    )


async def _first_names(number: int, blocks: Iterable[list[str]]) -> list[str]:
    first = _FirstNames(number)
    for block in blocks:
        first.add(block)
        await asyncio.sleep(0)
    return first.names()


async def _explain(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    """Explain a decision: the side and clause that failed, the value, since when, and who granted it."""
    engine = notifier.engine
    if query.receiver not in engine:
        return protocol.NotifyQueryResult(notifier=notifier.name)
    event = _event(notifier, query)
    state = engine.state_of(query.receiver)
    address = notifier.known.vocabulary.address(event.address)
    missing = explanation.near_misses(address, state)
    because = missing or explanation.explain(address, state).because
    failing = _policy_sides(
        engine.policy_of(query.receiver), grant_scopes.attributes_seen_by(event, query.receiver, state)
    )
    explained = rows.DeliveryExplanation(
        delivered=not missing and not failing,
        address=rows.ConditionVerdict(holds=not missing, because=[str(reason) for reason in because]),
        event=rows.ConditionVerdict(holds="event" not in failing, because=failing.get("event", [])),
        sender=rows.ConditionVerdict(holds="sender" not in failing, because=failing.get("sender", [])),
        granted=_granted(notifier, event.sender),
        receiver_granted={
            key: grant for key, grant in _granted(notifier, query.receiver).items() if grant.name in state
        },
        state=protocol.to_wire(state),
        since_ms=1000 * engine.changed_s(query.receiver),
    )
    return protocol.NotifyQueryResult(
        notifier=notifier.name, count=1, facts=msgspec.structs.asdict(explained)
    )


def _granted(notifier: notifier_notifier.Notifier, receiver: str) -> dict[str, rows.HeldGrant]:
    """For each restricted attribute of a participant: value, issuer, validity period and scope."""
    process, _, name = receiver.partition("/")
    effective = notifier.known.effective_attributes(process, name, now=time.time())
    everywhere = (documents.GrantScope(), effective.everywhere)
    listed = [
        (key, held, scope)
        for scope, attributes in (everywhere, *effective.scoped)
        for key, held in attributes.items()
    ]
    by_name: dict[str, rows.HeldGrant] = {}
    for key, held, scope in listed:
        limited = bool(scope.region or scope.audience)
        shown = rows.HeldGrant(
            name=key,
            value=protocol.cell(held.value),
            by=held.granted.authority or "root",
            tier=held.granted.tier,
            since=notifier.known.issued_at(held.granted),
            until=held.granted.expires_at,
            within={"region": scope.region, "audience": list(scope.audience)} if limited else {},
        )
        by_name[key if key not in by_name else f"{key} ({len(by_name)})"] = shown
    return by_name


async def _sender(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    """The state of a sender, if this notifier holds it: policies at all notifiers may refer to it."""
    if query.receiver not in notifier.engine:
        return protocol.NotifyQueryResult(notifier=notifier.name)
    state = protocol.to_wire(notifier.engine.state_of(query.receiver))
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1, facts={"state": state})


def _event(notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery) -> protocol.AdmittedEvent:
    if query.event is None:
        raise errors.InvalidInput("the event is missing")
    process, _, receiver = query.sender.partition("/")
    if not receiver:
        raise errors.InvalidInput("the sender of the event is missing: give it as process/name")
    return notifier.router.admit(process, query.event, state=protocol.from_wire(query.state))[0]


def _policy_sides(policy: str, attributes: dict[str, types.Value]) -> dict[str, list[str]]:
    """Return the sides of a policy that failed (``event``, ``sender``), each with the failed clauses."""
    if not policy:
        return {"event": ["the receiver has no policy, so it accepts nothing"]}
    sides: dict[str, list[str]] = {}
    for finding in explanation.near_misses(models.parse_policy(policy), attributes):
        of_sender = any(key.startswith("sender.") for key, _ in finding.values)
        sides.setdefault("sender" if of_sender else "event", []).append(str(finding))
    return sides


async def _check(
    notifier: notifier_notifier.Notifier, query: protocol.NotifyQuery
) -> protocol.NotifyQueryResult:
    condition = notifier.known.vocabulary.policy(query.expression)
    measured, parts = models.cost_of(condition)
    checked = rows.PolicyCheck(
        canonical=models.canonical_text(condition),
        clauses=measured.clauses,
        depth=measured.depth,
        cost=measured.dearest.name.lower(),
        conjunctions=parts,
        indexed=parts is not None,
    )
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1, facts=msgspec.structs.asdict(checked))


QueryFunction = Callable[
    ["notifier_notifier.Notifier", protocol.NotifyQuery], Coroutine[Any, Any, protocol.NotifyQueryResult]
]

QUERIES: dict[str, QueryFunction] = {
    "receivers": _receivers,
    "who": _who,
    "explain": _explain,
    "sender": _sender,
    "check": _check,
    "models": _models,
    "grants": _grants,
    "revoked": _revoked,
    "notifiers": _notifiers,
    "counts": _counts,
}
