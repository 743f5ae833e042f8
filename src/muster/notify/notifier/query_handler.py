"""Queries to a notifier: which receivers exist, which would be reached, why others would not."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from muster.bus.rpc import error_replies, server
from muster.core import errors, messages
from muster.notify import models, protocol
from muster.notify.matcher import grant_scopes
from muster.predicates import types
from muster.predicates.analysis import explanation
from muster.trust import documents

if TYPE_CHECKING:
    from muster.notify.notifier import notifier as notifier_notifier

NEAR_MISSES = 5
LOOKED_AT = 2000
PAGE_BYTES = 400_000
NAME_BYTES = 16  # at the least, in an answer

_JSON = msgspec.json.Encoder()


class _Codec:
    """Replies as `protocol.Told`, each with the shards that the notifier speaks for."""

    def __init__(self, notifier: notifier_notifier.Notifier) -> None:
        self._notifier = notifier

    def result(self, value: protocol.NotifyQueryResult) -> bytes:
        return messages.encode(msgspec.structs.replace(value, shards=tuple(self._notifier.held)))

    def error(self, error: errors.MusterError) -> bytes:
        fault = error_replies.to_error_reply(error)
        if isinstance(error, messages.MessageTooLarge):
            fault = msgspec.structs.replace(fault, hint="ask for fewer, or narrow the question down")
        return self.result(protocol.NotifyQueryResult(notifier=self._notifier.name, fault=fault))


def server_of(notifier: notifier_notifier.Notifier) -> server.RpcServer:
    """Every notifier answers each question, for the shards that it holds."""

    def operation(name: str, answer: Answer) -> server.RpcOperation:
        async def answered(_: server.RpcCall, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
            return answer(notifier, ask)

        return server.RpcOperation(
            f"read.{name}", answered, decode=lambda data: messages.decode(data, protocol.NotifyQuery)
        )

    operations = [operation(name, answer) for name, answer in QUESTIONS.items()]
    return server.RpcServer(notifier.common.bus, protocol.PART, operations, codec=_Codec(notifier))


def _models(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    known = notifier.known.vocabulary
    models_of = {
        f"{model.kind.value}.{model.name}": model
        for model in (*known.receivers.values(), *known.events.values())
    }
    return _page(notifier, ask, models_of, lambda key: _model(models_of[key]))


def _grants(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    now, chains = time.time(), notifier.known.chains()
    return _page(notifier, ask, chains, lambda serial: notifier.known.shown(serial, chains[serial], now=now))


def _revoked(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    held = notifier.known.revocations.lists.get(ask.expression)
    facts = {"number": held.number if held else 0, "serials": sorted(held.serials) if held else []}
    return protocol.NotifyQueryResult(notifier=notifier.name, facts=facts)


def _notifiers(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1 + len(notifier.members.others()))


def _counts(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    facts = {"counts": dict(notifier.counts), "shards": sorted(notifier.held)}
    return protocol.NotifyQueryResult(notifier=notifier.name, count=len(notifier.engine), facts=facts)


def _page(
    notifier: notifier_notifier.Notifier,
    ask: protocol.NotifyQuery,
    keys: Iterable[str],
    made: Callable[[str], dict[str, Any]],
) -> protocol.NotifyQueryResult:
    """Of what there may be any number of: as much as fits, in order, and where to go on."""
    listed: list[dict[str, Any]] = []
    size, last = 0, ""
    for key in sorted(key for key in keys if key > ask.receiver):
        if size > PAGE_BYTES:
            return protocol.NotifyQueryResult(
                notifier=notifier.name, receivers=tuple(listed), facts={"next": last}
            )
        listed.append(made(key))
        size += len(_JSON.encode(listed[-1]))
        last = key
    return protocol.NotifyQueryResult(notifier=notifier.name, receivers=tuple(listed))


def _model(model: models.Model) -> dict[str, Any]:
    attributes = {name: str(declared) for name, declared in model.attributes.items()}
    return {"name": model.name, "of": model.kind.value, "attributes": attributes}


def _shown(notifier: notifier_notifier.Notifier, receiver: str) -> dict[str, Any]:
    return {
        "receiver": receiver,
        "model": notifier.engine.model_of(receiver).name,
        "state": protocol.to_wire(notifier.engine.state_of(receiver)),
        "policy": notifier.engine.policy_of(receiver),
        "delivery": "durable" if notifier.engine.is_durable(receiver) else "transient",
    }


def _receivers(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    candidates: Iterable[str]
    if ask.expression:
        candidates = notifier.engine.means(notifier.known.vocabulary.address(ask.expression))
    else:
        candidates = notifier.engine.receivers()
    chosen = [receiver for receiver in candidates if receiver.startswith(ask.receiver)]
    following = [receiver for receiver in chosen if receiver > ask.after] if ask.after else chosen
    listed: list[dict[str, Any]] = []
    size = 0
    for receiver in heapq.nsmallest(ask.limit, following):
        if size > PAGE_BYTES:
            break
        listed.append(_shown(notifier, receiver))
        size += len(_JSON.encode(listed[-1]))
    cut = {"next": listed[-1]["receiver"]} if len(listed) < len(following) else {}
    return protocol.NotifyQueryResult(
        notifier=notifier.name, count=len(chosen), receivers=tuple(listed), facts=cut
    )


def _require_room(ask: protocol.NotifyQuery, count: int) -> None:
    """Before they are put together: a million that no answer holds would keep everybody else waiting."""
    if min(ask.limit, count) * NAME_BYTES > messages.MAX_BYTES:
        raise messages.MessageTooLarge(
            f"{min(ask.limit, count):,} of {count:,} receivers do not fit into an answer"
        )


def _who(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    """Those an address reaches and, of an event, those who accept it; and who only just is not among them."""
    address = notifier.known.vocabulary.address(ask.expression)
    engine = notifier.engine
    meant = engine.means(address)
    event = _event(notifier, ask) if ask.event is not None else None
    reached = meant if event is None else engine.names(grant_scopes.find(engine, event, address))
    _require_room(ask, len(reached))
    near: list[dict[str, Any]] = []
    taken = {*meant, *reached}
    if event is not None:
        refused = set(meant).difference(reached)
        for receiver in heapq.nsmallest(NEAR_MISSES, refused):
            believed = grant_scopes.attributes_seen_by(event, receiver, engine.state_of(receiver))
            sides = _policy_sides(engine.policy_of(receiver), believed)
            near.append({"receiver": receiver, "why": [why for side in sides.values() for why in side]})
    for receiver in itertools.islice(engine.receivers(), LOOKED_AT):
        if len(near) >= NEAR_MISSES:
            break
        if receiver not in taken:
            misses = explanation.near_misses(address, engine.state_of(receiver))
            if len(misses) == 1:  # one clause away
                near.append({"receiver": receiver, "why": [f"address: {misses[0]}"]})
    listed = tuple({"receiver": receiver} for receiver in heapq.nsmallest(ask.limit, reached))
    return protocol.NotifyQueryResult(
        notifier=notifier.name,
        count=len(reached),
        receivers=listed,
        facts={"near": near, "meant": len(meant)},
    )


def _explain(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    """Which side failed, which clause, what it found, since when, and who granted what is restricted."""
    engine = notifier.engine
    if ask.receiver not in engine:
        return protocol.NotifyQueryResult(notifier=notifier.name)
    event = _event(notifier, ask)
    state = engine.state_of(ask.receiver)
    address = notifier.known.vocabulary.address(event.address)
    missing = explanation.near_misses(address, state)
    because = missing or explanation.explain(address, state).because
    failing = _policy_sides(
        engine.policy_of(ask.receiver), grant_scopes.attributes_seen_by(event, ask.receiver, state)
    )
    facts = {
        "delivered": not missing and not failing,
        "address": {"holds": not missing, "because": [str(reason) for reason in because]},
        "event": {"holds": "event" not in failing, "because": failing.get("event", [])},
        "sender": {"holds": "sender" not in failing, "because": failing.get("sender", [])},
        "granted": _granted(notifier, event.sender),
        "receiver_granted": {
            key: grant for key, grant in _granted(notifier, ask.receiver).items() if grant["name"] in state
        },
        "state": protocol.to_wire(state),
        "since_ms": 1000 * engine.changed_s(ask.receiver),
    }
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1, facts=facts)


def _granted(notifier: notifier_notifier.Notifier, receiver: str) -> dict[str, Any]:
    """For each restricted attribute of a participant: value, issuer, validity period and scope."""
    process, _, name = receiver.partition("/")
    believed = notifier.known.believed(process, name, now=time.time())
    everywhere = (documents.GrantScope(), believed.everywhere)
    listed = [
        (key, held, scope)
        for scope, attributes in (everywhere, *believed.scoped)
        for key, held in attributes.items()
    ]
    by_name: dict[str, Any] = {}
    for key, held, scope in listed:
        shown: dict[str, Any] = {
            "name": key,
            "value": protocol.cell(held.value),
            "by": held.granted.authority or "root",
            "tier": held.granted.tier,
            "since": notifier.known.issued_at(held.granted),
            "until": held.granted.expires_at,
        }
        if scope.region or scope.audience:
            shown["within"] = {"region": scope.region, "audience": list(scope.audience)}
        by_name[key if key not in by_name else f"{key} ({len(by_name)})"] = shown
    return by_name


def _sender(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    """The state of a sender, if this notifier holds it: policies at all notifiers may refer to it."""
    if ask.receiver not in notifier.engine:
        return protocol.NotifyQueryResult(notifier=notifier.name)
    state = protocol.to_wire(notifier.engine.state_of(ask.receiver))
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1, facts={"state": state})


def _event(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.AdmittedEvent:
    if ask.event is None:
        raise errors.InvalidInput("explain what? name an event")
    process, _, receiver = ask.sender.partition("/")
    if not receiver:
        raise errors.InvalidInput("whose event? name its sender as process/name")
    return notifier.deciding.admit(process, ask.event, state=protocol.from_wire(ask.state))[0]


def _policy_sides(policy: str, attributes: dict[str, types.Value]) -> dict[str, list[str]]:
    """Which sides of a policy failed (``event``, ``sender``), each with the clauses that did."""
    if not policy:
        return {"event": ["it has no policy, so it accepts nothing"]}
    sides: dict[str, list[str]] = {}
    for finding in explanation.near_misses(models.parse_policy(policy), attributes):
        of_sender = any(key.startswith("sender.") for key, _ in finding.values)
        sides.setdefault("sender" if of_sender else "event", []).append(str(finding))
    return sides


def _check(notifier: notifier_notifier.Notifier, ask: protocol.NotifyQuery) -> protocol.NotifyQueryResult:
    condition = notifier.known.vocabulary.policy(ask.expression)
    measured, parts = models.cost_of(condition)
    facts = {
        "canonical": models.canonical_text(condition),
        "clauses": measured.clauses,
        "depth": measured.depth,
        "cost": measured.dearest.name.lower(),
        "conjunctions": parts,
        "indexed": parts is not None,
    }
    return protocol.NotifyQueryResult(notifier=notifier.name, count=1, facts=facts)


Answer = Callable[["notifier_notifier.Notifier", protocol.NotifyQuery], protocol.NotifyQueryResult]

QUESTIONS: dict[str, Answer] = {
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
