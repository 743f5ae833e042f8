"""The models of the domain, the grants and the revocations, which every notifier has.

They are stored in the bucket ``notify``, which each notifier watches.  Grants are signed, so it does not
matter who submitted them; they are verified on arrival, and again for the time of use.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from muster.core import errors
from muster.notify import models, protocol, rows
from muster.predicates import types
from muster.trust import documents, grants

SHOWN_S = 86_400.0  # how long an expired grant is listed before it is removed
KEPT_S_MAX = 9e8  # a longer validity is stored without a time to live
EARLY_S = 1.0  # check a grant that is not valid yet again after this time: clocks differ
SCOPES = ("domain", "region", "prefix", "audience")
REGION = "region"  # the attribute for a receiver's region, to which scopes of grants refer


@dataclass(frozen=True, slots=True)
class GrantedAttribute:
    """A restricted attribute of a receiver, and the grant for it."""

    value: types.Value
    granted: grants.VerifiedGrant


@dataclass(frozen=True, slots=True)
class EffectiveAttributes:
    """Attributes of one receiver: those that every receiver accepts, then those that only some accept."""

    everywhere: dict[str, GrantedAttribute]
    within: tuple[protocol.ScopedAttributes, ...] = ()
    scoped: tuple[
        tuple[documents.GrantScope, dict[str, GrantedAttribute]], ...
    ] = ()  # the same with the grants, for display


NOTHING = EffectiveAttributes({})


class AuthorityView:
    def __init__(self, *, root: str = "", domain: str = "", lifetime_s_max: float | None = None) -> None:
        self.vocabulary = models.Vocabulary()
        self.revocations = grants.Revocations()
        self._root = root
        self._domain = domain
        self._lifetime_s_max = lifetime_s_max
        self._chains: dict[str, dict[str, tuple[str, ...]]] = {}  # holder -> serial -> chain
        #: By holder; grows with each change of the holder's grants or of the revocations.
        self.versions: collections.Counter[str] = collections.Counter()
        self._regional: set[str] = set()  # holders with a grant that is limited to a region
        self._particular: set[str] = set()  # holders with a grant for some of their receivers
        self._authorities = {root} if root else set()
        self._effective: dict[tuple[str, str], tuple[float, EffectiveAttributes]] = {}
        self._verdicts: dict[
            str, tuple[float, documents.GrantScope, grants.VerifiedGrant | None]
        ] = {}  # with the end of validity

    # -- entries of the bucket

    def apply_entry(self, key: str, value: bytes) -> None:
        kind = key.partition(".")[0]
        if kind == "model":
            self.vocabulary.add(model_of(msgspec.json.decode(value, type=protocol.DefineModel)))
        elif kind == "grant":
            chain = tuple(msgspec.json.decode(value, type=list[str]))
            grant, serial = documents.open_sealed(chain[0], documents.Grant)
            held = self._chains.setdefault(grant.holder, {})
            held.pop(serial, None)  # the newest submission is last, also if it is repeated
            held[serial] = chain
            if grant.scope.region:
                self._regional.add(grant.holder)
            if grant.scope.prefix:
                self._particular.add(grant.holder)
            for sealed in chain[1:]:
                self._authorities.add(documents.open_sealed(sealed, documents.Mandate)[0].subject)
            self._forget({grant.holder})
        elif kind == "revoked":
            self._revoke(value.decode())

    def remove_entry(self, key: str) -> None:
        """Remove a grant that expired long ago."""
        kind, _, serial = key.partition(".")
        holders = list(self._chains.items()) if kind == "grant" else []
        for holder, chains in holders:
            if chains.pop(serial, None) is not None:
                self._forget({holder})
                if not chains:
                    del self._chains[holder]

    def _revoke(self, sealed: str) -> None:
        # The issuer was checked on submission; the grant that made it an authority may be gone since.
        issuer = documents.open_sealed(sealed, documents.RevocationList)[0].issuer
        try:
            self.revocations = self.revocations.accept(sealed, known={issuer})
        except errors.Refused:
            return  # not newer than the current list
        self._forget(self._chains)

    def _forget(self, holders: Iterable[str]) -> None:
        self.versions.update(list(holders))
        self._effective.clear()
        self._verdicts.clear()

    def has_grants(self, process: str) -> bool:
        return process in self._chains

    def has_regions(self, process: str) -> bool:
        return process in self._regional

    def has_prefixes(self, process: str) -> bool:
        return process in self._particular

    # -- submissions: the key for the bucket

    def model_key(self, define: protocol.DefineModel) -> str:
        """Return the key of a model; `errors.Conflict` unless it is equal to or extends the known model."""
        draft = model_of(define)
        self.vocabulary.require_growth(draft)
        self.vocabulary.require_distinct(draft)
        known = self.vocabulary.of_kind(draft.kind)
        if draft.name not in known and len(known) >= models.MODELS_MAX:
            raise errors.LimitExceeded(f"there are {models.MODELS_MAX:,} models of this kind already")
        return f"model.{draft.kind.value}.{draft.name}"

    def grant_key(self, chain: tuple[str, ...], *, now: float) -> tuple[str, float | None]:
        """Return the key of a grant and its time to live; None: unlimited.

        `errors.Forbidden` if it is valid for no receiver, neither now nor soon: the clock of its authority
        may be ahead of ours.  Until it begins by our clock, it has no effect here.
        """
        try:
            grant, serial = documents.open_sealed(chain[0] if chain else "", documents.Grant)
        except documents.DocumentRefused as no:
            raise errors.InvalidInput(f"not a grant: {no.detail}") from None
        if reserved := models.RESERVED & grant.attributes.keys():
            raise errors.Forbidden(f"{min(reserved)} is proved by the broker: no authority grants it")
        begins = min(grant.issued_at, now + grants.SKEW_S)
        verdict = self._verify(chain, self._anywhere(grant), max(now, begins))
        if isinstance(verdict, grants.GrantRefused):
            raise errors.Forbidden(f"the grant is not valid ({verdict.reason}): {verdict.detail}")
        for_s = grant.expires_at + SHOWN_S - now
        return f"grant.{serial}", for_s if for_s < KEPT_S_MAX else None

    def revocation_key(self, sealed: str) -> str:
        newer = self.revocations.accept(sealed, known=self._authorities)
        issuer = documents.open_sealed(sealed, documents.RevocationList)[0].issuer
        assert issuer in newer.lists
        return f"revoked.{issuer}"

    # -- effective attributes

    def _anywhere(self, grant: documents.Grant) -> documents.GrantSituation:
        """Return a scope in this domain in which the grant is valid, if there is any."""
        return documents.GrantSituation(
            holder=grant.holder,
            domain=self._domain,
            region=grant.scope.region,
            participant=grant.scope.prefix,
            audience=next(iter(grant.scope.audience), ""),
        )

    def _verify(
        self, chain: tuple[str, ...], where: documents.GrantSituation, now: float
    ) -> grants.VerifiedGrant | grants.GrantRefused:
        return grants.verify(
            chain,
            where,
            root=self._root,
            now=now,
            revocations=self.revocations,
            lifetime_s_max=self._lifetime_s_max,
            skew_s=0,
        )

    def effective_attributes(self, process: str, receiver: str, *, now: float) -> EffectiveAttributes:
        """Return the restricted attributes of a receiver at this time."""
        if process not in self._chains:
            return NOTHING
        known = self._effective.get((process, receiver))
        if known is not None and now < known[0]:
            return known[1]
        everywhere: dict[str, GrantedAttribute] = {}
        scoped: list[tuple[documents.GrantScope, dict[str, GrantedAttribute]]] = []
        listed, until = self._granted(process, receiver, now)
        for scope, granted in listed:
            held = {
                name: GrantedAttribute(_value(value), granted) for name, value in granted.attributes.items()
            }
            if scope.region or scope.audience:
                scoped.append((scope, held))
            else:
                everywhere.update(held)
                # It overrides earlier grants, also inside scopes.
                scoped = [
                    (before, {name: attribute for name, attribute in those.items() if name not in held})
                    for before, those in scoped
                ]
        effective = EffectiveAttributes(everywhere, *_in_scopes(scoped))
        if len(self._effective) > 10_000:
            self._effective.clear()
        self._effective[process, receiver] = (min(until, now + 60.0), effective)
        return effective

    def receiver_attributes(
        self, process: str, receiver: str, region: str, *, now: float
    ) -> tuple[dict[str, types.Value], float]:
        """Return the restricted attributes of a receiver in this region for addresses, and until when.

        Grants for an audience are left out: they apply to the receivers of what their holder sends.
        """
        attributes: dict[str, types.Value] = {}
        listed, until = self._granted(process, receiver, now, region)
        for scope, granted in listed:
            if not scope.audience:
                attributes.update((name, _value(value)) for name, value in granted.attributes.items())
        return attributes, until

    def _granted(
        self, process: str, receiver: str, now: float, region: str | None = None
    ) -> tuple[list[tuple[documents.GrantScope, grants.VerifiedGrant]], float]:
        """Return the valid grants of a receiver (without region: in any), the overriding last; until when."""
        applicable: list[tuple[documents.GrantScope, grants.VerifiedGrant]] = []
        until = float("inf")
        for serial, chain in self._chains.get(process, {}).items():
            ends, scope, granted = self._verified(serial, chain, now)
            until = min(until, ends)
            where = documents.GrantSituation(
                holder=process,
                domain=self._domain,
                participant=receiver,
                region=scope.region if region is None else region,
                audience=next(iter(scope.audience), ""),
            )
            if granted is not None and scope.covers(where):
                applicable.append((scope, granted))
        # Of several grants of an attribute the one of the highest tier counts, and of those the newest.
        return sorted(applicable, key=lambda entry: entry[1].tier), until

    def _verified(
        self, serial: str, chain: tuple[str, ...], now: float
    ) -> tuple[float, documents.GrantScope, grants.VerifiedGrant | None]:
        """Return the end of validity, the scope, and the verified grant.

        The result is cached: signatures are expensive, and a process may have a million receivers.
        """
        known = self._verdicts.get(serial)
        if known is None or now >= known[0]:
            grant = documents.open_sealed(chain[0], documents.Grant)[0]
            verdict = self._verify(chain, self._anywhere(grant), now)
            if isinstance(verdict, grants.VerifiedGrant):
                known = (verdict.expires_at, grant.scope, verdict)
            elif verdict.reason is documents.RefusalReason.NOT_YET_VALID:
                known = (now + EARLY_S, grant.scope, None)
            else:
                known = (float("inf"), grant.scope, None)
            self._verdicts[serial] = known
        return known

    def issued_at(self, granted: grants.VerifiedGrant) -> int:
        """Return when a grant was issued."""
        chain = self._chains[granted.holder][granted.serial]
        return documents.open_sealed(chain[0], documents.Grant)[0].issued_at

    def chains(self) -> dict[str, tuple[str, ...]]:
        """Return all grants by serial number."""
        return {serial: chain for held in self._chains.values() for serial, chain in held.items()}

    def describe_grant(self, serial: str, chain: tuple[str, ...], *, now: float) -> rows.GrantRow:
        """Return a grant for display."""
        grant = documents.open_sealed(chain[0], documents.Grant)[0]
        verdict = self._verify(chain, self._anywhere(grant), now)
        authority = "" if len(chain) == 1 else documents.open_sealed(chain[1], documents.Mandate)[0].name
        return rows.GrantRow(
            serial=serial,
            mandates=list(map(documents.serial_of, chain[1:])),
            holder=grant.holder,
            attributes=dict(grant.attributes),
            tier=grant.tier,
            authority=authority or "root",
            scope={name: value for name in SCOPES if (value := getattr(grant.scope, name))},
            expires_at=grant.expires_at,
            status=str(verdict.reason) if isinstance(verdict, grants.GrantRefused) else "valid",
        )


def _value(value: documents.Value) -> types.Value:
    return frozenset(value) if isinstance(value, tuple) else value


def _in_scopes(
    scoped: list[tuple[documents.GrantScope, dict[str, GrantedAttribute]]],
) -> tuple[
    tuple[protocol.ScopedAttributes, ...],
    tuple[tuple[documents.GrantScope, dict[str, GrantedAttribute]], ...],
]:
    """Return the scoped attributes, for events and for display."""
    listed = tuple((scope, held) for scope, held in scoped if held)
    within = tuple(
        protocol.ScopedAttributes(
            attributes=protocol.to_wire({name: attribute.value for name, attribute in held.items()}),
            region=scope.region,
            audience=scope.audience,
        )
        for scope, held in listed
    )
    return within, listed


def model_of(define: protocol.DefineModel | rows.ModelRow) -> models.Model:
    attributes = {name: types.parse_type(text) for name, text in define.attributes.items()}
    return models.Model(define.name, attributes, models.ModelKind(define.of))


def define_of(made: models.Model) -> protocol.DefineModel:
    return protocol.DefineModel(
        name=made.name,
        attributes={name: str(declared) for name, declared in made.attributes.items()},
        of=made.kind.value,
    )
