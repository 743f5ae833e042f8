"""The three documents that a broker verifies: operator, account and user (NATS JWT, version 2).

The operator key signs accounts, an account key signs users, and the broker verifies the chain by itself. The
operator requires signing keys, so the two root keys can be removed from the machine once signing keys are
named.

Encoding is deterministic: fields are in the order of their declaration, and the serial number (``jti``) is a
hash of the rest, so the same claims at the same ``issued_at`` are the same text. The caller passes the time.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Collection

import msgspec

from muster.core import errors, units
from muster.core.formats import base64url
from muster.trust import nkeys

SIZE_MAX = 1 << 20  # an account with its role templates and thousands of revocations fits
UNLIMITED = -1
_LIFETIME_S_MAX = 100 * 366 * 86400.0

_HEADER = b'{"typ":"JWT","alg":"ed25519-nkey"}'


class SubjectPermissions(msgspec.Struct, frozen=True, omit_defaults=True):
    """An empty ``allow`` permits everything, so `roles` never leaves one empty."""

    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()


class UserLimits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The permissions of a user. They are empty in a user signed by the key of a role: the account has the
    template."""

    pub: SubjectPermissions = SubjectPermissions()
    sub: SubjectPermissions = SubjectPermissions()
    subs: int = 0
    data: int = 0
    payload: int = 0
    bearer_token: bool = False
    allowed_connection_types: tuple[str, ...] = ()


class SigningScope(msgspec.Struct, frozen=True, kw_only=True):
    """A signing key that can make users of one role only; the role's permissions are in the account."""

    kind: str = "user_scope"
    key: str
    role: str
    template: UserLimits
    description: str = ""


class AccountExport(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str
    subject: str
    type: str
    account_token_position: int = 0  # the token of the subject that must be the importer's own key


class AccountImport(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str
    subject: str
    account: str
    type: str
    local_subject: str = ""


class AccountLimits(msgspec.Struct, frozen=True, kw_only=True):
    """0 forbids and -1 sets no limit, so all of them are always written."""

    subs: int = UNLIMITED
    data: int = UNLIMITED
    payload: int = UNLIMITED
    imports: int = UNLIMITED
    exports: int = UNLIMITED
    wildcards: bool = True
    conn: int = UNLIMITED
    leaf: int = UNLIMITED
    mem_storage: int = 0
    disk_storage: int = 0
    streams: int = UNLIMITED
    consumer: int = UNLIMITED


class OperatorClaims(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="operator"
):
    signing_keys: tuple[str, ...] = ()
    system_account: str = ""
    strict_signing_key_usage: bool = False
    version: int = 0


class AccountClaims(
    msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="account"
):
    imports: tuple[AccountImport, ...] = ()
    exports: tuple[AccountExport, ...] = ()
    limits: AccountLimits
    signing_keys: tuple[str | SigningScope, ...] = ()
    revocations: dict[str, int] = {}  # user key: every user JWT of it issued until then is void
    version: int = 0


class UserClaims(UserLimits, frozen=True, omit_defaults=True, kw_only=True, tag_field="type", tag="user"):
    issuer_account: str = ""
    tags: tuple[str, ...] = ()
    version: int = 0


class JwtClaims(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Times are integer seconds since the epoch; 0 means none."""

    jti: str = ""
    iat: int = 0
    iss: str = ""
    name: str = ""
    sub: str = ""
    exp: int = 0
    nbf: int = 0
    nats: OperatorClaims | AccountClaims | UserClaims


class _Header(msgspec.Struct, frozen=True):
    typ: str
    alg: str


_MAY_SIGN = {
    OperatorClaims: (nkeys.KeyKind.OPERATOR, nkeys.KeyKind.OPERATOR),
    AccountClaims: (nkeys.KeyKind.OPERATOR, nkeys.KeyKind.ACCOUNT),
    UserClaims: (nkeys.KeyKind.ACCOUNT, nkeys.KeyKind.USER),
}
_claims_decoder = msgspec.json.Decoder(JwtClaims)
_header_decoder = msgspec.json.Decoder(_Header)


def ends(now: float, lifetime_s: float | None) -> int | None:
    """The expiry of a document issued at ``now``; None or 0 seconds mean never."""
    if not lifetime_s:
        return None
    if not 0 < lifetime_s < _LIFETIME_S_MAX:
        raise errors.InvalidInput(f"a lifetime of {lifetime_s:g} s: expected between 0 s and a century")
    return int(now) + max(1, round(lifetime_s))


def issue(
    signer: nkeys.KeyPair,
    subject: str,
    name: str,
    nats: OperatorClaims | AccountClaims | UserClaims,
    *,
    issued_at: int,
    expires_at: int | None = None,
) -> str:
    """A signed JWT about ``subject`` (a public key)."""
    signer_kind, subject_kind = _MAY_SIGN[type(nats)]
    if signer.kind is not signer_kind:
        raise errors.InvalidInput(f"{signer.public} cannot sign this: an {signer_kind.name.lower()} key must")
    if expires_at is not None and expires_at <= issued_at:
        raise errors.InvalidInput("the document would expire before it is issued")
    claims = JwtClaims(
        iat=issued_at,
        iss=signer.public,
        name=name,
        sub=nkeys.require_kind(subject, subject_kind),
        exp=expires_at or 0,
        nats=msgspec.structs.replace(nats, version=2),
    )
    digest = hashlib.sha256(msgspec.json.encode(claims)).digest()
    claims = msgspec.structs.replace(claims, jti=base64.b32encode(digest).decode().rstrip("="))
    signed = f"{base64url.encode(_HEADER)}.{base64url.encode(msgspec.json.encode(claims))}"
    token = f"{signed}.{base64url.encode(signer.sign(signed.encode()))}"
    if len(token) > SIZE_MAX:
        raise errors.LimitExceeded(
            f"the document of {name!r} would have {len(token)} characters; brokers accept {SIZE_MAX}",
            hint="credentials that expire leave the list of revocations when they do",
        )
    return token


def read(token: str) -> JwtClaims:
    """The claims of a JWT, if its signature is that of its stated issuer. It does not check trust or time."""
    if len(token) > SIZE_MAX:
        raise errors.InvalidInput(f"not a JWT: {len(token)} characters, at most {SIZE_MAX} are accepted")
    parts = token.split(".")
    if len(parts) != 3:
        raise errors.InvalidInput("not a JWT: expected three parts with dots between them")
    try:
        header = _header_decoder.decode(base64url.decode(parts[0]))
        claims = _claims_decoder.decode(base64url.decode(parts[1]))
        signature = base64url.decode(parts[2])
    except (msgspec.MsgspecError, errors.InvalidInput, UnicodeError, RecursionError) as error:
        raise errors.InvalidInput(f"not a Muster JWT: {error}") from None
    if header != _Header("JWT", "ed25519-nkey"):
        raise errors.InvalidInput("not a Muster JWT: its algorithm must be ed25519-nkey")
    if claims.nats.version != 2:
        raise errors.InvalidInput(f"a version {claims.nats.version} JWT: only version 2 is understood")
    signer_kind, subject_kind = _MAY_SIGN[type(claims.nats)]
    nkeys.require_kind(claims.iss, signer_kind)
    nkeys.require_kind(claims.sub, subject_kind)
    nkeys.verify(claims.iss, token.rpartition(".")[0].encode(), signature)
    return claims


def verify(token: str, *, issuers: Collection[str], now: float) -> JwtClaims:
    """The claims, if one of ``issuers`` signed them and they hold at ``now``."""
    claims = read(token)
    if claims.iss not in issuers:
        raise errors.Unauthorized(f"{claims.name!r} was signed by {claims.iss}, which is not trusted here")
    if claims.exp and now >= claims.exp:
        raise errors.Unauthorized(
            f"{claims.name!r} expired {units.rounded_duration(round(now - claims.exp))} ago"
        )
    if now < claims.nbf:
        raise errors.Unauthorized(f"{claims.name!r} is not valid before {claims.nbf}")
    return claims
