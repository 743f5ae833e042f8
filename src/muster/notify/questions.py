"""What people ask a notifier: who is there, who would be reached, why somebody was not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from muster.core import errors
from muster.notify import model as models
from muster.notify import protocol
from muster.predicates import ast, explain, normal, types
from muster.predicates import text as text_

if TYPE_CHECKING:
    from muster.notify import service

NEAR_MISSES = 5
LOOKED_AT = 10_000


def answer(notifier: service.Notifier, question: str, ask: protocol.Ask) -> protocol.Told:
    match question:
        case "parties":
            return _parties(notifier, ask)
        case "who":
            return _who(notifier, ask)
        case "explain":
            return _explain(notifier, ask)
        case "check":
            return _check(notifier, ask)
        case "models":
            listed = [*notifier.known.vocabulary.parties.values(), *notifier.known.vocabulary.events.values()]
            return protocol.Told(notifier=notifier.name, parties=tuple(_model(one) for one in listed))
        case "grants":
            return protocol.Told(
                notifier=notifier.name, parties=tuple(notifier.known.grants_held(now=time.time()))
            )
        case "revoked":
            held = notifier.known.revocations.lists.get(ask.expression)
            told = {"number": held.number if held else 0, "serials": sorted(held.serials) if held else []}
            return protocol.Told(notifier=notifier.name, facts=told)
        case "counts":
            facts = {"counts": dict(notifier.counts), "shards": sorted(notifier.held)}
            return protocol.Told(notifier=notifier.name, count=len(notifier.engine), facts=facts)
    raise errors.InvalidInput(f"nobody answers {question[:40]!r} here")


def _model(model: models.Model) -> dict[str, Any]:
    attributes = {name: str(declared) for name, declared in model.attributes.items()}
    return {"name": model.name, "of": model.kind.value, "attributes": attributes}


def _shown(notifier: service.Notifier, party: str) -> dict[str, Any]:
    return {
        "party": party,
        "model": notifier.engine.model_of(party).name,
        "state": protocol.to_wire(notifier.engine.state_of(party)),
        "policy": models.text_of(notifier.engine.policy_of(party)),
        "delivery": "durable" if notifier.engine.is_durable(party) else "transient",
    }


def _parties(notifier: service.Notifier, ask: protocol.Ask) -> protocol.Told:
    if ask.expression:
        found = notifier.engine.means(notifier.known.vocabulary.address(ask.expression))
    else:
        found = list(notifier.engine.parties())
    found = [party for party in found if party.startswith(ask.party)]
    listed = tuple(_shown(notifier, party) for party in sorted(found)[: ask.limit])
    return protocol.Told(notifier=notifier.name, count=len(found), parties=listed)


def _who(notifier: service.Notifier, ask: protocol.Ask) -> protocol.Told:
    """Those an address reaches and, of an event, those who accept it; and who only just is not among them."""
    address = notifier.known.vocabulary.address(ask.expression)
    engine = notifier.engine
    meant = engine.means(address)
    attributes = _attributes(notifier, ask)
    reached = meant if attributes is None else engine.match(attributes, address)
    near: list[dict[str, Any]] = []
    taken = set(reached)
    if attributes is not None:
        for party in meant[:LOOKED_AT]:
            if party not in taken and len(near) < NEAR_MISSES:
                near.append({"party": party, "why": _policy_side(engine.policy_of(party), attributes)[1]})
    for party in engine.parties() if len(engine) <= LOOKED_AT else ():
        if len(near) >= NEAR_MISSES:
            break
        if party not in taken and party not in meant:
            found = explain.explain(address, engine.state_of(party))
            if len(found.because) == 1:  # one clause away
                near.append({"party": party, "why": [f"address: {found.because[0]}"]})
    listed = tuple({"party": party} for party in sorted(reached)[: ask.limit])
    return protocol.Told(
        notifier=notifier.name, count=len(reached), parties=listed, facts={"near": near, "meant": len(meant)}
    )


def _attributes(notifier: service.Notifier, ask: protocol.Ask) -> dict[str, types.Value] | None:
    if ask.event is None:
        return None
    process, _, party = ask.sender.partition("/")
    return notifier.admit(process, ask.event)[0].believed() if party else None


def _explain(notifier: service.Notifier, ask: protocol.Ask) -> protocol.Told:
    """Which side failed, which clause, what it found, and by whom the sender's attributes were granted."""
    engine = notifier.engine
    if ask.party not in engine:
        return protocol.Told(notifier=notifier.name)
    if ask.event is None:
        raise errors.InvalidInput("explain what? name an event")
    event = _event(notifier, ask)
    address = notifier.known.vocabulary.address(event.address)
    meant = explain.explain(address, engine.state_of(ask.party))
    attributes = event.believed()
    content, why = _policy_side(engine.policy_of(ask.party), attributes)
    process, _, name = event.sender.partition("/")
    granted = {
        key: {
            "value": held.value if not isinstance(held.value, frozenset) else sorted(held.value),
            "by": held.granted.authority or "root",
            "tier": held.granted.tier,
            "until": held.granted.expires_at,
        }
        for key, held in notifier.known.believed(process, name, now=time.time()).items()
    }
    facts = {
        "delivered": meant.truth is True and not content,
        "address": {"holds": meant.truth is True, "because": [str(one) for one in meant.because]},
        "event": {"holds": "event" not in content, "because": why if "event" in content else []},
        "sender": {"holds": "sender" not in content, "because": why if "sender" in content else []},
        "granted": granted,
        "state": protocol.to_wire(engine.state_of(ask.party)),
        "since_ms": notifier.since_ms.get(ask.party, 0),
    }
    return protocol.Told(notifier=notifier.name, count=1, facts=facts)


def _event(notifier: service.Notifier, ask: protocol.Ask) -> protocol.Event:
    assert ask.event is not None
    process, _, party = ask.sender.partition("/")
    if not party:
        raise errors.InvalidInput("whose event? name its sender as process/party")
    return notifier.admit(process, ask.event)[0]


def _policy_side(
    policy: ast.Condition | None, attributes: dict[str, types.Value]
) -> tuple[set[str], list[str]]:
    """Which sides of a policy failed (``event``, ``sender``), and the clauses that did; none if it holds."""
    if policy is None:
        return {"event"}, ["it has no policy, so it accepts nothing"]
    found = explain.explain(policy, attributes)
    if found.truth is True:
        return set(), []
    sides = {
        "sender" if any(key.startswith("sender.") for key, _ in finding.found) else "event"
        for finding in found.because
    }
    return sides, [str(finding) for finding in found.because]


def _check(notifier: service.Notifier, ask: protocol.Ask) -> protocol.Told:
    condition = notifier.known.vocabulary.policy(ask.expression)
    measured, parts = models.cost_of(condition)
    facts = {
        "canonical": text_.write(normal.canonical(condition)),
        "clauses": measured.clauses,
        "depth": measured.depth,
        "cost": measured.dearest.name.lower(),
        "conjunctions": parts,
        "indexed": parts is not None,
    }
    return protocol.Told(notifier=notifier.name, count=1, facts=facts)
