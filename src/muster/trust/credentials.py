"""The credentials that a process presents to a broker: its user JWT and the seed that proves ownership.

Written in the ``.creds`` format that every NATS client reads.
"""

from __future__ import annotations

import base64
import pathlib
import re
from dataclasses import dataclass, field

from muster.core import errors
from muster.trust import jwt, nkeys, private_files
from muster.trust.permissions import roles

_BLOCK = re.compile(r"-{3,}BEGIN ([A-Z ]{1,40})-{3,}\s+([A-Za-z0-9._-]+)\s+-{3,}END \1-{3,}")
_JWT = "NATS USER JWT"
_SEED = "USER NKEY SEED"


@dataclass(frozen=True, slots=True)
class Credentials:
    user_jwt: str
    seed: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Credentials:
        """Rejects a file whose seed does not belong to its JWT: the broker would only report a wrong
        signature."""
        if len(text) > jwt.SIZE_MAX:
            raise errors.InvalidInput("not a credentials file: it is too long")
        blocks = dict(_BLOCK.findall(text))
        if _JWT not in blocks or _SEED not in blocks:
            raise errors.InvalidInput(f"not a credentials file: expected a {_JWT} and a {_SEED}")
        credentials = cls(blocks[_JWT], blocks[_SEED])
        claims = credentials.claims
        key = nkeys.KeyPair.from_seed(credentials.seed)
        if not isinstance(claims.nats, jwt.UserClaims) or key.public != claims.sub:
            raise errors.InvalidInput("damaged credentials: the seed does not belong to the JWT")
        return credentials

    @classmethod
    def load(cls, path: pathlib.Path) -> Credentials:
        return cls.parse(private_files.read_text(path, "the credentials file"))

    def render(self) -> str:
        return (
            f"-----BEGIN {_JWT}-----\n{self.user_jwt}\n------END {_JWT}------\n\n"
            "The seed below is a secret: it authenticates its holder as this user.\n\n"
            f"-----BEGIN {_SEED}-----\n{self.seed}\n------END {_SEED}------\n"
        )

    @property
    def claims(self) -> jwt.JwtClaims:
        return jwt.read(self.user_jwt)

    @property
    def identity(self) -> str:
        return self.claims.name

    @property
    def sees_connections(self) -> bool:
        """Whether it may request the connections of the account. A document without a Muster role may try."""
        user = self.claims.nats
        role = roles.role_from_tags(user.tags) if isinstance(user, jwt.UserClaims) else None
        return role is None or roles.sees_connections(role)

    def check(self, now: float) -> None:
        """Why a broker would refuse them, as far as the file itself shows: a broker does not report the
        reason."""
        jwt.verify(self.user_jwt, issuers=[self.claims.iss], now=now)

    def answer(self, nonce: str) -> bytes:
        """The signature of a broker's challenge, in the wire format."""
        return base64.b64encode(nkeys.KeyPair.from_seed(self.seed).sign(nonce.encode()))

    @property
    def public_key(self) -> str:
        return self.claims.sub

    @staticmethod
    def check_answer(public_key: str, nonce: str, answer: bytes) -> None:
        """Return if ``answer`` is that of the holder of the key; `errors.Unauthorized` otherwise."""
        try:
            signature = base64.b64decode(answer, validate=True)
        except ValueError as error:
            raise errors.Unauthorized(f"{public_key} did not sign this: {error}") from error
        nkeys.verify(public_key, nonce.encode(), signature)
