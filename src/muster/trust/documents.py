"""The signed documents of grants: their content, sealing and opening.

A sealed document is ``<what>.<base64 of JSON>.<base64 of signature>``. The signature covers the first two
with the dot between them, so a mandate can never pass as a grant (the first part differs), and no byte can be
changed. The serial of a document is the hash of that text.

All limits are in the types, and apply to signing as well as to reading.
"""

from __future__ import annotations

import enum
import hashlib
import re
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec

from muster.core import errors
from muster.core.formats import base64url
from muster.trust import nkeys

TIER_MAX = 99
SIZE_MAX = 16 << 10
LIST_SIZE_MAX = 1 << 20

_ATTRIBUTE = r"^_[A-Za-z][A-Za-z0-9_]{0,62}\Z"

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Text = Annotated[str, msgspec.Meta(max_length=1024)]
Attribute = Annotated[str, msgspec.Meta(pattern=_ATTRIBUTE)]
Whole = Annotated[int, msgspec.Meta(ge=-(2**53), le=2**53)]  # the range that all JSON readers support
Tier = Annotated[int, msgspec.Meta(ge=1, le=TIER_MAX)]
Second = Annotated[int, msgspec.Meta(ge=0, le=2**40)]
Value = bool | Whole | float | Text | Annotated[tuple[Text, ...], msgspec.Meta(min_length=1, max_length=64)]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """Fields are encoded in the order of their declaration, so that the same content has the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantSituation:
    """The user and the place of a grant: known from the broker and the receiver, never from the message."""

    holder: str
    domain: str
    region: str = ""
    participant: str = ""
    audience: str = ""


class GrantScope(_Document, frozen=True, kw_only=True):
    """Where it applies. An empty field: everywhere.

    The first three are paths, and cover everything below them: the domain, the region, and the receivers or
    resources of the holder. ``audience`` names the receivers for which it is intended.
    """

    domain: Text = ""
    region: Text = ""
    prefix: Text = ""
    audience: Annotated[tuple[Name, ...], msgspec.Meta(max_length=64)] = ()

    def within(self, other: GrantScope) -> bool:
        """Whether the other covers all of it."""
        return (
            _below(self.domain, other.domain)
            and _below(self.region, other.region)
            and _below(self.prefix, other.prefix)
            and (not other.audience or (bool(self.audience) and set(self.audience) <= set(other.audience)))
        )

    def covers(self, situation: GrantSituation) -> bool:
        return (
            _below(situation.domain, self.domain)
            and _below(situation.region, self.region)
            and _below(situation.participant, self.prefix)
            and (not self.audience or situation.audience in self.audience)
        )


class AnyValue(_Document, frozen=True, kw_only=True, tag="any", tag_field="rule"):
    pass


class ValueIn(_Document, frozen=True, kw_only=True, tag="one-of", tag_field="rule"):
    values: Annotated[tuple[bool | Whole | float | Text, ...], msgspec.Meta(min_length=1, max_length=64)]


class ValueRange(_Document, frozen=True, kw_only=True, tag="between", tag_field="rule"):
    """Numbers from ``low`` to ``high``, both included."""

    low: Whole | float
    high: Whole | float


class ValuePrefix(_Document, frozen=True, kw_only=True, tag="starts-with", tag_field="rule"):
    text: Text


Rule = AnyValue | ValueIn | ValueRange | ValuePrefix


class Mandate(_Document, frozen=True, kw_only=True):
    """``subject`` (a key) may grant these attributes, and sign mandates of lower tiers."""

    issuer: str
    subject: str
    name: Name
    tier: Tier
    may_grant: Annotated[dict[Attribute, Rule], msgspec.Meta(min_length=1, max_length=64)]
    scope: GrantScope = GrantScope()
    issued_at: Second
    expires_at: Second


class Grant(_Document, frozen=True, kw_only=True):
    issuer: str
    holder: Name
    tier: Tier
    attributes: Annotated[dict[Attribute, Value], msgspec.Meta(min_length=1, max_length=64)]
    scope: GrantScope = GrantScope()
    issued_at: Second
    expires_at: Second


class RevocationList(_Document, frozen=True, kw_only=True):
    issuer: str
    number: Annotated[int, msgspec.Meta(ge=1, le=2**53)]
    issued_at: Second
    serials: frozenset[Annotated[str, msgspec.Meta(max_length=64)]]
    ends: dict[str, Second] = {}  # when those of them that are known to end are over


def is_allowed(rule: Rule, value: Value) -> bool:
    """For a set, every member must be allowed."""
    if isinstance(value, tuple):
        return all(is_allowed(rule, member) for member in value)
    match rule:
        case AnyValue():
            return True
        case ValueIn(values=values):
            # True is not 1 here, though Python thinks so.
            return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values)
        case ValueRange(low=low, high=high):
            return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
        case ValuePrefix(text=text):
            return isinstance(value, str) and value.startswith(text)


def _below(path: str, above: str) -> bool:
    """Paths are cut at slashes and dots: ``north`` is above ``north/west`` and not above ``northern``."""
    return not above or path == above or (path.startswith(above) and path[len(above)] in "/.")


class RefusalReason(enum.StrEnum):
    MALFORMED = "malformed"
    TOO_LARGE = "too-large"
    BAD_SIGNATURE = "bad-signature"
    UNKNOWN_AUTHORITY = "unknown-authority"  # the chain does not lead to the root
    NOT_YET_VALID = "not-yet-valid"
    EXPIRED = "expired"
    TOO_LONG_LIVED = "too-long-lived"
    REVOKED = "revoked"
    BEYOND_TIER = "beyond-tier"
    BEYOND_MANDATE = "beyond-mandate"  # an attribute or value its authority may not grant
    OUT_OF_SCOPE = "out-of-scope"
    OTHER_HOLDER = "other-holder"


class DocumentRefused(Exception):
    """Internal to this package: why a document is refused. `grants.verify` makes a `GrantRefused` of it."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


_WORDS: dict[type, str] = {
    Mandate: "muster-mandate-1",
    Grant: "muster-grant-1",
    RevocationList: "muster-revocations-1",
}
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _WORDS}

_Kind = TypeVar("_Kind", bound=Mandate | Grant | RevocationList)


def open_sealed(sealed: str, kind: type[_Kind]) -> tuple[_Kind, str]:
    """The document and its serial, if it is one of this kind and its issuer's signature fits."""
    limit = LIST_SIZE_MAX if kind is RevocationList else SIZE_MAX
    if len(sealed) > limit:
        raise DocumentRefused(RefusalReason.TOO_LARGE, f"{len(sealed)} characters; at most {limit} are read")
    word, _, rest = sealed.partition(".")
    body, _, signature = rest.partition(".")  # a third dot is not base64 and is refused as such
    if word != _WORDS[kind]:
        raise DocumentRefused(RefusalReason.MALFORMED, f"expected it to start with {_WORDS[kind]}")
    try:
        document: _Kind = _DECODERS[kind].decode(base64url.decode(body))
        raw = base64url.decode(signature)
        nkeys.kind_of(document.issuer)
    except (msgspec.MsgspecError, errors.InvalidInput, UnicodeError, RecursionError) as error:
        raise DocumentRefused(RefusalReason.MALFORMED, str(error)) from None
    try:
        nkeys.verify(document.issuer, f"{word}.{body}".encode(), raw)
    except errors.Unauthorized as error:
        raise DocumentRefused(RefusalReason.BAD_SIGNATURE, error.message) from None
    return document, serial_of(sealed)


def serial_of(sealed: str) -> str:
    """By which it is revoked."""
    signed = sealed.rpartition(".")[0]
    return base64url.encode(hashlib.sha256(signed.encode(errors="replace")).digest()[:18])


def is_serial(text: str) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_-]{24}", text) is not None


def seal(signer: nkeys.KeyPair, document: Mandate | Grant | RevocationList) -> str:
    if document.issuer != signer.public:
        raise errors.InvalidInput(f"{signer.public} cannot sign for {document.issuer}")
    body = msgspec.json.encode(document, order="deterministic")
    signed = f"{_WORDS[type(document)]}.{base64url.encode(body)}"
    sealed = f"{signed}.{base64url.encode(signer.sign(signed.encode()))}"
    try:
        # the limits are defined once, in the types, and apply to signing too
        open_sealed(sealed, type(document))
    except DocumentRefused as no:
        raise errors.InvalidInput(f"this cannot be signed: {no.detail}") from None
    return sealed
