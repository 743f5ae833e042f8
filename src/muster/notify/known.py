"""What every notifier knows: the models of the domain, the grants, and what has been revoked.

They live in the bucket ``notify``, which each notifier watches.  Grants are signed, so it does not matter who
brought them; they are verified when they come, and again for the moment they are used.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from muster.core import errors
from muster.notify import model, protocol
from muster.predicates import types
from muster.trust import documents, grants


@dataclass(frozen=True, slots=True)
class Held:
    """A restricted attribute of a party, and why it is believed."""

    value: types.Value
    granted: grants.Granted


class Known:
    def __init__(self, *, root: str = "", domain: str = "") -> None:
        self.vocabulary = model.Vocabulary()
        self.revocations = grants.Revocations()
        self._root = root
        self._domain = domain
        self._chains: dict[str, dict[str, tuple[str, ...]]] = {}  # holder -> serial -> chain
        self._authorities = {root} if root else set()
        self._believed: dict[tuple[str, str], tuple[float, dict[str, Held]]] = {}

    # -- what is kept: key and value of the bucket

    def take(self, key: str, value: bytes) -> None:
        kind = key.partition(".")[0]
        if kind == "model":
            self.vocabulary.add(model_of(msgspec.json.decode(value, type=protocol.Define)))
        elif kind == "grant":
            chain = tuple(msgspec.json.decode(value, type=list[str]))
            grant, serial = documents.open_sealed(chain[0], documents.Grant)
            self._chains.setdefault(grant.holder, {})[serial] = chain
            for sealed in chain[1:]:
                self._authorities.add(documents.open_sealed(sealed, documents.Mandate)[0].subject)
            self._believed.clear()
        elif kind == "revoked":
            self._revoke(value.decode())

    def _revoke(self, sealed: str) -> None:
        try:
            self.revocations = self.revocations.accept(sealed, known=self._authorities)
        except errors.Refused:
            return  # not newer than what is held
        self._believed.clear()

    # -- what comes in: the key under which it is to be kept

    def model_key(self, define: protocol.Define) -> str:
        """`errors.Conflict` if it is not what is known under that name, or has become more."""
        draft = model_of(define)
        held = self.vocabulary.of_kind(draft.kind).get(draft.name)
        self.vocabulary.add(draft)  # raises before it changes anything
        if held is not None:
            self.vocabulary.of_kind(draft.kind)[draft.name] = held
        return f"model.{draft.kind.value}.{draft.name}"

    def grant_key(self, chain: tuple[str, ...], *, now: float) -> str:
        """`errors.Forbidden` if nobody would believe it."""
        try:
            grant, serial = documents.open_sealed(chain[0] if chain else "", documents.Grant)
        except documents.No as no:
            raise errors.InvalidInput(f"this is no grant: {no.detail}") from None
        where = documents.Situation(
            holder=grant.holder,
            domain=self._domain,
            region=grant.scope.region,
            party=grant.scope.prefix,
            audience=next(iter(grant.scope.audience), ""),
        )
        found = self._verify(chain, where, now)
        if isinstance(found, grants.Refusal):
            raise errors.Forbidden(f"the grant is not believed ({found.reason}): {found.detail}")
        return f"grant.{serial}"

    def revocation_key(self, sealed: str) -> str:
        newer = self.revocations.accept(sealed, known=self._authorities)
        issuer = documents.open_sealed(sealed, documents.RevocationList)[0].issuer
        assert issuer in newer.lists
        return f"revoked.{issuer}"

    # -- what is believed

    def _verify(
        self, chain: tuple[str, ...], where: documents.Situation, now: float
    ) -> grants.Granted | grants.Refusal:
        return grants.verify(chain, where, root=self._root, now=now, revocations=self.revocations, skew_s=0)

    def believed(self, process: str, party: str, *, now: float) -> dict[str, Held]:
        """The restricted attributes of a party at this moment."""
        chains = self._chains.get(process)
        if not chains:
            return {}
        known = self._believed.get((process, party))
        if known is not None and now < known[0]:
            return known[1]
        found: dict[str, Held] = {}
        until = now + 60.0
        where = documents.Situation(holder=process, domain=self._domain, party=party)
        for chain in chains.values():
            granted = self._verify(chain, where, now)
            if isinstance(granted, grants.Refusal):
                continue
            until = min(until, granted.expires_at)
            for name, value in granted.attributes.items():
                # Where several say it, the one of the highest tier counts, and of those the newest.
                held = found.get(name)
                if held is None or granted.tier >= held.granted.tier:
                    found[name] = Held(frozenset(value) if isinstance(value, tuple) else value, granted)
        if len(self._believed) > 10_000:
            self._believed.clear()
        self._believed[process, party] = (until, found)
        return found

    def grants_held(self, *, now: float) -> list[dict[str, object]]:
        """Every grant there is, for people."""
        listed: list[dict[str, object]] = []
        for holder, chains in self._chains.items():
            for serial, chain in chains.items():
                grant = documents.open_sealed(chain[0], documents.Grant)[0]
                where = documents.Situation(
                    holder=holder, domain=self._domain, region=grant.scope.region, party=grant.scope.prefix
                )
                found = self._verify(chain, where, now)
                refused = isinstance(found, grants.Refusal)
                authority = (
                    "" if len(chain) == 1 else documents.open_sealed(chain[1], documents.Mandate)[0].name
                )
                listed.append(
                    {
                        "serial": serial,
                        "holder": holder,
                        "attributes": dict(grant.attributes),
                        "tier": grant.tier,
                        "authority": authority or "root",
                        "expires_at": grant.expires_at,
                        "status": str(found.reason) if isinstance(found, grants.Refusal) else "valid",
                    }
                )
                assert refused or listed[-1]["status"] == "valid"
        return listed


def model_of(define: protocol.Define) -> model.Model:
    attributes = {name: types.parse_type(text) for name, text in define.attributes.items()}
    return model.Model(define.name, attributes, model.Kind(define.of))


def define_of(made: model.Model) -> protocol.Define:
    return protocol.Define(
        name=made.name,
        attributes={name: str(declared) for name, declared in made.attributes.items()},
        of=made.kind.value,
    )
