"""Grants: restricted attributes that an authority assigns to an identity.

A *grant* states that a holder has these attributes, within this scope, until a time; it is signed. The right
of its signer is stated in a *mandate*, which another authority has signed, and so on up to the root of the
domain:

    root ──mandate──> national authority (tier 3) ──mandate──> regional one (tier 2) ──grant──> holder

Each link of the chain narrows.  A mandate's tier is below that of its signer, its scope lies within the
signer's, and a value counts only if *every* mandate on the way allows it.  So a mandate that promises more
than its signer had is not a danger: it is refused, or has no effect.

Each authority has a list of its revoked documents (the list of the root applies to all documents), with a
number that only grows: an old list cannot replace a newer one.

Pure: the caller brings the time and the lists.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from muster.core import errors, units
from muster.trust import documents, jwt, nkeys

CHAIN_MAX = 8  # a grant and seven mandates
SKEW_S = 60.0

Reason = documents.RefusalReason
_No = documents.DocumentRefused


@dataclass(frozen=True, slots=True)
class VerifiedGrant:
    """The verified attributes of the holder in the given situation."""

    holder: str
    attributes: Mapping[str, documents.Value]
    tier: int
    authority: str  # its name; empty for the domain's root itself
    serial: str
    expires_at: int  # the end of the first document of the chain that ends


@dataclass(frozen=True, slots=True)
class GrantRefused:
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Revocations:
    """The newest list of each authority."""

    lists: Mapping[str, documents.RevocationList] = field(default_factory=dict)

    def accept(self, sealed: str, *, known: Collection[str]) -> Revocations:
        """Add this list; `errors.Refused` if its key is unknown, or it is not newer than the present one."""
        try:
            new, _ = documents.open_sealed(sealed, documents.RevocationList)
        except _No as no:
            raise errors.Refused(f"a list of revocations was refused: {no.detail}") from None
        if new.issuer not in known:
            raise errors.Refused(f"a list of revocations from {new.issuer}, which is no authority here")
        held = self.lists.get(new.issuer)
        if held == new:
            return self
        if held and new.number <= held.number:
            raise errors.Refused(f"revocation list {new.number} is older than the present list {held.number}")
        return Revocations({**self.lists, new.issuer: new})

    def has(self, serial: str, *issuers: str) -> bool:
        return any(serial in self.lists[issuer].serials for issuer in issuers if issuer in self.lists)


def verify(
    chain: Sequence[str],
    situation: documents.GrantSituation,
    *,
    root: str,
    now: float,
    revocations: Revocations,
    lifetime_s_max: float | None = None,
    skew_s: float = SKEW_S,
) -> VerifiedGrant | GrantRefused:
    """``chain`` is a grant and the mandates that lead from it to ``root``, nearest first."""
    try:
        grant, serial, mandates = _follow(chain, root, now, revocations, skew_s)
        if lifetime_s_max is not None and grant.expires_at - grant.issued_at > lifetime_s_max:
            raise _No(
                Reason.TOO_LONG_LIVED, f"it is valid for longer than {units.rounded_duration(lifetime_s_max)}"
            )
        if grant.holder != situation.holder:
            raise _No(Reason.OTHER_HOLDER, f"it is {grant.holder}'s, not {situation.holder}'s")
        if not grant.scope.covers(situation):
            raise _No(Reason.OUT_OF_SCOPE, f"it does not hold here: {grant.scope}")
    except _No as no:
        return GrantRefused(no.reason, no.detail)
    return VerifiedGrant(
        holder=grant.holder,
        attributes=grant.attributes,
        tier=grant.tier,
        authority=mandates[0].name if mandates else "",
        serial=serial,
        expires_at=min([grant.expires_at, *(mandate.expires_at for mandate in mandates)]),
    )


def _follow(
    chain: Sequence[str], root: str, now: float, revocations: Revocations, skew_s: float
) -> tuple[documents.Grant, str, list[documents.Mandate]]:
    """The grant at the end of the chain, its serial, and the mandates behind it."""
    if not 1 <= len(chain) <= CHAIN_MAX:
        raise _No(Reason.TOO_LARGE, f"a chain has 1 to {CHAIN_MAX} documents, not {len(chain)}")
    grant, serial = documents.open_sealed(chain[0], documents.Grant)
    _valid(grant, serial, f"the grant to {grant.holder}", root, now, revocations, skew_s)
    mandates = _climb(chain[1:], root, now, revocations, skew_s)
    if (mandates[0].subject if mandates else root) != grant.issuer:
        raise _No(Reason.UNKNOWN_AUTHORITY, f"no mandate states what {grant.issuer} may grant")
    for mandate in mandates:
        if grant.tier > mandate.tier:
            raise _No(
                Reason.BEYOND_TIER,
                f"a grant of tier {grant.tier} by {mandate.name}, of tier {mandate.tier}",
            )
        if not grant.scope.within(mandate.scope):
            raise _No(Reason.OUT_OF_SCOPE, f"the grant reaches beyond {mandate.name}'s scope")
        for attribute, value in grant.attributes.items():
            rule = mandate.may_grant.get(attribute)
            if rule is None or not documents.is_allowed(rule, value):
                raise _No(Reason.BEYOND_MANDATE, f"{mandate.name} may not grant {attribute} = {value!r}")
    return grant, serial, mandates


def _climb(
    sealed: Sequence[str], root: str, now: float, revocations: Revocations, skew_s: float
) -> list[documents.Mandate]:
    """The mandates, if each is valid and each signer is above: nearest to the holder first."""
    mandates: list[documents.Mandate] = []
    for text in sealed:
        mandate, serial = documents.open_sealed(text, documents.Mandate)
        _valid(mandate, serial, f"the mandate of {mandate.name}", root, now, revocations, skew_s)
        if mandates:
            below = mandates[-1]
            if below.issuer != mandate.subject:
                raise _No(
                    Reason.UNKNOWN_AUTHORITY,
                    f"{mandate.name} did not sign the mandate of {below.name}",
                )
            if below.tier >= mandate.tier:
                raise _No(Reason.BEYOND_TIER, f"{mandate.name} is not of a higher tier than {below.name}")
            if not below.scope.within(mandate.scope):
                raise _No(Reason.OUT_OF_SCOPE, f"{below.name}'s scope reaches beyond {mandate.name}'s")
        mandates.append(mandate)
    if mandates and mandates[-1].issuer != root:
        raise _No(Reason.UNKNOWN_AUTHORITY, f"{mandates[-1].name} was not appointed by the root")
    return mandates


def _valid(
    document: documents.Mandate | documents.Grant,
    serial: str,
    what: str,
    root: str,
    now: float,
    revocations: Revocations,
    skew_s: float,
) -> None:
    if now < document.issued_at - skew_s:
        raise _No(
            Reason.NOT_YET_VALID,
            f"{what} begins in {units.rounded_duration(round(document.issued_at - now))}",
        )
    if now >= document.expires_at + skew_s:
        raise _No(
            Reason.EXPIRED, f"{what} expired {units.rounded_duration(round(now - document.expires_at))} ago"
        )
    if revocations.has(serial, document.issuer, root):
        raise _No(Reason.REVOKED, f"{what} was revoked")


@dataclass(frozen=True, slots=True)
class Authority:
    """An authority: a key, and the mandates that lead from it to the root (none for the root itself)."""

    key: nkeys.KeyPair
    mandates: tuple[str, ...] = ()

    def grant(
        self,
        holder: str,
        attributes: Mapping[str, documents.Value],
        *,
        tier: int,
        now: float,
        lifetime_s: float,
        scope: documents.GrantScope | None = None,
    ) -> tuple[str, ...]:
        """The chain to present; `errors.Forbidden` if it is more than this authority may grant."""
        document = documents.Grant(
            issuer=self.key.public,
            holder=holder,
            tier=tier,
            attributes=dict(attributes),
            scope=scope or self._scope(),
            issued_at=int(now),
            expires_at=jwt.ends(now, lifetime_s) or 0,
        )
        chain = (documents.seal(self.key, document), *self.mandates)
        self._check(lambda root: _follow(chain, root, now, Revocations(), 0))
        return chain

    def appoint(
        self,
        key: str,
        name: str,
        *,
        tier: int,
        may_grant: Mapping[str, documents.Rule],
        now: float,
        lifetime_s: float,
        scope: documents.GrantScope | None = None,
    ) -> tuple[str, ...]:
        """The mandates of a new authority of a lower tier, for its `Authority.mandates`."""
        document = documents.Mandate(
            issuer=self.key.public,
            subject=nkeys.require_kind(key, *nkeys.KeyKind),
            name=name,
            tier=tier,
            may_grant=dict(may_grant),
            scope=scope or self._scope(),
            issued_at=int(now),
            expires_at=jwt.ends(now, lifetime_s) or 0,
        )
        chain = (documents.seal(self.key, document), *self.mandates)
        self._check(lambda root: _climb(chain, root, now, Revocations(), 0))
        return chain

    def revoke(
        self, serials: Collection[str], *, number: int, now: float, ends: Mapping[str, float] | None = None
    ) -> str:
        """The list of all this authority has revoked; ``number`` must be higher than that of the last one.

        A serial whose end is known (``ends``) and past is left out: its document is refused anyway, and lists
        have a maximum size.
        """
        after = now - 2 * SKEW_S  # also for readers whose clock is behind
        kept = {serial for serial in serials if (ends or {}).get(serial, now) > after}
        document = documents.RevocationList(
            issuer=self.key.public,
            number=number,
            issued_at=int(now),
            serials=frozenset(kept),
            ends={serial: int(end) for serial, end in (ends or {}).items() if serial in kept},
        )
        return documents.seal(self.key, document)

    def _scope(self) -> documents.GrantScope:
        return self._mandate(0).scope if self.mandates else documents.GrantScope()

    def _mandate(self, position: int) -> documents.Mandate:
        return documents.open_sealed(self.mandates[position], documents.Mandate)[0]

    def _check(self, attempt: Callable[[str], object]) -> None:
        """Verify as a receiver would: a document that would be refused is not issued."""
        try:
            attempt(self._mandate(-1).issuer if self.mandates else self.key.public)
        except _No as no:
            raise errors.Forbidden(f"this authority may not do that: {no.detail}") from None
